// A signal between any two instructions of a write: single-steps (trap flag) through reserve, words and commit, and at
// the n-th instruction writes a record from the handler; for every n. x86-64 only, hence with the host's tests; the
// stress test beside core/event/ring.cc runs on every machine.
#include <doctest/doctest.h>
#include <signal.h>
#include <sys/mman.h>

#include <cstring>
#include <vector>

#include "core/event/ring.h"
#include "core/native/ticks.h"

namespace sonde {
namespace {

constexpr uint64_t kRingBytes = 1 << 16;
SessionHeader* session;
RingHeader* ring;
volatile int steps, interrupt_at;
volatile bool nested_written, nested_done;

void on_step(int) {
  steps = steps + 1;
  if (steps == interrupt_at) {
    nested_written = ring_write_call(session, ring, 2, ExitKind::returned, 0, 7, 8);
    nested_done = true;
  }
}

[[gnu::noinline]] bool stepped_write() {
  asm volatile("lea -128(%%rsp), %%rsp; pushfq; orl $0x100, (%%rsp); popfq; lea 128(%%rsp), %%rsp" ::: "memory", "cc");
  bool written = ring_write_call(session, ring, 1, ExitKind::returned, 0, 5, 6);
  asm volatile("lea -128(%%rsp), %%rsp; pushfq; andl $~0x100, (%%rsp); popfq; lea 128(%%rsp), %%rsp" ::
                   : "memory", "cc");
  return written;
}

// All published records; fails on anything else between head and tail.
std::vector<uint32_t> published_sites() {
  std::vector<uint32_t> sites;
  for (uint64_t head = ring->head; head != ring->tail;) {
    uint64_t* words = ring_data(ring) + head % kRingBytes / 8;
    REQUIRE(record_words(words[0]) > 0);
    head += record_words(words[0]) * 8;
    REQUIRE(head <= ring->tail);
    if (record_type(words[0]) == RecordType::hole) continue;
    uint64_t first = record_site(words[0]) == 1 ? 5 : 7;
    REQUIRE(words[1] == first);
    REQUIRE(words[2] == first + 1);
    sites.push_back(record_site(words[0]));
  }
  return sites;
}

// A ring with `used` bytes written since it was taken, of which all but `unread` are consumed.
void reset(uint64_t used, uint64_t unread) {
  std::memset(static_cast<void*>(ring), 0, sizeof *ring);
  ring->reserve = ring->tail = used;
  ring->head = used - unread;
  ring->mask = kRingBytes - 1;
  ring->limit = std::min((used | ring->mask) + 1, ring->head + kRingBytes);
}

// Returns the number of instructions.
int interrupt_everywhere(uint64_t used, uint64_t unread, size_t fits) {
  for (int at = 1;; at++) {
    CAPTURE(at);
    interrupt_at = at;
    reset(used, unread);
    uint64_t start = ring->tail;
    steps = 0;
    nested_done = false;
    nested_written = false;
    bool written = stepped_write();
    if (!nested_done) return steps;
    ring->head = start;
    auto sites = published_sites();
    REQUIRE(sites.size() == fits);
    REQUIRE(int{written} + int{nested_written} == int(fits));
    REQUIRE(ring->lost[static_cast<unsigned>(LossCause::ring_full)] == 2 - fits);
    REQUIRE(ring->lost_calls == 2 - fits);
    REQUIRE(ring_idle(ring));
    REQUIRE(ring->nested == 0);
  }
}

}  // namespace

TEST_CASE("a signal at every instruction of a write: both records come out whole") {
  uint64_t size = 2 * kPage + kPage + kPage + kRingBytes;
  void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  REQUIRE(memory != MAP_FAILED);
  session = new (memory) SessionHeader{};
  session->counters_offset = 2 * kPage;
  session->rings_offset = 3 * kPage;
  session->ring_bytes = kRingBytes;
  session->ring_count = 1;
  session->site_count = 4;
  session->state = static_cast<uint32_t>(SessionState::recording);
  session->policy = FullPolicy::drop;
  ring = ring_header(session, 0);
  struct sigaction action = {}, old;
  action.sa_handler = on_step;
  sigaction(SIGTRAP, &action, &old);

  SUBCASE("in the middle") { CHECK(interrupt_everywhere(2400, 0, 2) > 15); }
  SUBCASE("with a hole at the end for both, the first, the second") {
    CHECK(interrupt_everywhere(kRingBytes - 16, 0, 2) > 30);
    CHECK(interrupt_everywhere(kRingBytes - 24, 0, 2) > 15);
    CHECK(interrupt_everywhere(kRingBytes - 32, 0, 2) > 15);
  }
  SUBCASE("room for one only") { CHECK(interrupt_everywhere(kRingBytes + 2400, kRingBytes - 40, 1) > 15); }
  SUBCASE("room for none") { CHECK(interrupt_everywhere(kRingBytes + 2400, kRingBytes - 16, 0) > 30); }
  SUBCASE("handlers that may wait, beside a recorder that beats") {
    session->policy = FullPolicy::wait;
    session->heartbeat_ticks = ticks();
    session->heartbeat_timeout_ticks = ~uint64_t{0} >> 1;
    CHECK(interrupt_everywhere(2400, 0, 2) > 15);
  }
  sigaction(SIGTRAP, &old, nullptr);
  munmap(memory, size);
}

}  // namespace sonde
