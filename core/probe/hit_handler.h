// Code of the target's own that runs at hits: what shows that stacks and registers are right where a consumer stands, and what
// a library is to be made of. Internal: handlers are put into AgentControl by whoever knows the agent's symbols, and called
// for sites with kSiteHandler.
//
// A handler is ordinary code: it may use vector registers, call hooked functions, take a backtrace, be interrupted. It is called
// at entry before the return slot is hooked, at exit after the slot has its real address back and before the entry is given up
// (S12); exits noticed late (abandoned, thread ended) have no registers and call none. What it does to registers is undone, all
// of them. It needs kHandlerBytes of the program's stack and what it uses itself: none is called on an alternate signal stack with
// less. Handlers nest as context levels do, kMaxContextLevels deep (S51); what is missed is counted (S52).
#pragma once

#include <cstdint>

#include "core/event/session.h"
#include "core/probe/stack_capture.h"

namespace sonde {

enum class HitPoint : uint32_t { entry, exit };

struct Hit {
  HitPoint point;
  uint32_t site;
  ExitKind kind;  // of an exit: returned, or unwound
  uint32_t level;  // context level: 0 unless the hit interrupted another
  // entry: at the patch, sp is the address of the return slot. Exit: the caller's, as if the function had just returned.
  SiteRegs regs;
  uint64_t return_address;  // the real one
};
using HitHandler = void (*)(const Hit*);

constexpr uint64_t kHandlerBytes = 4096;

struct HitHandlers {
  HitHandler entry, exit;  // null: none
  uint64_t missed;  // hits and exits for which a handler was not called
};

// Calls the handler of hit.point, if there is one. Counts it as missed if there is no level or no room for it.
void call_handler(const ThreadState* thread, const Hit& hit);

extern "C" {
extern HitHandlers sonde_hit_handlers __attribute__((visibility("hidden")));

// core/native/*/hit_handler.S: saves and restores what compiled code may change.
__attribute__((visibility("hidden"))) void sonde_call_handler(const Hit* hit, HitHandler handler);

// Frames from `regs` outwards; how many. pc_is_return: regs.pc is where a call returns to. 0: the target has no tables.
__attribute__((visibility("hidden"))) uint32_t sonde_stack_of(const SiteRegs* regs, bool pc_is_return, Frame* frames,
                                                              uint32_t room);
// The same from where it is called, the engine's frames and all.
__attribute__((visibility("hidden"))) uint32_t sonde_stack_here(Frame* frames, uint32_t room);

// The return address that the slot stands for: what it holds, or what its hook keeps aside (S7). 0: it holds a trampoline that is
// not its own.
__attribute__((visibility("hidden"))) uint64_t sonde_return_address(const uint64_t* slot);
}

}  // namespace sonde
