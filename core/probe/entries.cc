// The rare paths of the pool: common free list, fresh entries, reclaiming.
//
// Reclaiming: an activation left by longjmp never ends by itself. It is suspected when its slot no longer holds its
// trampoline and no newer activation on that slot leads to it. Suspected only, because a program may keep copies of stacks
// (greenlets) and put one back. So nothing is reclaimed before the pool is exhausted, then the older half of the
// suspects; and only entries of the calling thread or of threads that are gone, since of others the slot may just be
// about to be written.
#include "core/probe/entries.h"

#include "core/base/check.h"
#include "core/native/syscall.h"
#include "core/native/ticks.h"
#include "core/probe/reclaim.h"

namespace sonde {

extern "C" {
// Their places: agent/layout.ld.
__attribute__((used, section(".bss.sonde_entries"))) ReturnEntry sonde_entries[kTrampolines];
__attribute__((used, section(".bss.sonde_calls"))) ActiveCall sonde_calls[kTrampolines];
__attribute__((used, section(".bss.sonde_owners"))) Ownership sonde_owners[kTrampolines];
__attribute__((used, section(".bss.sonde_targets"))) EntryTarget sonde_targets[kTrampolines];
ActivationNotes sonde_notes[kTrampolines];
uint32_t sonde_fresh_entries;  // entries [sonde_fresh_entries, kTrampolines) have never been taken
}

constinit const ThreadState no_usual_thread = [] {
  ThreadState none{};
  none.usual_key = ~uint64_t{0};  // no thread pointer is that
  return none;
}();

namespace {

uint64_t common_entries;  // as ThreadState::free_entries, shared by all threads

uint32_t pop_common() {
  uint64_t head = __atomic_load_n(&common_entries, __ATOMIC_ACQUIRE);
  while (uint32_t first = list_first(head)) {
    uint32_t index = first / kTrampolineStride - 1;
    uint32_t link = __atomic_load_n(&sonde_calls[index].link, __ATOMIC_RELAXED);
    if (__atomic_compare_exchange_n(&common_entries, &head, list_without(head, link), true, __ATOMIC_ACQUIRE,
                                    __ATOMIC_ACQUIRE))
      return index;
  }
  return kNoEntry;
}

// Neighbours go to one thread, as many as fill two cache lines of each table (processors fetch lines in pairs): threads that
// write into one line wait for each other at every call. The others of them are in the thread's list when this returns.
constexpr uint32_t kFreshTogether = 8;
static_assert(kFreshTogether * kTrampolineStride == 128 && kTrampolines % kFreshTogether == 0);

uint32_t take_fresh(ThreadState* thread) {
  if (__atomic_load_n(&sonde_fresh_entries, __ATOMIC_RELAXED) >= kTrampolines) return kNoEntry;
  uint32_t index = __atomic_fetch_add(&sonde_fresh_entries, kFreshTogether, __ATOMIC_RELAXED);
  if (index >= kTrampolines) return __atomic_store_n(&sonde_fresh_entries, kTrampolines, __ATOMIC_RELAXED), kNoEntry;
  for (uint32_t other = index + kFreshTogether - 1; other > index; other--) {
    sonde_owners[other].owner = thread->tid;
    entry_push(&thread->free_entries, other);
    thread->held_entries++;
  }
  return index;
}

}  // namespace

void entry_give_common(uint32_t index) {
  uint64_t head = __atomic_load_n(&common_entries, __ATOMIC_RELAXED);
  uint32_t number = list_number(index);
  __atomic_store_n(&sonde_owners[index].owner, 0, __ATOMIC_RELAXED);
  do __atomic_store_n(&sonde_calls[index].link, list_first(head) - number, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(&common_entries, &head, list_with(head, number), true, __ATOMIC_RELEASE,
                                      __ATOMIC_RELAXED));
}

namespace {

// Entries that longjmp has left, that other threads have ended or that were lost are still in the number. So that a thread
// with many of these comes to a list of its own again, it may hold a few more after many takes from others.
void hold_more(ThreadState* thread) {
  constexpr uint32_t kOften = 4096, kMore = 16;
  if (++thread->takes % kOften == 0) thread->held_entries -= kMore;
}

}  // namespace

uint32_t entry_take_slow(SessionHeader* session, ThreadState* thread, bool may_reclaim) {
  if (thread->held_entries >= kKeepFree) hold_more(thread);
  uint32_t index = pop_common();
  if (index == kNoEntry) index = take_fresh(thread);
  if (index == kNoEntry && may_reclaim && find_lost_entries(thread)) {
    index = entry_pop(&thread->free_entries);
    if (index != kNoEntry) return index;  // held all the time
  }
  if (index == kNoEntry && may_reclaim && reclaim_entries(session, thread)) index = pop_common();
  if (index != kNoEntry) thread->held_entries++;
  return index;
}

}  // namespace sonde
