// A handler of the program may run on an alternate signal stack with hardly more room than its signal frame takes, and
// what lies below may be anything. The rare and deep paths of the engine (a walk, a look through the pool) therefore ask
// first whether there is room. The stack is known from the kernel when the thread registers, then from the program's calls
// of sigaltstack(), by a site on its entry. Not seen: a system call instruction of the program's own. Signal-safe.
#pragma once

#include "core/probe/stack_capture.h"

namespace sonde {

// What the deep paths need at most, signal frames of nested handlers aside (they are the program's own need).
constexpr uint64_t kDeepPathBytes = 5120;
constexpr uint64_t kSumPathBytes = 1536;  // a hit that is summed

inline bool has_room(const ThreadScratch* scratch, uint64_t sp, uint64_t bytes = kDeepPathBytes) {
  return !scratch->alternate.contains(Addr(sp)) || sp - scratch->alternate.begin.value >= bytes;
}

// The thread's alternate stack as the kernel has it.
void ask_alternate_stack(ThreadScratch* scratch);
// The thread calls sigaltstack(): stack is its first argument, a stack_t or null, wherever it may point.
void alternate_stack_event(ThreadScratch* scratch, uint64_t stack);

}  // namespace sonde
