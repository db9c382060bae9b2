// The rare paths of the producer: taking a ring, a record at the ring's end, a full ring, writers that never came back.
// The order of the two accesses that matter: the words are written before tail is stored with release; head is loaded
// with acquire before words behind it are overwritten.
#include "core/event/ring.h"

#include <cstddef>

#include "core/native/ticks.h"

namespace sonde {
namespace {

uint64_t least(uint64_t a, uint64_t b) { return a < b ? a : b; }

// Whether the recorder is worth waiting for: it beats, or has not been silent for long. Only silence that the waiting
// thread has seen with its own eyes counts, in steps that are cut to a quarter of the limit, and at most three
// quarters of it from before: a machine that stood still as a whole has a right to its next heartbeat.
class Watch {
 public:
  explicit Watch(SessionHeader* session) : session_(session) {}
  // gone_beat: where the heartbeat is remembered with which it was found gone.
  bool alive(uint64_t* gone_beat) {
    uint64_t seen = __atomic_load_n(&session_->heartbeat_ticks, __ATOMIC_RELAXED);
    if (seen == __atomic_load_n(gone_beat, __ATOMIC_RELAXED)) return false;
    uint64_t now = ticks(), limit = session_->heartbeat_timeout_ticks;
    if (last_ == 0) {
      auto age = static_cast<int64_t>(now - seen);  // negative: the recorder's core is a little ahead
      silent_ = age > 0 ? least(static_cast<uint64_t>(age), limit / 4 * 3) : 0;
    } else {
      silent_ = seen == beat_ ? silent_ + least(now - last_, limit / 4) : 0;
    }
    last_ = now;
    beat_ = seen;
    if (silent_ < limit) return true;
    __atomic_store_n(gone_beat, seen, __ATOMIC_RELAXED);  // the next record need not wait to find out
    return false;
  }

