// System calls of the program that the engine minds: kSiteSystemCall sites bring them here, from a detour or by a trap. Most are
// carried out by a call of the agent's own with other arguments, and their result is what the program gets; a few only
// tell that something is about to happen. Everything else goes on untouched. Signal-safe.
//
//   rt_sigaction                              entrances in the handlers' place (handlers.h)
//   rt_sigprocmask ... epoll_pwait2, execve   while traps are in use: SIGTRAP stays unblocked (trap_mask.h)
//   ptrace                                    a process that wants to be traced: its tracer would see the traps
//   seccomp, prctl, sigaltstack               what the agent must refrain from (disarm.h, sandbox.h, alternate_stack.h)
#pragma once

#include "core/native/syscall.h"
#include "core/probe/minded_calls.h"
#include "core/probe/signal_abi.h"
#include "core/probe/trap_mask.h"

namespace sonde {

constexpr uint64_t kSystemCallBytes = 2;  // of the instruction

struct ProgramCall {
  uint64_t number;
  uint64_t arguments[6];
  // Brought here by a trap: what the kernel restores afterwards, mask and alternate stack too. Null: from a detour.
  SignalContext* context;
};

// Whether the call must be shown to mind_system_call: as quick as can be, for all calls come by here.
inline bool is_minded(uint64_t number) {
  return is_minded_always(number) || (is_minded_with_traps(number) && traps_in_use());
}

// What the kernel would have left in the result's register; kNotCarriedOut: to be made by the program.
constexpr int64_t kNotCarriedOut = INT64_MIN;
int64_t mind_system_call(const ProgramCall& call);

}  // namespace sonde
