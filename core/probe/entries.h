// The pool of return entries. Entry i belongs to return trampoline i (core/native/*/trampolines.S) and stands for one
// activation of a hooked function: the real return address and the slot it was taken from; beside it, what the call
// record will need. Private memory of the process: fork copies it together with the stacks that refer to it.
//
// Taken from the thread's own free list, then from the common one, then from entries never used, then by looking for those
// that a longjmp left behind. Given back to the list of the thread that ends the activation, which
// need not be the one that began it (fibers migrate). A free entry keeps its address until it is taken again. Signal-safe.
#pragma once

#include <cstdint>

#include "core/probe/control.h"
#include "core/probe/thread.h"

namespace sonde {

// One row each per trampoline; the assembly knows where they lie from it (core/native/x86_64/offsets.h).
struct ReturnEntry {
  uint64_t real;  // return address of the activation, never one of our trampolines
  uint64_t slot;  // address of the return slot
};
struct ActiveCall {
  uint64_t entry_ticks;
  uint32_t site;
  uint32_t link;  // in use: index + 1 of the older activation on the same slot (tail call), or 0. Free: see entry_push
};
enum class EntryState : uint32_t { free = 0, in_use = 1 };
struct Ownership {
  // The thread, if the usual path may end the activation: there it says that nothing is special about it.
  const ThreadState* usual;
  uint32_t owner;  // tid of the thread that took it, or in whose list it is; 0: in the common list
  EntryState state;
};
struct EntryTarget {
  uint64_t target;  // where the call in front of the trampoline leads
  uint64_t reserved;
};
struct ActivationNotes {  // what only the rare paths read
  uint32_t chain;  // with a link: how many older activations share the slot; see entry_chain
  uint32_t afterwards;  // of kNoSite: what is to be done, see handlers.cc
  uint64_t resume;  // while unwinding leaves it: the unwinder's _Unwind_Resume; of kNoSite: pc in the detour
};
static_assert(sizeof(ReturnEntry) == kTrampolineStride && sizeof(ActiveCall) == kTrampolineStride);
static_assert(sizeof(Ownership) == kTrampolineStride && sizeof(EntryTarget) == kTrampolineStride);

// ActiveCall::site of an entry that is no call: a signal handler's return, after which its context is put right.
constexpr uint32_t kNoSite = ~0u;

// Ownership::owner of such an entry has this bit beside the thread's id: no tid is so large. Only the way that ends other
// threads' activations looks at site and bit, so a call's costs nothing for it.
constexpr uint32_t kHandlerOwner = 1u << 31;

extern "C" {
extern ReturnEntry sonde_entries[kTrampolines] __attribute__((visibility("hidden")));
extern ActiveCall sonde_calls[kTrampolines] __attribute__((visibility("hidden")));
extern Ownership sonde_owners[kTrampolines] __attribute__((visibility("hidden")));
extern EntryTarget sonde_targets[kTrampolines] __attribute__((visibility("hidden")));
extern ActivationNotes sonde_notes[kTrampolines] __attribute__((visibility("hidden")));
extern uint32_t sonde_fresh_entries __attribute__((visibility("hidden")));
extern const char sonde_trampolines[] __attribute__((visibility("hidden")));
extern const char sonde_landing_pad __attribute__((visibility("hidden")));
}

// Ownership::usual of activations that the full path must end.
extern const ThreadState no_usual_thread;

constexpr uint32_t kNoEntry = ~0u;
inline uint32_t entry_chain(uint32_t index) { return sonde_calls[index].link ? sonde_notes[index].chain : 0; }
constexpr uint32_t kMaxTailChain = 64;  // activations on one slot; then a new one takes the place of the newest

inline uint64_t trampoline_address(uint32_t index) {
  return reinterpret_cast<uint64_t>(sonde_trampolines) + uint64_t{index} * kTrampolineStride;
}
inline bool is_trampoline(uint64_t address) {
  uint64_t offset = address - reinterpret_cast<uint64_t>(sonde_trampolines);
  return offset < uint64_t{kTrampolines} * kTrampolineStride && offset % kTrampolineStride == 0;
}
inline uint32_t trampoline_index(uint64_t address) {
  return static_cast<uint32_t>((address - reinterpret_cast<uint64_t>(sonde_trampolines)) / kTrampolineStride);
}

// Own free list. Entries are named by numbers: the trampoline's offset in the table plus one stride, 0 is none. The list
// word holds the first one's number in the upper half and in the lower how often something was put on, which makes the
// compare-exchange fail if a signal handler used the list in between, whatever it left as the first. A free entry's
// link is what its number lacks to the next one's.
inline uint32_t list_number(uint32_t index) { return (index + 1) * kTrampolineStride; }
inline uint32_t list_first(uint64_t list) { return static_cast<uint32_t>(list >> 32); }
inline uint64_t list_without(uint64_t list, uint32_t link) { return list + (uint64_t{link} << 32); }
inline uint64_t list_with(uint64_t list, uint32_t number) {
  return uint64_t{number} << 32 | static_cast<uint32_t>(list + 1);
}

inline uint32_t entry_pop(uint64_t* list) {
  uint64_t head = __atomic_load_n(list, __ATOMIC_RELAXED);
  while (uint32_t first = list_first(head)) {
    uint32_t index = first / kTrampolineStride - 1;
    if (local_compare_exchange(list, &head, list_without(head, sonde_calls[index].link))) return index;
  }
  return kNoEntry;
}
inline void entry_push(uint64_t* list, uint32_t index) {
  uint64_t head = __atomic_load_n(list, __ATOMIC_RELAXED);
  uint32_t number = list_number(index);
  do sonde_calls[index].link = list_first(head) - number;
  while (!local_compare_exchange(list, &head, list_with(head, number)));
}

// When the own list is empty. may_reclaim: this hit interrupted no other of its thread. kNoEntry: the pool is exhausted.
uint32_t entry_take_slow(SessionHeader* session, ThreadState* thread, bool may_reclaim);
inline uint32_t entry_take(SessionHeader* session, ThreadState* thread, bool may_reclaim) {
  uint32_t index = entry_pop(&thread->free_entries);
  return __builtin_expect(index != kNoEntry, 1) ? index : entry_take_slow(session, thread, may_reclaim);
}

// Ends an activation of another thread (or one taken before a fork) exactly once, against its owner's reclaiming.
inline bool entry_claim(uint32_t index) {
  EntryState expected = EntryState::in_use;
  return __atomic_compare_exchange_n(&sonde_owners[index].state, &expected, EntryState::free, false, __ATOMIC_ACQ_REL,
                                     __ATOMIC_RELAXED);
}

// A thread keeps about so many for itself. Activations that begin when it holds more (a deep recursion) are ended by the full
// path, which gives their entries to all.
constexpr uint32_t kKeepFree = 1024;
inline bool holds_many(const ThreadState* thread) { return thread->held_entries > kKeepFree; }
void entry_give_common(uint32_t index);
// The entry is free (state) and its slot is corrected. thread: null if the thread has no state.
inline void entry_give(ThreadState* thread, uint32_t index) {
  if (__builtin_expect(!thread, 0)) return entry_give_common(index);
  bool own = (sonde_owners[index].owner & ~kHandlerOwner) == thread->tid;
  if (__builtin_expect(holds_many(thread), 0)) {
    if (own) thread->held_entries--;
    return entry_give_common(index);
  }
  if (__builtin_expect(!own, 0)) thread->held_entries++;
  sonde_owners[index].owner = thread->tid;
  entry_push(&thread->free_entries, index);
}

}  // namespace sonde
