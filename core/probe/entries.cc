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
__attribute__((used, section(".bss.sonde_entries"))) ReturnEntry sonde_entries[kTrampolines];  // agent/layout.ld
__attribute__((used)) Activation sonde_activations[kTrampolines];
uint32_t sonde_fresh_entries;  // entries [sonde_fresh_entries, kTrampolines) have never been taken
}

namespace {

uint64_t common_entries;  // as ThreadState::free_entries, shared by all threads

uint32_t pop_common() {
  uint64_t head = __atomic_load_n(&common_entries, __ATOMIC_ACQUIRE);
  while (uint32_t first = static_cast<uint32_t>(head)) {
    uint32_t next = __atomic_load_n(&sonde_activations[first - 1].link, __ATOMIC_RELAXED);
    if (__atomic_compare_exchange_n(&common_entries, &head, ((head >> 32) + 1) << 32 | next, true, __ATOMIC_ACQUIRE,
                                    __ATOMIC_ACQUIRE))
      return first - 1;
  }
  return kNoEntry;
}

uint32_t take_fresh() {
  if (__atomic_load_n(&sonde_fresh_entries, __ATOMIC_RELAXED) >= kTrampolines) return kNoEntry;
  uint32_t index = __atomic_fetch_add(&sonde_fresh_entries, 1, __ATOMIC_RELAXED);
  if (index < kTrampolines) return index;
  __atomic_store_n(&sonde_fresh_entries, kTrampolines, __ATOMIC_RELAXED);
  return kNoEntry;
}

}  // namespace

void entry_give_common(uint32_t index) {
  uint64_t head = __atomic_load_n(&common_entries, __ATOMIC_RELAXED);
  do __atomic_store_n(&sonde_activations[index].link, static_cast<uint32_t>(head), __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(&common_entries, &head, ((head >> 32) + 1) << 32 | (index + 1), true,
                                      __ATOMIC_RELEASE, __ATOMIC_RELAXED));
}

uint32_t entry_take_slow(SessionHeader* session, ThreadState* thread, bool may_reclaim) {
  uint32_t index = pop_common();
  if (index == kNoEntry) index = take_fresh();
  if (index == kNoEntry && may_reclaim && reclaim_entries(session, thread)) {
    index = entry_pop(&thread->free_entries);
    if (index == kNoEntry) index = pop_common();
  }
  return index;
}

}  // namespace sonde
