#include "core/probe/host_event.h"

#include "core/native/syscall.h"
#include "core/native/ticks.h"
#include "core/probe/control.h"
#include "core/probe/disarm.h"
#include "core/probe/trap_mask.h"

namespace sonde {
namespace {

struct LoaderDebug {  // struct r_debug, System V gABI and <link.h>
  int32_t version;
  uint64_t map;
  uint64_t brk;
  int32_t state;  // 0: RT_CONSISTENT
};
constexpr int32_t kConsistent = 0;

bool is_answered(const SessionHeader* session, uint32_t request) {
  return static_cast<int32_t>(__atomic_load_n(&session->answered, __ATOMIC_ACQUIRE) - request) >= 0;
}

// Waits until `done`, while the host may still see to it.
template <class Done>
bool wait_for_host(const SessionHeader* session, unsigned beats, Done done) {
  if (sonde_agent_control.flags & kControlNoTicks) return false;  // waiting takes a clock
  uint64_t timeout = session->heartbeat_timeout_ticks, begun = ticks();
  while (!done()) {
    uint64_t now = ticks(), beat = __atomic_load_n(&session->heartbeat_ticks, __ATOMIC_RELAXED);
    if (!is_recording(session)) return false;
    if (static_cast<int64_t>(now - beat) > static_cast<int64_t>(timeout)) return false;
    if (now - begun > beats * timeout) return false;
    pause_hint();
  }
  return true;
}

void ask_host(SessionHeader* session) {
  uint32_t request = __atomic_add_fetch(&session->requested, 1, __ATOMIC_RELEASE);
  wait_for_host(session, kHostWaitBeats, [&] { return is_answered(session, request); });
}

// The process that the host follows: the first that loads anything, since the loader does when the program starts. Copied by fork.
uint32_t followed_pid;

// The host decides about traps for the process that it follows, by the system calls of each image (host/plan/trap_safety.h).
// What a forked child loads it never sees.
void mind_child(uint32_t pid) {
  uint32_t nobody = 0;
  bool first = __atomic_compare_exchange_n(&followed_pid, &nobody, pid, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  if (!first && nobody != pid && !is_sharing_child()) disarm_traps(DisarmCause::child_loads);
}

}  // namespace

void loader_event(SessionHeader* session) {
  auto* debug = reinterpret_cast<const LoaderDebug*>(sonde_agent_control.loader_debug);
  if (!debug || __atomic_load_n(&debug->state, __ATOMIC_RELAXED) != kConsistent) return;
  if (traps_in_use()) mind_child(static_cast<uint32_t>(system_call(__NR_getpid)));
  ask_host(session);
}

void exit_event(SessionHeader* session, uint32_t pid) {
  // A vfork child shares its parent's memory and thread state: the calls in flight there are the parent's.
  bool may_call = !(sonde_agent_control.flags & kControlNoSystemCalls);
  if (may_call && system_call(__NR_getpid) != int64_t{pid}) return;
  auto yield = [&] {  // many processes may wait here, on the core that the host needs
    if (may_call) system_call(__NR_sched_yield);
  };
  auto take_turn = [&] {
    uint32_t nobody = 0;
    yield();
    return __atomic_compare_exchange_n(&session->exiting_pid, &nobody, pid, false, __ATOMIC_RELEASE, __ATOMIC_RELAXED);
  };
  auto is_looked_at = [&] {
    yield();
    return __atomic_load_n(&session->exiting_pid, __ATOMIC_ACQUIRE) != pid;
  };
  if (wait_for_host(session, kTurnBeats, take_turn)) wait_for_host(session, kHostWaitBeats, is_looked_at);
}

}  // namespace sonde
