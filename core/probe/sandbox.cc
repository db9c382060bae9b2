#include "core/probe/sandbox.h"

#include <asm/unistd.h>

#include "core/native/syscall.h"
#include "core/probe/control.h"
#include "core/probe/disarm.h"
#include "core/probe/trap_mask.h"

namespace sonde {

void lock_in(bool strict, SignalContext* context) {
  // Not traps_in_use(): a site on prctl() itself may have told already that no more calls are to be made.
  uint32_t flags = __atomic_load_n(&sonde_agent_control.flags, __ATOMIC_RELAXED);
  if ((flags & (kControlTraps | kControlDisarmed)) == kControlTraps) {
    if (!strict) disarm_traps(DisarmCause::seccomp);
    // The kernel gets the thread's true mask: nothing is done behind the program's back any more.
    uint64_t trap = kTrapBit;
    if (trap_blocked()) {
      if (context) context->mask |= kTrapBit;
      else system_call(__NR_rt_sigprocmask, kBlock, reinterpret_cast<uint64_t>(&trap), 0, kMaskBytes);
    }
  }
  if (strict) forbid_ticks();
  __atomic_fetch_or(&sonde_agent_control.flags, uint32_t{kControlNoSystemCalls}, __ATOMIC_RELAXED);
}

void sandbox_event(bool is_syscall, uint64_t rdi, uint64_t rsi) {
  constexpr uint64_t kSetSeccomp = 22;  // PR_SET_SECCOMP, <linux/prctl.h>
  bool locks = is_syscall ? rdi == __NR_seccomp || (rdi == __NR_prctl && rsi == kSetSeccomp) : rdi == kSetSeccomp;
  if (locks) __atomic_fetch_or(&sonde_agent_control.flags, uint32_t{kControlNoSystemCalls}, __ATOMIC_RELAXED);
}

}  // namespace sonde
