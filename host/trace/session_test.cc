#include "host/trace/session.h"

#include <doctest/doctest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>

#include "core/native/ticks.h"

namespace sonde::host {

TEST_CASE("a session is sparse, and both sides see the same layout") {
  auto session = Session::create({});
  REQUIRE(session.has_value());
  Session& s = **session;
  CHECK(s.header()->magic == kSessionMagic);
  CHECK(reinterpret_cast<char*>(s.ring(3)) == reinterpret_cast<char*>(ring_header(s.header(), 3)));
  CHECK(s.sites() == session_sites(s.header()));
  CHECK(s.counters() == session_counters(s.header()));
  s.sites()[kMaxSites - 1].flags = 7;
  ring_data(s.ring(511))[(1 << 20) / 8 - 1] = 1;
  struct stat st;
  REQUIRE(fstat(s.fd(), &st) == 0);
  CHECK(static_cast<uint64_t>(st.st_size) == s.layout().size);
  CHECK(st.st_blocks * 512 <= 4 * 4096);
  CHECK(ftruncate(s.fd(), 4096) == -1);  // sealed
}

TEST_CASE("the heart beats every few milliseconds and stops with the session") {
  auto session = Session::create({.ring_count = 2, .max_sites = 16});
  REQUIRE(session.has_value());
  Session& s = **session;
  uint64_t size = s.layout().size;
  void* view = mmap(nullptr, size, PROT_READ, MAP_SHARED, s.fd(), 0);
  REQUIRE(view != MAP_FAILED);
  auto* seen = static_cast<SessionHeader*>(view);
  double worst_ms = 0;
  for (int i = 0; i < 100; i++) {
    usleep(1000);
    auto age = static_cast<int64_t>(ticks() - __atomic_load_n(&seen->heartbeat_ticks, __ATOMIC_RELAXED));
    worst_ms = std::max(worst_ms, static_cast<double>(s.early_clock().ns(age)) / 1e6);
  }
  CHECK(worst_ms < 60);  // 5 on an idle machine; waiters give up at 70
  CHECK(s.early_clock().ns(static_cast<int64_t>(seen->heartbeat_timeout_ticks)) == doctest::Approx(70e6).epsilon(0.01));
  session->reset();
  uint64_t last = seen->heartbeat_ticks;
  usleep(20000);
  CHECK(seen->heartbeat_ticks == last);
  munmap(view, size);
}

TEST_CASE("impossible sizes are refused") {
  CHECK_FALSE(Session::create({.ring_bytes = 100000}).has_value());
  CHECK_FALSE(Session::create({.ring_bytes = 4096}).has_value());
  CHECK_FALSE(Session::create({.ring_count = 0}).has_value());
  CHECK_FALSE(Session::create({.max_sites = kMaxSites + 1}).has_value());
}

TEST_CASE("ticks become nanoseconds") {
  ClockSample a = sample_clock();
  usleep(30000);
  ClockSample b = sample_clock();
  TickClock clock(a, b);
  CHECK(clock.since_start(b.ticks) == doctest::Approx(b.monotonic_ns - a.monotonic_ns).epsilon(1e-6));
  CHECK(clock.ns(-static_cast<int64_t>(clock.ticks_of(1000000))) == doctest::Approx(-1000000).epsilon(1e-3));
  CHECK(std::abs((b.wall_ns - a.wall_ns) - (b.monotonic_ns - a.monotonic_ns)) < 1'000'000);
}

}  // namespace sonde::host
