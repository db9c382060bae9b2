#include "core/probe/sandbox.h"

#include <asm/unistd.h>

#include "core/probe/control.h"

namespace sonde {

void sandbox_event(bool is_syscall, uint64_t rdi, uint64_t rsi) {
  constexpr uint64_t kSetSeccomp = 22;  // PR_SET_SECCOMP, <linux/prctl.h>
  bool locks = is_syscall ? rdi == __NR_seccomp || (rdi == __NR_prctl && rsi == kSetSeccomp) : rdi == kSetSeccomp;
  if (locks) __atomic_fetch_or(&sonde_agent_control.flags, uint32_t{kControlNoSystemCalls}, __ATOMIC_RELAXED);
}

}  // namespace sonde
