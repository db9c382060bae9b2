// The program is about to lock itself in: seccomp, through libc's prctl() or syscall(). From then on a system call of the
// agent might end it, so the agent makes none (kControlNoSystemCalls). Sites on both functions bring their arguments here.
//
// Not seen: a filter installed by a system call instruction of the program's own. Not survived: seccomp's strict mode and
// PR_SET_TSC, which take the time stamp away that every hit reads.
#pragma once

#include <cstdint>

namespace sonde {

// rdi, rsi: the function's first two arguments. is_syscall: it is syscall(number, ...), not prctl(option, ...).
void sandbox_event(bool is_syscall, uint64_t rdi, uint64_t rsi);

}  // namespace sonde
