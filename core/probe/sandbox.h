// The program is about to lock itself in: seccomp. From then on a system call of the agent might end it, so the agent makes
// none (kControlNoSystemCalls), and the traps go, which need one more. Strict mode also takes the time stamp counter away.
//
// Not seen: a filter installed by a system call instruction that is no site.
#pragma once

#include <cstdint>

#include "core/probe/signal_abi.h"

namespace sonde {

// context: of the trap that brought the call here, or null.
void lock_in(bool strict, SignalContext* context);

// By a site on the entry of prctl() or syscall(). rdi, rsi: the function's first two arguments. is_syscall: it is
// syscall(number, ...), not prctl(option, ...).
void sandbox_event(bool is_syscall, uint64_t rdi, uint64_t rsi);

}  // namespace sonde
