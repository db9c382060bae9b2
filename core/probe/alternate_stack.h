// A handler of the program may run on an alternate signal stack with hardly more room than its signal frame takes, and
// what lies below may be anything. The rare and deep paths of the engine (a walk, a look through the pool) therefore ask
// first whether there is room. The stack is known from the kernel when the thread registers, then from the program's calls
// of sigaltstack(), by a site on its entry. Not seen: a system call instruction of the program's own.
//
// The same for small stacks of coroutines that makecontext() was given. What it was not given is not known. Signal-safe.
#pragma once

#include "core/probe/stack_capture.h"

namespace sonde {

// What the deep paths need at most, signal frames of nested handlers aside (they are the program's own need).
constexpr uint64_t kDeepPathBytes = 5120;
constexpr uint64_t kSumPathBytes = 1536;  // a hit that is summed

// The last ones of at most kSmallStackBytes, of the process. A larger stack or a new one in their place takes them out.
constexpr uint64_t kSmallStackBytes = 16384;
constexpr uint32_t kSmallStacks = 256;
struct SmallStacks {
  AddrRange ranges[kSmallStacks];
  uint32_t known;  // ever; the next one's place is this modulo kSmallStacks
  bool any;  // these, or alternate stacks: else all have room
};
extern SmallStacks small_stacks;
void remember_coroutine_stack(AddrRange stack);
bool has_room_on_small_stack(uint64_t sp, uint64_t bytes);

inline bool has_room(const ThreadScratch* scratch, uint64_t sp, uint64_t bytes = kDeepPathBytes) {
  if (__builtin_expect(!small_stacks.any, 1)) return true;
  if (scratch->alternate.contains(Addr(sp)) && sp - scratch->alternate.begin.value < bytes) return false;
  return __builtin_expect(!small_stacks.known, 1) || has_room_on_small_stack(sp, bytes);
}

// The thread's alternate stack as the kernel has it.
void ask_alternate_stack(ThreadScratch* scratch);
// The thread calls sigaltstack(): stack is its first argument, a stack_t or null, wherever it may point.
void alternate_stack_event(ThreadScratch* scratch, uint64_t stack);

}  // namespace sonde
