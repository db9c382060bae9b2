// System calls of the program that the engine minds: kSiteSystemCall sites bring them here, from a detour or by a trap. Most are
// carried out by a call of the agent's own with other arguments, and their result is what the program gets; a few only
// tell that something is about to happen. Everything else goes on untouched. Signal-safe.
//
//   rt_sigaction                              entrances in the handlers' place (handlers.h)
//   rt_sigprocmask ... epoll_pwait2, execve   while traps are in use: SIGTRAP stays unblocked (trap_mask.h)
//   seccomp, prctl, sigaltstack               what the agent must refrain from (disarm.h, sandbox.h, alternate_stack.h)
#pragma once

#include "core/native/syscall.h"
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
  switch (number) {
    case __NR_rt_sigaction:
    case __NR_prctl:
    case __NR_seccomp:
    case __NR_sigaltstack: return true;
    case __NR_rt_sigprocmask:
    case __NR_rt_sigpending:
    case __NR_rt_sigtimedwait:
    case __NR_rt_sigsuspend:
    case __NR_ppoll:
    case __NR_pselect6:
    case __NR_epoll_pwait:
    case __NR_epoll_pwait2:
    case __NR_io_pgetevents:
    case __NR_execve:
    case __NR_execveat:
    case __NR_exit:
    case __NR_exit_group:
    case __NR_clone:
    case __NR_clone3:
    case __NR_fork:
    case __NR_vfork: return traps_in_use();
    default: return false;
  }
}

// True: carried out, *result is what the kernel would have left in the result's register. False: to be made by the program.
bool mind_system_call(const ProgramCall& call, int64_t* result);

}  // namespace sonde