 private:
  SessionHeader* session_;
  uint64_t beat_ = 0, last_ = 0, silent_ = 0;
};

// Whether room for a record that would end at `end` can still come. The consumer frees up to tail, never more; while
// this thread sits here, a reservation that it interrupted keeps tail where it is. A handler that came since `end` was
// computed may have moved tail beyond it (hence signed): then the caller looks again.
bool may_wait(SessionHeader* session, RingHeader* ring, uint64_t end, Watch& recorder) {
  if (session->policy != FullPolicy::wait) return false;
  int64_t unpublished = static_cast<int64_t>(end - __atomic_load_n(&ring->tail, __ATOMIC_RELAXED));
  if (unpublished > static_cast<int64_t>(session->ring_bytes)) return false;
  return is_recording(session) && recorder.alive(&ring->gone_beat);
}

void raise_to(uint32_t* word, uint32_t least) {
  uint32_t seen = __atomic_load_n(word, __ATOMIC_RELAXED);
  while (seen < least && !__atomic_compare_exchange_n(word, &seen, least, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}

}  // namespace

RingHeader* ring_take(SessionHeader* session, uint32_t pid, uint32_t tid, uint64_t thread_pointer) {
  for (uint32_t i = 0; i < session->ring_count; i++) {
    RingHeader* ring = ring_header(session, i);
    uint32_t expected = static_cast<uint32_t>(RingState::free);
    if (__atomic_load_n(&ring->state, __ATOMIC_RELAXED) != expected) continue;
    if (!__atomic_compare_exchange_n(&ring->state, &expected, static_cast<uint32_t>(RingState::taken), false,
                                     __ATOMIC_ACQUIRE, __ATOMIC_RELAXED))
      continue;
    ring->pid = pid;
    ring->tid = tid;
    ring->thread_pointer = thread_pointer;
    ring->mask = session->ring_bytes - 1;
    // Last: what tells the recorder that the identity is complete.
    __atomic_store_n(&ring->taken_ticks, ticks(), __ATOMIC_RELEASE);
    raise_to(&session->rings_taken, i + 1);
    return ring;
  }
  return nullptr;
}

namespace {

// Asks for a look and waits for its end, or for a ring that another's look frees. False: waiting is no use any more.
bool await_look(SessionHeader* session, uint32_t freed, uint64_t until, Watch& recorder) {
  uint32_t request = __atomic_add_fetch(&session->rings_wanted, 1, __ATOMIC_RELEASE);
  while (static_cast<int32_t>(__atomic_load_n(&session->rings_looked, __ATOMIC_ACQUIRE) - request) < 0) {
    if (__atomic_load_n(&session->rings_freed, __ATOMIC_RELAXED) != freed) return true;
    if (!is_recording(session) || ticks() > until || !recorder.alive(&session->ring_gone_beat)) return false;
    pause_hint();
  }
  return true;
}

}  // namespace

RingHeader* ring_await(SessionHeader* session, uint32_t pid, uint32_t tid, uint64_t thread_pointer) {
  uint64_t begun = ticks(), until = begun + kRingAwaitBeats * session->heartbeat_timeout_ticks;
  if (session->policy == FullPolicy::drop || begun < __atomic_load_n(&session->rings_hopeless_until, __ATOMIC_RELAXED))
    return nullptr;
  Watch recorder(session);
  RingHeader* ring = nullptr;
  for (bool useful = true; useful && !ring;) {
    uint32_t freed = __atomic_load_n(&session->rings_freed, __ATOMIC_ACQUIRE);
    useful = await_look(session, freed, until, recorder);
    ring = ring_take(session, pid, tid, thread_pointer);
    // Those that were freed may have gone to others; but where none were, there are none.
    if (__atomic_load_n(&session->rings_freed, __ATOMIC_RELAXED) == freed) useful = false;
  }
  __atomic_fetch_add(&session->ring_waits, 1, __ATOMIC_RELAXED);
  __atomic_fetch_add(&session->ring_waited_ticks, ticks() - begun, __ATOMIC_RELAXED);
  return ring;
}

void ring_end(RingHeader* ring, uint32_t tid) {
  static_assert(offsetof(RingHeader, state) == 0 && offsetof(RingHeader, tid) == 4);  // both in one word
  auto word = [&](RingState state) { return uint64_t{tid} << 32 | static_cast<uint32_t>(state); };
  uint64_t expected = word(RingState::taken);
  __atomic_compare_exchange_n(reinterpret_cast<uint64_t*>(ring), &expected, word(RingState::ended), false,
                              __ATOMIC_RELEASE, __ATOMIC_RELAXED);
}

void count_loss(SessionHeader* session, RingHeader* ring, uint32_t site, LossCause cause) {
  unsigned index = static_cast<unsigned>(cause);
  if (ring) local_add(&ring->lost[index], 1);
  else __atomic_fetch_add(&session->lost_no_ring, 1, __ATOMIC_RELAXED);
  if (site < __atomic_load_n(&session->site_count, __ATOMIC_RELAXED))
    __atomic_fetch_add(&session_counters(session)[site].lost[index], 1, __ATOMIC_RELAXED);
}

Reservation ring_reserve_slow(SessionHeader* session, RingHeader* ring, uint32_t site, uint32_t words) {
  uint64_t size = session->ring_bytes, bytes = uint64_t{words} * 8, wait_started = 0;
  Reservation result;
  Watch recorder(session);
  // Not counted while it holds nothing: what handlers write meanwhile, be it a whole ring, is published without it.
  auto withdraw = [&] { local_add(&ring->nested, -kOpenWriter), ring_publish(ring); };
  withdraw();
  while (bytes <= size / 2) {  // a hole in front is shorter than its record: both always fit into an empty ring
    uint64_t word = __atomic_load_n(&ring->reserve, __ATOMIC_RELAXED), at = word & ~kUsualWriter,
             position = at & (size - 1);
    uint64_t hole = position + bytes > size ? size - position : 0;
    uint64_t end = at + hole + bytes;
    uint64_t head = __atomic_load_n(&ring->head, __ATOMIC_ACQUIRE);
    if (end - head <= size) {
      local_add(&ring->nested, kOpenWriter);
      if (!local_compare_exchange(&ring->reserve, &word, end | (word & kUsualWriter))) {
        withdraw();
        continue;
      }
      // A handler that came meanwhile may have set it farther: what is stored here is still true, only sooner reached.
      __atomic_store_n(&ring->limit, least((end | (size - 1)) + 1, head + size), __ATOMIC_RELAXED);
      uint64_t* data = ring_data(ring);
      if (hole) data[position / 8] = record_word(RecordType::hole, 0, 0, static_cast<uint32_t>(hole / 8));
      result = {data + ((position + hole) & (size - 1)) / 8, at};
      break;
    }
    if (!may_wait(session, ring, end, recorder)) break;
    if (!wait_started) {
      wait_started = ticks();
      local_add(&ring->waits, 1);
    }
    pause_hint();
  }
  if (wait_started) local_add(&ring->waited_ticks, ticks() - wait_started);
  if (result.words) return result;
  count_loss(session, ring, site, LossCause::ring_full);
  return {};
}

void ring_abandon(SessionHeader* session, RingHeader* ring, Reservation reservation, uint32_t words, uint32_t site,
                  LossCause cause) {
  reservation.words[0] = record_word(RecordType::hole, 0, 0, words);
  count_loss(session, ring, site, cause);
  ring_commit(ring, reservation);
}

// The unpublished bytes may pass the ring's end; a hole may not.
void ring_abandon_all(SessionHeader* session, RingHeader* ring) {
  uint64_t at = __atomic_load_n(&ring->tail, __ATOMIC_RELAXED);
  uint64_t end = __atomic_load_n(&ring->reserve, __ATOMIC_RELAXED) & ~kUsualWriter, left = end - at;
  local_add(&ring->lost[static_cast<unsigned>(LossCause::abandoned)], ring_in_flight(ring));
  __atomic_store_n(&ring->nested, 0, __ATOMIC_RELAXED);
  if (!left) return;
  uint64_t size = session->ring_bytes, position = at & (size - 1);
  uint64_t first = left < size - position ? left : size - position;
  uint64_t* data = ring_data(ring);
  data[position / 8] = record_word(RecordType::hole, 0, 0, static_cast<uint32_t>(first / 8));
  if (left > first) data[0] = record_word(RecordType::hole, 0, 0, static_cast<uint32_t>((left - first) / 8));
  __atomic_store_n(&ring->reserve, end, __ATOMIC_RELAXED);
  __atomic_store_n(&ring->tail, end, __ATOMIC_RELEASE);
}

}  // namespace sonde
