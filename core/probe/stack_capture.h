// A stack for a hit: walked in the target from the site's own registers, so that the probed function comes first and
// no frame of the engine is in it.
//
// Memory: the thread's stack around the site is read directly once it is known to be mapped, page by page, by one
// system call; everything else through safe_read.h. Where the program's sandbox forbids system calls only the page that
// holds sp is known, and a walk that needs more ends with stack_out_of_range. Signal-safe.
#pragma once

#include <span>

#include "core/base/addr.h"
#include "core/isa/regset.h"
#include "core/probe/control.h"
#include "core/probe/thread.h"
#include "core/walk/frame.h"
#include "core/walk/row_cache.h"

namespace sonde {

constexpr unsigned kHitFrames = 128;  // deeper stacks are cut, and their last frame says depth_limit

constexpr unsigned kParkedRings = 15;
constexpr unsigned kWalks = 4;  // places for walks; levels beyond share them, see CapturedStack

// Lies behind the thread states in AgentControl::thread_area, one for each.
struct ThreadScratch {
  AddrRange stacks[3];  // known to be mapped
  bool to_its_end[3];  // nothing is mapped behind it: near its end there is no more to be known
  uint32_t next_stack;
  uint64_t turns[kWalks];  // walks begun, by place
  RingHeader* parked[kParkedRings];  // see park_ring in thread.h
  // Context levels whose paths are suspected to be gone: what lies at their sp, when first seen.
  uint64_t saved[kMaxContextLevels];
  uint32_t next_look;  // hits until suspects are looked at again
  bool unguarded;  // a path that may go on has lost its level, or never had one
  AddrRange alternate;  // the program's alternate signal stack, see alternate_stack.h; empty: none
  union {
    Frame frames[kHitFrames];
    uint64_t packed[kHitFrames];
  } walks[kWalks];
};

// At the end of the area: a forked child finds it empty, a child that shares memory does not (trap_mask.h).
struct ProcessMark {
  uint32_t pid;  // 0: not yet asked for
  uint32_t reserved;
};

constexpr uint64_t thread_area_bytes() {
  return uint64_t{kThreadSlots} * (sizeof(ThreadState) + sizeof(ThreadScratch)) + sizeof(ProcessMark);
}

inline ThreadScratch* thread_scratch(void* area, const ThreadState* thread) {
  auto* states = static_cast<ThreadState*>(area);
  return reinterpret_cast<ThreadScratch*>(states + kThreadSlots) + (thread - states);
}

// What the caller of the site's function left in the registers that functions preserve, and where the site is.
struct SiteRegs {
  uint64_t pc, sp, rbp, rbx, r12, r13, r14, r15;
};

// Frames from `regs` outwards into `out`, for a handler that asks; how many. pc_is_return: regs.pc is where a call returns to.
unsigned stack_from(ThreadScratch* scratch, const SiteRegs& regs, bool pc_is_return, std::span<Frame> out);

// In one of the scratch's places for walks. Levels share them, and a handler may go on to another stack of the program's own
// making, whose hits take this path for one left for ever, and its level: others may write there before this one has copied what it
// has found.
struct CapturedStack {
  std::span<const uint64_t> frames;  // packed; empty if the target has no tables
  const uint64_t* turns;  // the place's
  uint64_t turn;
  bool is_overtaken() const { return __atomic_load_n(turns, __ATOMIC_RELAXED) != turn; }
};

// Where there is no room for a walk: the site alone, marked.
CapturedStack site_alone(ThreadScratch* scratch, unsigned level, const SiteRegs& regs);

// The frames from the site outwards.
CapturedStack capture_stack(ThreadScratch* scratch, unsigned level, const SiteRegs& regs);

}  // namespace sonde
