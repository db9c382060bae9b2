// One hooked function: its call is recorded, and the program does not notice.
#include <doctest/doctest.h>

#include <sys/syscall.h>
#include <unistd.h>

#include "tests/probe/programs.h"

using namespace sonde;
using namespace sonde::test;

namespace {

SONDE_HOOKABLE int twice(int x) { return 2 * x; }
SONDE_HOOKABLE int plain(int x) { return x + 3; }

}  // namespace

TEST_CASE("a hooked call is recorded once, with its times, slot and thread") {
  Harness& harness = the_harness();
  static uint32_t site = harness.hook(reinterpret_cast<void*>(twice));
  harness.drain();
  uint64_t before = ticks();
  CHECK(twice(21) == 42);
  uint64_t after = ticks();
  Records records = harness.drain();
  REQUIRE(records.calls.size() == 1);
  const CallRecord& call = records.calls[0];
  CHECK(call.site == site);
  CHECK(call.kind == ExitKind::returned);
  CHECK(before < call.entry);
  CHECK(call.entry < call.exit);
  CHECK(call.exit < after);
  CHECK(call.tid == syscall(SYS_gettid));
  auto here = reinterpret_cast<uint64_t>(__builtin_frame_address(0));
  CHECK(slot_key(here) - call.slot < 4096);
}

TEST_CASE("a site whose return is not to be hooked gives an entry record; a disabled one gives none") {
  Harness& harness = the_harness();
  static uint32_t site = harness.hook(reinterpret_cast<void*>(plain), 0);
  harness.drain();
  CHECK(plain(1) == 4);
  harness.enable(site, false);
  CHECK(plain(2) == 5);
  harness.enable(site, true);
  Records records = harness.drain();
  CHECK(records.calls.empty());
  REQUIRE(records.entries.size() == 1);
  CHECK(records.entries[0].site == site);
}

TEST_CASE("calls hooked before the recording stops return rightly after it") {
  Harness& harness = the_harness();
  static uint32_t site = harness.hook(reinterpret_cast<void*>(stop_inside));
  harness.drain();
  CHECK(stop_inside(5) == 6);
  CHECK(harness.drain().calls.empty());
  harness.set_state(SessionState::recording);
  CHECK(stop_inside(-1) == 0);
  REQUIRE(harness.drain().calls.size() == 1);
  harness.enable(site, false);
}
