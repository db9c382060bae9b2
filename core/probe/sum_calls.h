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

// A call begins in the entry; before its slot is hijacked. tail: it shares the slot of a running call.
[[gnu::hot]] void sum_call_begins(SessionHeader* session, ThreadState* thread, uint32_t index, uint32_t site,
                                  uint64_t slot, bool tail);
// The activation of the entry ends.
[[gnu::hot]] void sum_call_ends(SessionHeader* session, ThreadState* thread, uint32_t index, ExitKind kind,
                                uint64_t now);
// The thread's alternate signal stack is another one.
void sum_signal_stack(SessionHeader* session, ThreadState* thread);
void sum_call_abandoned(SessionHeader* session, ThreadState* thread, uint32_t index, uint64_t now);
void sum_entry_only(SessionHeader* session, ThreadState* thread, uint32_t site, uint64_t slot);

}  // namespace sonde
