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

constexpr unsigned kHitFrames = 128;  // deeper stacks are cut, and their last frame says buffer_full

constexpr unsigned kParkedRings = 15;
// Where a walk keeps its frames. Taken for one walk and its record: its path may be interrupted, by a handler that goes on with
// another context of the program, whose hits walk too.
struct WalkPlace {
  uint64_t holder;  // WalkHold::ticket() with the context level + 1 in the lowest byte; 0: free
  union {
    Frame frames[kHitFrames];
    uint64_t packed[kHitFrames];
  };
};
constexpr unsigned kWalkPlaces = kMaxContextLevels;

// Lie behind the thread states in AgentControl::thread_area; a state gets one when it is first used.
struct ThreadScratch {
  AddrRange stacks[3];  // known to be mapped
  bool to_its_end[3];  // nothing is mapped behind it: near its end there is no more to be known
  uint32_t next_stack;
  RingHeader* parked[kParkedRings];  // see park_ring in thread.h
  // Context levels whose paths are suspected to be gone: what lies at their sp, when first seen.
  uint64_t saved[kMaxContextLevels];
  uint32_t next_look;  // hits until suspects are looked at again
  bool unguarded;  // a path that may go on has lost its level, or never had one
  AddrRange alternate;  // the program's alternate signal stack, see alternate_stack.h; empty: none
  WalkPlace walks[kWalkPlaces];
};

// At the end of the area: a forked child finds it empty, a child that shares memory does not (trap_mask.h).
struct ProcessMark {
  uint32_t pid;  // 0: not yet asked for
  uint32_t scratches;  // given to thread states
  uint64_t
      begun_ticks;  // when its first thread registered: calls that began before are its parent's, see ExitKind::inherited
  uint64_t first_sp;  // of that thread, then: in a forked child the one that forked
};

constexpr uint64_t thread_area_bytes() {
  return kThreadSlots * sizeof(ThreadState) + kMaxThreads * sizeof(ThreadScratch) + sizeof(ProcessMark);
}

inline ThreadScratch* thread_scratch(void* area, const ThreadState* thread) {
  return reinterpret_cast<ThreadScratch*>(static_cast<ThreadState*>(area) + kThreadSlots) + (thread->scratch - 1);
}

inline ProcessMark* process_mark(void* area) {
  return reinterpret_cast<ProcessMark*>(static_cast<char*>(area) + thread_area_bytes() - sizeof(ProcessMark));
}

// What the caller of the site's function left in the registers that functions preserve, and where the site is.
struct SiteRegs {
  uint64_t pc, sp, rbp, rbx, r12, r13, r14, r15;
};

// Frames from `regs` outwards into `out`, for a handler that asks; how many. pc_is_return: regs.pc is where a call returns to.
unsigned stack_from(ThreadScratch* scratch, const SiteRegs& regs, bool pc_is_return, std::span<Frame> out);

// Holds a place while it lives, if there is one.
class WalkHold {
 public:
  WalkHold(ThreadScratch* scratch, unsigned level);
  ~WalkHold() {
    if (place_ && !is_lost()) __atomic_store_n(&place_->holder, 0, __ATOMIC_RELAXED);
  }
  WalkHold(const WalkHold&) = delete;
  WalkHold& operator=(const WalkHold&) = delete;
  WalkPlace* place() const { return place_; }  // null: none was free
  // Whether the place was taken away, by whoever took this path for one that is gone.
  bool is_lost() const { return __atomic_load_n(&place_->holder, __ATOMIC_RELAXED) >> 8 != ticket() >> 8; }

 private:
  // Two paths that may go on are never at the same address.
  uint64_t ticket() const { return reinterpret_cast<uint64_t>(this) << 8; }

  WalkPlace* place_ = nullptr;
};

// The level's path is gone: its place is free. Or it has lost its level and may go on: it keeps its place.
void give_up_walk(ThreadScratch* scratch, unsigned level, bool gone);

// Where there is no room for a walk: the site alone, marked.
std::span<const uint64_t> site_alone(WalkPlace* place, const SiteRegs& regs);

// The frames from the site outwards, packed. Empty if the target has no tables.
std::span<const uint64_t> capture_stack(ThreadScratch* scratch, WalkPlace* place, const SiteRegs& regs);

}  // namespace sonde
