// Takes back return entries whose activations were left by longjmp, or whose threads are gone: see entries.cc.
#pragma once

#include "core/probe/thread.h"

namespace sonde {

// Looks at the whole pool (milliseconds): called only when it is exhausted, and seldom when looking does not help. The
// caller holds the thread's outermost context level. Returns how many entries became free; the thread's own ones
// get an `abandoned` call record.
uint32_t reclaim_entries(SessionHeader* session, ThreadState* thread);

}  // namespace sonde
