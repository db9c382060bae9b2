// Takes back return entries whose activations were left by longjmp, or whose threads are gone: see entries.cc.
#pragma once

#include "core/probe/thread.h"

namespace sonde {

// Entries that a path had in its hands when a signal handler jumped away over it: free, and in no list. Puts some of the
// thread's own back into its list, which is empty, and returns how many. The caller holds its outermost context level. None while
// another path of the thread waits, which may have one of them in its hands.
uint32_t find_lost_entries(ThreadState* thread);

// Looks at the whole pool (milliseconds): called only when it is exhausted, and seldom when looking does not help. The
// caller holds the thread's outermost context level. Returns how many entries became free; the thread's own ones
// get an `abandoned` call record.
uint32_t reclaim_entries(SessionHeader* session, ThreadState* thread);

}  // namespace sonde
