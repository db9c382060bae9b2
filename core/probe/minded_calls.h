// The system calls that the agent minds, for both sides: the host makes sites of the instructions that may make one, and the
// agent's sites ask here. Numbers: arch/x86/entry/syscalls/syscall_64.tbl.
#pragma once

#include <asm/unistd.h>

#include <cstdint>

namespace sonde {

// Whether or not there are traps: handlers, and what the agent must refrain from.
constexpr bool is_minded_always(uint64_t number) {
  switch (number) {
    case __NR_rt_sigaction:
    case __NR_prctl:
    case __NR_seccomp:
    case __NR_sigaltstack: return true;
    default: return false;
  }
}

// About the calling thread's mask. When the traps are gone they are the kernel's alone.
constexpr bool is_mask_call(uint64_t number) {
  switch (number) {
    case __NR_rt_sigprocmask:
    case __NR_rt_sigpending:
    case __NR_rt_sigtimedwait:
    case __NR_rt_sigsuspend:
    case __NR_ppoll:
    case __NR_pselect6:
    case __NR_epoll_pwait:
    case __NR_epoll_pwait2:
    case __NR_io_pgetevents:
    case __NR_io_uring_enter: return true;
    default: return false;
  }
}

// While traps are in use: masks, what a child or a new program inherits of them, and who is traced.
constexpr bool is_minded_with_traps(uint64_t number) {
  if (is_mask_call(number)) return true;
  switch (number) {
    case __NR_execve:
    case __NR_execveat:
    case __NR_exit:
    case __NR_exit_group:
    case __NR_ptrace:
    case __NR_clone:
    case __NR_clone3:
    case __NR_fork:
    case __NR_vfork: return true;
    default: return false;
  }
}

}  // namespace sonde
