#include "core/probe/loader_event.h"

#include "core/native/ticks.h"
#include "core/probe/control.h"

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

}  // namespace

void loader_event(SessionHeader* session) {
  auto* debug = reinterpret_cast<const LoaderDebug*>(sonde_agent_control.loader_debug);
  if (!debug || __atomic_load_n(&debug->state, __ATOMIC_RELAXED) != kConsistent) return;
  uint32_t request = __atomic_add_fetch(&session->requested, 1, __ATOMIC_RELEASE);
  uint64_t timeout = session->heartbeat_timeout_ticks, begun = ticks();
  while (!is_answered(session, request)) {
    uint64_t now = ticks(), beat = __atomic_load_n(&session->heartbeat_ticks, __ATOMIC_RELAXED);
    if (__atomic_load_n(&session->state, __ATOMIC_RELAXED) != static_cast<uint32_t>(SessionState::recording)) return;
    if (static_cast<int64_t>(now - beat) > static_cast<int64_t>(timeout)) return;
    if (now - begun > kLoaderWaitBeats * timeout) return;
    pause_hint();
  }
}

}  // namespace sonde
