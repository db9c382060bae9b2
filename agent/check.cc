// A failed invariant in the target: the reason goes into the session, nothing is recorded any more, the program lives.
// Calls already hooked still return through their entries.
#include "core/base/check.h"

#include "core/probe/control.h"

namespace sonde {
namespace {

unsigned append(char* to, unsigned at, unsigned size, const char* text) {
  while (*text && at + 1 < size) to[at++] = *text++;
  return at;
}

}  // namespace

void check_failed(const char* file, int line, const char* condition) {
  SessionHeader* session = sonde_agent_control.session;
  if (!session) return;
  uint32_t recording = static_cast<uint32_t>(SessionState::recording);
  if (!__atomic_compare_exchange_n(&session->state, &recording, static_cast<uint32_t>(SessionState::stopped), false,
                                   __ATOMIC_ACQ_REL, __ATOMIC_RELAXED))
    return;  // the first reason stays
  char digits[12];
  unsigned first = sizeof digits - 1;
  digits[first] = 0;
  for (unsigned rest = static_cast<unsigned>(line); rest && first; rest /= 10)
    digits[--first] = static_cast<char>('0' + rest % 10);
  unsigned size = sizeof session->check_reason;
  unsigned at = append(session->check_reason, 0, size, file);
  at = append(session->check_reason, at, size, ":");
  at = append(session->check_reason, at, size, digits + first);
  at = append(session->check_reason, at, size, ": ");
  at = append(session->check_reason, at, size, condition);
  session->check_reason[at] = 0;
}

}  // namespace sonde
