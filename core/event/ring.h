// The producer's end of a ring. One thread writes; its signal handlers may interrupt it at any instruction and write
// records of their own in between. A handler may also go on with another context of the program (swapcontext) and come
// back much later, so writers end in any order. Space is reserved by one instruction, and what is in flight is published when
// all of it is committed, by whoever commits last: the consumer never sees a record half written.
//
//   0        head            tail            reserve          all grow for ever; position in the ring = value mod size
//   |..free..|###published###|~~~in flight~~~|..free..|
//
// Who writes: `nested` counts the writers, before they reserve; its lower half those that have not committed, its upper half
// those that have and are not published. The usual path (core/native/x86_64/trampolines.S) is not counted: it reserves only where
// nothing is in flight, and the same compare-exchange sets bit 0 of `reserve`; so there is at most one such writer, its record
// stands at tail, and it alone moves tail, before it clears the bit. Everything up to `reserve` is committed if its bit was clear
// and after that the count was none. A writer that commits looks whether that is so, and then moves tail there by compare-exchange;
// the usual one does not look: what it leaves, the next writer, who will not find the ring at rest, or the recorder at the end sees.
//
// Longest path: wait policy, ring full. Then the producer spins without system calls until there is room, until the
// recorder's heartbeat has not come for heartbeat_timeout_ticks, or until the session stops; the time is counted. A handler
// that interrupted an uncommitted reservation never waits for space that only that reservation would free: its record
// is lost as ring_full. Signal-safe.
#pragma once

#include <cstdint>

#include "core/event/session.h"
#include "core/native/local.h"

