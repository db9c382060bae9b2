// Summing in the target (session policy `sum`): joins the threads' trees (core/event/sum.h) with return entries and rings.
// The tree lies where the records of the thread's ring would. Signal-safe.
#pragma once

#include "core/event/sum.h"
#include "core/probe/entries.h"

namespace sonde {

extern "C" {
extern SumCall sonde_sum_calls[kTrampolines] __attribute__((visibility("hidden")));
}

inline bool is_summing(const SessionHeader* session) { return session->policy == FullPolicy::sum; }

// slot: of the call that comes first.
void sum_prepare_area(SessionHeader* session, ThreadState* thread, uint64_t slot);
inline SumArea* sum_area(SessionHeader* session, ThreadState* thread, uint64_t slot) {
  auto* area = reinterpret_cast<SumArea*>(ring_data(thread->ring));
  if (__builtin_expect(!area->process, 0)) sum_prepare_area(session, thread, slot);
  return area;
}

// A call begins in the entry; before its slot is hijacked. tail: it shares the slot of a running call.
inline void sum_call_begins(SessionHeader* session, ThreadState* thread, uint32_t index, uint32_t site, uint64_t slot,
                            bool tail) {
  sum_begin(sum_area(session, thread, slot), sonde_sum_calls, index, site, slot, tail);
}
inline void sum_call_ends(SessionHeader* session, ThreadState* thread, uint32_t index, uint32_t site, ExitKind kind,
                          uint64_t duration) {
  sum_end(sum_area(session, thread, sonde_sum_calls[index].slot), sonde_sum_calls, index, site, kind, duration);
}

}  // namespace sonde
