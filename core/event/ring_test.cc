// The producer against a consumer written here from the description in session.h and record.h: the consumer checks
// every word, so that a record that is lost, torn, doubled or out of order fails.
#include "core/event/ring.h"

#include <doctest/doctest.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <thread>
#include <vector>

#include "core/native/ticks.h"

namespace sonde {
namespace {

constexpr uint32_t kSites = 4;

struct TestSession {
  SessionHeader* header;
  TestSession(uint64_t ring_bytes, uint32_t rings, FullPolicy policy) {
    uint64_t counters = kPage + kPage, first_ring = counters + kPage, size = first_ring + rings * (kPage + ring_bytes);
    void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    REQUIRE(memory != MAP_FAILED);
    header = new (memory) SessionHeader{};
    header->size = size;
    header->counters_offset = counters;
    header->rings_offset = first_ring;
    header->ring_bytes = ring_bytes;
    header->ring_count = rings;
    header->policy = policy;
    header->site_count = kSites;
    header->state = static_cast<uint32_t>(SessionState::recording);
    header->heartbeat_ticks = ticks();
    header->heartbeat_timeout_ticks = ~uint64_t{0} >> 1;
  }
  ~TestSession() { munmap(header, header->size); }
  RingHeader* take() { return ring_take(header, 1, 2, 3); }
  uint64_t lost(RingHeader* ring, LossCause cause) { return ring->lost[static_cast<unsigned>(cause)]; }
  uint64_t site_lost(uint32_t site, LossCause cause) {
    return session_counters(header)[site].lost[static_cast<unsigned>(cause)];
  }
};

// Every published record that was not read yet, holes left out. Fails on words that start no record.
std::vector<std::vector<uint64_t>> drain(SessionHeader* session, RingHeader* ring) {
  std::vector<std::vector<uint64_t>> records;
  uint64_t tail = __atomic_load_n(&ring->tail, __ATOMIC_ACQUIRE), head = ring->head;
  while (head != tail) {
    uint64_t position = head & (session->ring_bytes - 1);
    uint64_t* words = ring_data(ring) + position / 8;
    uint32_t n = record_words(words[0]);
    REQUIRE(n > 0);
    REQUIRE(position + n * 8 <= session->ring_bytes);
    REQUIRE(n * 8 <= tail - head);
    if (record_type(words[0]) != RecordType::hole) records.emplace_back(words, words + n);
    head += n * 8;
  }
  __atomic_store_n(&ring->head, head, __ATOMIC_RELEASE);
  return records;
}

bool write_numbered(TestSession& session, RingHeader* ring, uint32_t site, uint64_t number) {
  return ring_write_call(session.header, ring, site, ExitKind::returned, 0x1000, number, ~number);
}

}  // namespace

TEST_CASE("rings are taken one by one until none is free") {
  TestSession session(1 << 16, 2, FullPolicy::drop);
  RingHeader* a = ring_take(session.header, 10, 11, 12);
  RingHeader* b = session.take();
  CHECK(a == ring_header(session.header, 0));
  CHECK(b == ring_header(session.header, 1));
  CHECK(session.take() == nullptr);
  CHECK(session.header->rings_taken == 2);
  CHECK(a->pid == 10);
  CHECK(a->tid == 11);
  CHECK(a->thread_pointer == 12);
  CHECK(a->taken_ticks != 0);
  ring_end(a, a->tid);
  CHECK(a->state == static_cast<uint32_t>(RingState::ended));
  CHECK(session.take() == nullptr);  // ended is not free: the recorder has to drain it first
}

TEST_CASE("a call record has the words that record.h promises") {
  TestSession session(1 << 16, 1, FullPolicy::drop);
  RingHeader* ring = session.take();
  CHECK(ring_write_call(session.header, ring, 3, ExitKind::unwound, 0x7ffd12345678, 100, 250));
  CHECK(ring_write_entry(session.header, ring, 2, 0x7ffd12345670, 300));
  auto records = drain(session.header, ring);
  REQUIRE(records.size() == 2);
  CHECK(records[0] == std::vector<uint64_t>{0xa2468acf00000311, 100, 250});
  CHECK(records[1] == std::vector<uint64_t>{0xa2468ace00000203, 300});
}

TEST_CASE("a record that would pass the end starts again at the beginning, behind a hole") {
  TestSession session(1 << 16, 1, FullPolicy::drop);
  RingHeader* ring = session.take();
  uint64_t number = 0, expected = 0;
  for (int round = 0; round < 50; round++) {  // 65536 is no multiple of 24, so the end falls everywhere in a record
    for (int i = 0; i < 2000; i++) REQUIRE(write_numbered(session, ring, 1, number++));
    for (auto& record : drain(session.header, ring)) {
      REQUIRE(record[1] == expected);
      REQUIRE(record[2] == ~expected++);
    }
  }
  CHECK(expected == number);
  CHECK(session.lost(ring, LossCause::ring_full) == 0);
}

TEST_CASE("a full ring drops and counts exactly, in the ring and in the site") {
  TestSession session(1 << 16, 1, FullPolicy::drop);
  RingHeader* ring = session.take();
  uint64_t written = 0, refused = 0;
  for (int i = 0; i < 5000; i++) (write_numbered(session, ring, 1 + i % 2, i) ? written : refused)++;
  CHECK(written == (1 << 16) / 24);
  CHECK(drain(session.header, ring).size() == written);
  CHECK(session.lost(ring, LossCause::ring_full) == refused);
  CHECK(ring->lost_calls == refused);
  CHECK(session.site_lost(1, LossCause::ring_full) + session.site_lost(2, LossCause::ring_full) == refused);
  CHECK(session.site_lost(1, LossCause::ring_full) == refused / 2);
  CHECK(write_numbered(session, ring, 1, 0));  // room again
  CHECK(ring->waits == 0);
}

TEST_CASE("a site number outside the table is counted in the ring only") {
  TestSession session(1 << 16, 1, FullPolicy::drop);
  RingHeader* ring = session.take();
  count_loss(session.header, ring, 0xffffffff, LossCause::nesting);
  count_loss(session.header, nullptr, 2, LossCause::no_ring);
  CHECK(session.lost(ring, LossCause::nesting) == 1);
  CHECK(session.site_lost(2, LossCause::no_ring) == 1);
}

TEST_CASE("records that are too long for the ring are lost, never waited for") {
  TestSession session(1 << 16, 1, FullPolicy::wait);
  RingHeader* ring = session.take();
  REQUIRE(write_numbered(session, ring, 1, 0));
  CHECK(ring_reserve(session.header, ring, 1, (1 << 16) / 8).words == nullptr);
  CHECK(session.lost(ring, LossCause::ring_full) == 1);
}

TEST_CASE("nested records are published with the one they interrupted, not before") {
  TestSession session(1 << 16, 1, FullPolicy::drop);
  RingHeader* ring = session.take();
  Reservation outer = ring_reserve(session.header, ring, 1, kEntryWords);
  REQUIRE(write_numbered(session, ring, 2, 7));
  CHECK(drain(session.header, ring).empty());
  CHECK(ring->nested == kOpenWriter + kDoneWriter);
  outer.words[0] = record_word(RecordType::entry, 0, 1, 0);
  outer.words[1] = 42;
  ring_commit(ring, outer);
  auto records = drain(session.header, ring);
  REQUIRE(records.size() == 2);
  CHECK(records[0][1] == 42);
  CHECK(records[1][1] == 7);
  CHECK(ring->nested == 0);
  CHECK(ring_idle(ring));
}

namespace {

// Three writers that reserved one after the other and commit in the given order. usual: the first as trampolines.S does it.
void commit_in(const int (&order)[3], bool usual) {
  TestSession session(1 << 16, 1, FullPolicy::drop);
  RingHeader* ring = session.take();
  REQUIRE(write_numbered(session, ring, 3, 100));
  drain(session.header, ring);
  uint64_t* words[3];
  Reservation reservations[3];
  for (int i = 0; i < 3; i++) {
    if (usual && i == 0) {
      words[0] = ring_data(ring) + ring->tail / 8;
      ring->reserve += kCallWords * 8 + kUsualWriter;
    } else {
      reservations[i] = ring_reserve(session.header, ring, 1, kCallWords);
      words[i] = reservations[i].words;
    }
    CHECK(words[i] == ring_data(ring) + 3 * (1 + i));
  }
  CHECK(ring_in_flight(ring) == 3);
  std::vector<uint64_t> read;
  bool own = false;
  for (int n = 0; n < 3; n++) {
    int i = order[n];
    words[i][1] = static_cast<uint64_t>(i);
    words[i][0] = record_word(RecordType::call, 0, 1, 0);
    if (usual && i == 0) {
      ring->tail += kCallWords * 8;
      ring->reserve -= kUsualWriter;  // and leaves what is beyond
      if (n == 2) {
        CHECK(ring_committed(ring) == ring->reserve);
        CHECK(ring_comes_to_rest(ring));
      }
    } else {
      ring_commit(ring, reservations[i]);
    }
    for (auto& record : drain(session.header, ring)) read.push_back(record[1]);
    own |= usual && i == 0;  // may be read at once
    if (n < 2) CHECK(read.size() == own);
  }
  CHECK(read == std::vector<uint64_t>{0, 1, 2});
  CHECK(ring_idle(ring));
  CHECK(ring->nested == 0);
}

}  // namespace

TEST_CASE("writers that end in any order: nothing is published before all below it is complete") {
  constexpr int kOrders[][3] = {{0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}};
  for (auto& order : kOrders) {
    CAPTURE(order[0]);
    CAPTURE(order[1]);
    commit_in(order, false);
    commit_in(order, true);
  }
}

TEST_CASE("a handler does not wait for room that only the writer it interrupted could free") {
  TestSession session(1 << 16, 1, FullPolicy::wait);
  RingHeader* ring = session.take();
  uint64_t fits = 0;
  Reservation outer = ring_reserve(session.header, ring, 1, kEntryWords);
  while (write_numbered(session, ring, 2, fits)) fits++;  // ends only if the last one is given up
  CHECK(fits == ((1 << 16) - 16) / 24);
  CHECK(session.lost(ring, LossCause::ring_full) == 1);
  outer.words[0] = record_word(RecordType::entry, 0, 1, 0);
  ring_commit(ring, outer);
  CHECK(drain(session.header, ring).size() == fits + 1);
}

TEST_CASE("waiting ends when there is room, and is counted") {
  TestSession session(1 << 16, 1, FullPolicy::wait);
  RingHeader* ring = session.take();
  for (int i = 0; i < (1 << 16) / 24; i++) REQUIRE(write_numbered(session, ring, 1, i));
  std::thread consumer([&] {
    usleep(20000);
    drain(session.header, ring);
  });
  uint64_t before = ticks();
  CHECK(write_numbered(session, ring, 1, 1));
  uint64_t waited = ticks() - before;
  consumer.join();
  CHECK(ring->waits == 1);
  CHECK(ring->waited_ticks > waited / 2);
  CHECK(ring->waited_ticks <= waited);
  CHECK(session.lost(ring, LossCause::ring_full) == 0);
}

TEST_CASE("nobody waits for a recorder without heartbeat, nor when the session stops") {
  TestSession session(1 << 16, 1, FullPolicy::wait);
  RingHeader* ring = session.take();
  uint64_t started = ticks();
  usleep(10000);
  session.header->heartbeat_timeout_ticks = ticks() - started;  // about 10 ms in this clock's ticks
  session.header->heartbeat_ticks = ticks();
  uint64_t fits = 0;
  while (write_numbered(session, ring, 1, fits)) fits++;
  CHECK(fits == (1 << 16) / 24);
  CHECK(ring->waits == 1);
  CHECK(ring->waited_ticks > 0);
  CHECK_FALSE(write_numbered(session, ring, 1, 0));  // the recorder is still gone: no second wait
  CHECK(ring->waits == 1);
  session.header->heartbeat_ticks = ticks();  // back again
  CHECK_FALSE(write_numbered(session, ring, 1, 0));
  CHECK(ring->waits == 2);
  session.header->heartbeat_timeout_ticks = ~uint64_t{0} >> 1;
  session.header->state = static_cast<uint32_t>(SessionState::stopped);
  CHECK_FALSE(write_numbered(session, ring, 1, 0));
  CHECK(ring->waits == 2);
  CHECK(session.lost(ring, LossCause::ring_full) == 4);
}

TEST_CASE("an old heartbeat is no reason to give up before the recorder had time for the next") {
  TestSession session(1 << 16, 1, FullPolicy::wait);
  RingHeader* ring = session.take();
  uint64_t started = ticks();
  usleep(10000);
  session.header->heartbeat_timeout_ticks = (ticks() - started) * 40;  // about 400 ms
  session.header->heartbeat_ticks = started - session.header->heartbeat_timeout_ticks;
  for (int i = 0; i < (1 << 16) / 24; i++) REQUIRE(write_numbered(session, ring, 1, i));
  std::thread recorder([&] {  // as if the whole machine had stood still until now
    usleep(5000);
    session.header->heartbeat_ticks = ticks();
    usleep(40000);
    session.header->heartbeat_ticks = ticks();
    usleep(40000);
    drain(session.header, ring);
  });
  CHECK(write_numbered(session, ring, 1, 0));
  recorder.join();
  CHECK(ring->waits == 1);
}

TEST_CASE("a handler may write more than a ring while the thread it interrupted waits for room") {
  static TestSession* the_session;
  static RingHeader* the_ring;
  constexpr uint64_t kRingRecords = (1 << 16) / 24, kMore = 2 * kRingRecords;
  TestSession session(1 << 16, 1, FullPolicy::wait);
  the_session = &session;
  the_ring = session.take();
  for (uint64_t i = 0; i < kRingRecords; i++) REQUIRE(write_numbered(session, the_ring, 1, i));
  struct sigaction action = {}, old;
  action.sa_handler = [](int) {
    for (uint64_t i = 0; i < kMore; i++) write_numbered(*the_session, the_ring, 2, i);
  };
  sigaction(SIGUSR1, &action, &old);
  std::atomic<bool> done = false;
  std::thread producer([&] {
    write_numbered(session, the_ring, 1, kRingRecords);
    done = true;
  });
  while (__atomic_load_n(&the_ring->waits, __ATOMIC_ACQUIRE) < 1) usleep(100);
  pthread_kill(producer.native_handle(), SIGUSR1);
  while (__atomic_load_n(&the_ring->waits, __ATOMIC_ACQUIRE) < 2) usleep(100);  // now the handler waits as well
  uint64_t next[3] = {};
  auto read = [&] {
    for (auto& record : drain(session.header, the_ring)) CHECK(record[1] == next[record_site(record[0])]++);
  };
  while (!done) read();
  producer.join();
  read();
  sigaction(SIGUSR1, &old, nullptr);
  CHECK(next[1] == kRingRecords + 1);
  CHECK(next[2] == kMore);
  CHECK(session.lost(the_ring, LossCause::ring_full) == 0);
  CHECK(ring_idle(the_ring));
}

TEST_CASE("an abandoned reservation becomes a hole and blocks nothing") {
  TestSession session(1 << 16, 1, FullPolicy::drop);
  RingHeader* ring = session.take();
  Reservation outer = ring_reserve(session.header, ring, 1, 10);
  Reservation inner = ring_reserve(session.header, ring, 1, 5);
  REQUIRE(write_numbered(session, ring, 2, 9));
  ring_abandon(session.header, ring, inner, 5, 1, LossCause::abandoned);
  ring_abandon(session.header, ring, outer, 10, 1, LossCause::abandoned);
  auto records = drain(session.header, ring);
  REQUIRE(records.size() == 1);
  CHECK(records[0][1] == 9);
  CHECK(session.lost(ring, LossCause::abandoned) == 2);
  CHECK(ring_idle(ring));
}

TEST_CASE("unknown reservations are abandoned together, also across the ring's end") {
  TestSession session(1 << 16, 1, FullPolicy::drop);
  RingHeader* ring = session.take();
  for (int i = 0; i < (1 << 16) / 24; i++) REQUIRE(write_numbered(session, ring, 1, i));
  drain(session.header, ring);  // 16 bytes are left before the end
  REQUIRE(ring_reserve(session.header, ring, 1, 1).words);
  REQUIRE(write_numbered(session, ring, 2, 5));
  CHECK_FALSE(ring_idle(ring));
  ring_abandon_all(session.header, ring);
  CHECK(ring_idle(ring));
  CHECK(session.lost(ring, LossCause::abandoned) == 2);
  REQUIRE(write_numbered(session, ring, 1, 77));
  auto records = drain(session.header, ring);
  REQUIRE(records.size() == 1);
  CHECK(records[0][1] == 77);
}

namespace {

// One producer thread, interrupted by a fast timer whose handler writes too; the main thread consumes.
struct Stress {
  TestSession session;
  RingHeader* ring = nullptr;
  uint64_t attempts[2] = {}, written[2] = {};  // by context: 0 thread, 1 handler
  explicit Stress(FullPolicy policy) : session(1 << 16, 1, policy) {}
};
Stress* stress;

void write_from(unsigned context) {
  uint64_t number = local_fetch_add(&stress->attempts[context], 1);
  if (write_numbered(stress->session, stress->ring, context, number)) local_add(&stress->written[context], 1);
}
void on_signal(int) { write_from(1); }

void run_stress(FullPolicy policy) {
  Stress state(policy);
  stress = &state;
  state.ring = state.session.take();
  struct sigaction action = {}, old[2];
  action.sa_handler = on_signal;  // two signals: each interrupts the other's handler as well
  action.sa_flags = SA_RESTART;
  sigaction(SIGALRM, &action, &old[0]);
  sigaction(SIGUSR1, &action, &old[1]);
  sigset_t alarm_set;
  sigemptyset(&alarm_set);
  sigaddset(&alarm_set, SIGALRM);
  sigaddset(&alarm_set, SIGUSR1);
  pthread_sigmask(SIG_BLOCK, &alarm_set, nullptr);
  std::atomic<bool> stop = false, done = false;
  std::thread producer([&] {
    pthread_sigmask(SIG_UNBLOCK, &alarm_set, nullptr);
    while (!stop.load(std::memory_order_relaxed)) write_from(0);
    pthread_sigmask(SIG_BLOCK, &alarm_set, nullptr);
    done = true;
  });
  std::thread disturber([&] {
    while (!stop.load(std::memory_order_relaxed)) pthread_kill(producer.native_handle(), SIGUSR1);
  });
  timer_t timer;
  struct sigevent event = {};
  event.sigev_notify = SIGEV_SIGNAL;
  event.sigev_signo = SIGALRM;
  REQUIRE(timer_create(CLOCK_MONOTONIC, &event, &timer) == 0);
  struct itimerspec period = {{0, 50000}, {0, 50000}};
  timer_settime(timer, 0, &period, nullptr);

  uint64_t read[2] = {}, last[2] = {~uint64_t{0}, ~uint64_t{0}}, bad = 0;
  auto consume = [&] {
    for (auto& record : drain(state.session.header, state.ring)) {
      uint32_t context = record_site(record[0]);
      REQUIRE(context < 2);
      // Numbers grow within the thread; a handler's may be overtaken by the handler that interrupts it.
      bad += record[1] != ~record[2];
      bad += policy == FullPolicy::wait && context == 0 && record[1] != last[0] + 1;
      bad += context == 0 && last[0] != ~uint64_t{0} && record[1] <= last[0];
      last[context] = record[1];
      read[context]++;
    }
  };
  struct timespec begin, now;
  clock_gettime(CLOCK_MONOTONIC, &begin);
  int64_t elapsed_ms;
  do {  // longer on a machine so busy that the handlers hardly ran
    consume();
    clock_gettime(CLOCK_MONOTONIC, &now);
    elapsed_ms = (now.tv_sec - begin.tv_sec) * 1000 + (now.tv_nsec - begin.tv_nsec) / 1000000;
  } while (elapsed_ms < 1500 || (read[1] <= 100 && elapsed_ms < 20000));
  timer_delete(timer);
  stop = true;
  while (!done) consume();
  disturber.join();
  producer.join();
  consume();
  struct timespec none = {};
  while (sigtimedwait(&alarm_set, nullptr, &none) > 0) {
  }
  sigaction(SIGALRM, &old[0], nullptr);
  sigaction(SIGUSR1, &old[1], nullptr);
  pthread_sigmask(SIG_UNBLOCK, &alarm_set, nullptr);

  MESSAGE(read[0], " records of the thread, ", read[1], " of its handlers, ", state.ring->waits, " waits");
  CHECK(bad == 0);
  CHECK(read[1] > 100);
  CHECK(read[0] == state.written[0]);
  CHECK(read[1] == state.written[1]);
  uint64_t lost = state.attempts[0] + state.attempts[1] - read[0] - read[1];
  CHECK(state.session.lost(state.ring, LossCause::ring_full) == lost);
  CHECK(state.session.site_lost(0, LossCause::ring_full) == state.attempts[0] - read[0]);
  CHECK(state.session.site_lost(1, LossCause::ring_full) == state.attempts[1] - read[1]);
  CHECK(ring_idle(state.ring));
  CHECK(state.ring->nested == 0);
  if (policy == FullPolicy::wait) CHECK(state.attempts[0] == read[0]);
}

}  // namespace

TEST_CASE("a thread and its signal handlers lose nothing when they wait") { run_stress(FullPolicy::wait); }
TEST_CASE("a thread and its signal handlers account for every record when they drop") { run_stress(FullPolicy::drop); }

}  // namespace sonde