namespace sonde {

struct Reservation {
  uint64_t* words = nullptr;  // null: lost (already counted in ring and site)
  uint64_t offset = 0;  // where the reserved bytes start (a hole in front of words included), since the ring was taken
};

// Takes a free ring for the calling thread: one compare-exchange per try. Null if there is none (not counted).
RingHeader* ring_take(SessionHeader* session, uint32_t pid, uint32_t tid, uint64_t thread_pointer);
// The same when there was none: unless hits are to be dropped, asks the recorder to free rings of threads that are gone, and spins
// until it has, or has found that there are none, or is gone; at most kRingAwaitBeats heartbeat timeouts. The time is counted.
constexpr unsigned kRingAwaitBeats = 16;
RingHeader* ring_await(SessionHeader* session, uint32_t pid, uint32_t tid, uint64_t thread_pointer);
// Gives it back if it is still that of the thread `tid`; the recorder frees it when it is drained. It may have done so already,
// of a thread that was gone, and another may have taken it. Nothing may be written to the ring afterwards.
void ring_end(RingHeader* ring, uint32_t tid);

// Counts one lost record in the ring (null: none was to be had; then in the session) and the site.
void count_loss(SessionHeader* session, RingHeader* ring, uint32_t site, LossCause cause);

Reservation ring_reserve_slow(SessionHeader* session, RingHeader* ring, uint32_t site, uint32_t words);

// Room for `words` contiguous 64-bit words (a hole fills the end of the ring if the record would wrap).
// Every successful reservation must be committed, or marked by ring_abandon, before the next outermost one.
constexpr uint64_t kUsualWriter = 1;  // in `reserve`
constexpr uint64_t kOpenWriter = 1, kDoneWriter = uint64_t{1} << 32;  // in `nested`

inline Reservation ring_reserve(SessionHeader* session, RingHeader* ring, uint32_t site, uint32_t words) {
  local_add(&ring->nested, kOpenWriter);
  uint64_t at = __atomic_load_n(&ring->reserve, __ATOMIC_RELAXED), end = at + uint64_t{words} * 8;
  if (__builtin_expect(end <= __atomic_load_n(&ring->limit, __ATOMIC_RELAXED), 1) &&
      __builtin_expect(local_compare_exchange(&ring->reserve, &at, end), 1))
    return {ring_data(ring) + (at & ring->mask) / 8, at & ~kUsualWriter};
  return ring_reserve_slow(session, ring, site, words);
}

// Where the records end that are complete, if all in flight are; else tail. Also for the consumer, when the producer is gone.
inline uint64_t ring_committed(const RingHeader* ring) {
  uint64_t at = __atomic_load_n(&ring->tail, __ATOMIC_ACQUIRE), end = __atomic_load_n(&ring->reserve, __ATOMIC_ACQUIRE);
  uint32_t open = static_cast<uint32_t>(__atomic_load_n(&ring->nested, __ATOMIC_ACQUIRE));
  return open || end & kUsualWriter ? at : end;
}

// Publishes what is in flight if all of it is committed.
inline void ring_publish(RingHeader* ring) {
  for (;;) {
    uint64_t at = __atomic_load_n(&ring->tail, __ATOMIC_RELAXED),
             end = __atomic_load_n(&ring->reserve, __ATOMIC_RELAXED);
    __atomic_signal_fence(__ATOMIC_SEQ_CST);
    uint64_t nested = __atomic_load_n(&ring->nested, __ATOMIC_RELAXED);
    if (static_cast<uint32_t>(nested) || end & kUsualWriter) return;
    if (end != at) {
      __atomic_thread_fence(__ATOMIC_RELEASE);
      local_compare_exchange(&ring->tail, &at, end);
    } else if (!nested || local_compare_exchange(&ring->nested, &nested, 0)) {
      return;
    }
  }
}

// The record is complete. Publishes it, with those of others in between, unless one of them is still being written.
inline void ring_commit(RingHeader* ring, Reservation) {
  __atomic_signal_fence(__ATOMIC_SEQ_CST);
  local_add(&ring->nested, kDoneWriter - kOpenWriter);
  ring_publish(ring);
}

// What was to be written there cannot be, or its writer never came back: turns it into a hole, counts the loss and commits it.
// `words` as reserved.
void ring_abandon(SessionHeader* session, RingHeader* ring, Reservation reservation, uint32_t words, uint32_t site,
                  LossCause cause);

// The same when the reservations are not known, and no writer of the ring will come back (handlers left by longjmp). Everything unpublished becomes a hole
// and is counted as abandoned.
inline bool ring_idle(const RingHeader* ring) {
  return __atomic_load_n(&ring->tail, __ATOMIC_RELAXED) == __atomic_load_n(&ring->reserve, __ATOMIC_RELAXED);
}
// The same after publishing what can be.
inline bool ring_comes_to_rest(RingHeader* ring) {
  if (!ring_idle(ring)) ring_publish(ring);
  return ring_idle(ring);
}
// How many records are in flight.
inline uint64_t ring_in_flight(const RingHeader* ring) {
  uint64_t nested = __atomic_load_n(&ring->nested, __ATOMIC_RELAXED);
  return (nested >> 32) + static_cast<uint32_t>(nested) +
         (__atomic_load_n(&ring->reserve, __ATOMIC_RELAXED) & kUsualWriter);
}
void ring_abandon_all(SessionHeader* session, RingHeader* ring);

// The usual records. False: lost and counted.
[[gnu::always_inline]] inline bool ring_write_call(SessionHeader* session, RingHeader* ring, uint32_t site,
                                                   ExitKind exit, uint64_t slot, uint64_t entry_ticks,
                                                   uint64_t exit_ticks) {
  Reservation r = ring_reserve(session, ring, site, kCallWords);
  if (__builtin_expect(!r.words, 0)) return local_add(&ring->lost_calls, 1), false;
  r.words[0] = call_word(exit, site, slot_key(slot));
  r.words[1] = entry_ticks;
  r.words[2] = exit_ticks;
  ring_commit(ring, r);
  return true;
}

inline bool ring_write_entry(SessionHeader* session, RingHeader* ring, uint32_t site, uint64_t slot, uint64_t ticks) {
  Reservation r = ring_reserve(session, ring, site, kEntryWords);
  if (__builtin_expect(!r.words, 0)) return false;
  r.words[0] = record_word(RecordType::entry, 0, site, slot_key(slot));
  r.words[1] = ticks;
  ring_commit(ring, r);
  return true;
}

}  // namespace sonde
