// The pool of return entries. Entry i belongs to return trampoline i (core/native/*/trampolines.S) and stands for one
// activation of a hooked function: the real return address and the slot it was taken from; beside it, what the call
// record will need. Private memory of the process: fork copies it together with the stacks that refer to it.
//
// Taken from the thread's own free list, then from the common one, then from entries never used, then by reclaiming
// entries whose activation was left by longjmp. Given back to the list of the thread that ends the activation, which
// need not be the one that began it (fibers migrate). A free entry keeps its address until it is taken again. Signal-safe.
#pragma once

#include <cstdint>

#include "core/probe/control.h"
#include "core/probe/thread.h"

namespace sonde {

struct ReturnEntry {
  uint64_t real;  // return address of the activation, never one of our trampolines
  uint64_t slot;  // address of the return slot
};
static_assert(sizeof(ReturnEntry) == kTrampolineStride);

// Activation::site of an entry that is no call: a signal handler's return, after which its context is put right.
constexpr uint32_t kNoSite = ~0u;

// Activation::owner of such an entry has this bit beside the thread's id: no tid is so large. Only the way that ends other
// threads' activations looks at site and bit, so a call's costs nothing for it.
constexpr uint32_t kHandlerOwner = 1u << 31;

enum class EntryState : uint32_t { free = 0, in_use = 1 };

struct Activation {
  uint64_t entry_ticks;
  uint32_t site;
  uint32_t link;  // index + 1 or 0. In use: the older activation on the same slot (tail call). Free: the next free one
  uint32_t owner;  // tid of the thread that took it
  EntryState state;
  uint32_t chain;  // how many older activations share the slot
  uint32_t reserved;  // of kNoSite: what is to be done, see handlers.cc
  uint64_t resume;  // while unwinding leaves it: the unwinder's _Unwind_Resume; of kNoSite: pc in the detour
};
static_assert(sizeof(Activation) == 40);

extern "C" {
extern ReturnEntry sonde_entries[kTrampolines] __attribute__((visibility("hidden")));
extern Activation sonde_activations[kTrampolines] __attribute__((visibility("hidden")));
extern uint32_t sonde_fresh_entries __attribute__((visibility("hidden")));
extern const char sonde_trampolines[] __attribute__((visibility("hidden")));
extern const char sonde_landing_pad __attribute__((visibility("hidden")));
}

constexpr uint32_t kNoEntry = ~0u;
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

// Own free list. The list word is {change count, index + 1}: the count makes the compare-exchange fail if a signal handler
// used the list in between, whatever it left at its head.
inline uint32_t entry_pop(uint64_t* list) {
  uint64_t head = __atomic_load_n(list, __ATOMIC_RELAXED);
  while (uint32_t first = static_cast<uint32_t>(head)) {
    uint32_t next = sonde_activations[first - 1].link;
    if (local_compare_exchange(list, &head, ((head >> 32) + 1) << 32 | next)) return first - 1;
  }
  return kNoEntry;
}
inline void entry_push(uint64_t* list, uint32_t index) {
  uint64_t head = __atomic_load_n(list, __ATOMIC_RELAXED);
  do sonde_activations[index].link = static_cast<uint32_t>(head);
  while (!local_compare_exchange(list, &head, ((head >> 32) + 1) << 32 | (index + 1)));
}

// When the own list is empty. may_reclaim: this hit interrupted no other of its thread. kNoEntry: the pool is exhausted.
uint32_t entry_take_slow(SessionHeader* session, ThreadState* thread, bool may_reclaim);
inline uint32_t entry_take(SessionHeader* session, ThreadState* thread, bool may_reclaim) {
  uint32_t index = entry_pop(&thread->free_entries);
  if (__builtin_expect(index == kNoEntry, 0)) return entry_take_slow(session, thread, may_reclaim);
  thread->free_count--;
  return index;
}

// Ends an activation of another thread (or one taken before a fork) exactly once, against its owner's reclaiming.
inline bool entry_claim(uint32_t index) {
  EntryState expected = EntryState::in_use;
  return __atomic_compare_exchange_n(&sonde_activations[index].state, &expected, EntryState::free, false,
                                     __ATOMIC_ACQ_REL, __ATOMIC_RELAXED);
}

constexpr int32_t kKeepFree = 1024;  // a thread's list grows no longer than about this
void entry_give_common(uint32_t index);
// The entry is free (state) and its slot is corrected. thread: null if the thread has no state.
inline void entry_give(ThreadState* thread, uint32_t index) {
  if (__builtin_expect(!thread || thread->free_count >= kKeepFree, 0)) return entry_give_common(index);
  thread->free_count++;
  entry_push(&thread->free_entries, index);
}

}  // namespace sonde
