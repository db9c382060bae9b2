// The producer's end of a ring. One thread writes; its signal handlers may interrupt it at any instruction and write
// records of their own in between. Space is reserved by one instruction, and the outermost reservation publishes
// everything when it is committed, so the consumer never sees a record half written.
//
//   0        head            tail            reserve          all grow for ever; position in the ring = value mod size
//   |..free..|###published###|~~~in flight~~~|..free..|
//                            ^ outermost reservation: the one that starts at tail
//
// No state is held before the reserving compare-exchange and none is needed after the publishing store, so a signal may
// arrive anywhere: in front of the compare-exchange the interrupted writer holds nothing (its compare-exchange fails and
// it looks again); behind it the handler's records start above tail, are left to the interrupted writer to publish, and
// that one looks at `reserve` again after each publishing store.
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
inline Reservation ring_reserve(SessionHeader* session, RingHeader* ring, uint32_t site, uint32_t words) {
  uint64_t at = __atomic_load_n(&ring->reserve, __ATOMIC_RELAXED), end = at + uint64_t{words} * 8;
  if (__builtin_expect(end <= __atomic_load_n(&ring->limit, __ATOMIC_RELAXED), 1) &&
      __builtin_expect(local_compare_exchange(&ring->reserve, &at, end), 1))
    return {ring_data(ring) + (at & ring->mask) / 8, at};
  return ring_reserve_slow(session, ring, site, words);
}

// The record is complete. Publishes it and those of the handlers that came in between; within such a handler, only
// leaves it for the interrupted writer to publish.
inline void ring_commit(RingHeader* ring, Reservation reservation) {
  if (__builtin_expect(__atomic_load_n(&ring->tail, __ATOMIC_RELAXED) != reservation.offset, 0))
    return local_add(&ring->nested, 1);
  uint64_t end = __atomic_load_n(&ring->reserve, __ATOMIC_RELAXED), published;
  do {
    published = end;
    __atomic_store_n(&ring->tail, end, __ATOMIC_RELEASE);
    __atomic_signal_fence(__ATOMIC_SEQ_CST);
    end = __atomic_load_n(&ring->reserve, __ATOMIC_RELAXED);
  } while (__builtin_expect(end != published, 0));
  if (__builtin_expect(__atomic_load_n(&ring->nested, __ATOMIC_RELAXED) != 0, 0))
    __atomic_store_n(&ring->nested, 0, __ATOMIC_RELAXED);
}

// For a reservation whose writer never came back (a signal handler left by longjmp): turns it into a hole, counts it as
// abandoned and commits it. `words` as reserved. Reservations that interrupted each other: the innermost first.
void ring_abandon(SessionHeader* session, RingHeader* ring, Reservation reservation, uint32_t words);

// The same when the reservations are not known: to be called by a writer that knows that it is the outermost one of
// its thread, when ring_idle says false. Everything unpublished becomes a hole and is counted as abandoned.
inline bool ring_idle(const RingHeader* ring) {
  return __atomic_load_n(&ring->tail, __ATOMIC_RELAXED) == __atomic_load_n(&ring->reserve, __ATOMIC_RELAXED);
}
void ring_abandon_all(SessionHeader* session, RingHeader* ring);

// The usual records. False: lost and counted.
[[gnu::always_inline]] inline bool ring_write_call(SessionHeader* session, RingHeader* ring, uint32_t site, ExitKind exit, uint64_t slot,
                            uint64_t entry_ticks, uint64_t exit_ticks) {
  Reservation r = ring_reserve(session, ring, site, kCallWords);
  if (__builtin_expect(!r.words, 0)) return local_add(&ring->lost_calls, 1), false;
  r.words[0] = record_word(RecordType::call, static_cast<uint8_t>(exit), site, slot_key(slot));
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
