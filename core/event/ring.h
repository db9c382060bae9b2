// The producer's end of a ring. One thread writes; its signal handlers may interrupt it at any instruction and write
// records of their own in between. Space is reserved by one instruction, and the outermost reservation publishes
// everything when it is committed, so the consumer never sees a record half written.
//
// Longest path: wait policy, ring full. Then the producer spins without system calls until there is room, until the
// recorder's heartbeat is older than heartbeat_timeout_ticks, or until the session stops; the time is counted.
// Signal-safe.
#pragma once

#include <cstdint>

#include "core/event/session.h"

namespace sonde {

struct Reservation {
  uint64_t* words = nullptr;  // null: lost (already counted in ring and site)
  uint64_t offset = 0;        // in bytes since the ring was taken
};

// Takes a free ring for the calling thread: one compare-exchange per try. Null if there is none.
RingHeader* ring_take(SessionHeader* session, uint32_t pid, uint32_t tid, uint64_t thread_pointer);

// Room for `words` contiguous 64-bit words (a hole fills the end of the ring if the record would wrap).
// Every successful reservation must be committed, or marked by ring_abandon, before the next outermost one.
Reservation ring_reserve(SessionHeader* session, RingHeader* ring, uint32_t site, uint32_t words);
void ring_commit(RingHeader* ring, Reservation reservation);

// For a reservation whose writer never came back (a signal handler left by longjmp): turns it into a hole.
void ring_abandon(SessionHeader* session, RingHeader* ring, Reservation reservation, uint32_t words);

}  // namespace sonde
