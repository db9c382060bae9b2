// Tail calls: one physical return ends every activation on the slot, innermost first.
#include <doctest/doctest.h>

#include <execinfo.h>

#include "tests/probe/chains.h"

using namespace sonde;
using namespace sonde::test;

extern "C" {
int tail_first(int);
int tail_second(int);
int tail_third(int);
int tail_even(int);
int tail_odd(int);
int tail_looks(int, int (*)(int));
}

namespace {

uint32_t hook(const void* function) { return the_harness().hook(const_cast<void*>(function)); }

std::vector<void*> looked;
SONDE_HOOKABLE int look(int x) {
  void* pcs[64];
  int count = backtrace(pcs, 64);
  looked.assign(pcs + 1, pcs + count);
  return x;
}

}  // namespace

TEST_CASE("three functions on one slot: three exits at one time, innermost first") {
  Harness& harness = the_harness();
  static uint32_t sites[] = {hook(reinterpret_cast<void*>(tail_first)), hook(reinterpret_cast<void*>(tail_second)),
                             hook(reinterpret_cast<void*>(tail_third))};
  harness.drain();
  for (int i = 0; i < 1000; i++) REQUIRE(tail_first(1) == 124);
  auto calls = harness.drain().calls;
  REQUIRE(calls.size() == 3000);
  int wrong = 0;
  for (size_t i = 0; i < calls.size(); i++) {
    wrong += calls[i].site != sites[2 - i % 3] || calls[i].kind != ExitKind::returned || calls[i].slot != calls[0].slot;
    wrong += i % 3 && calls[i].exit != calls[i - 1].exit;
    wrong += i % 3 && calls[i].entry >= calls[i - 1].entry;
  }
  CHECK(wrong == 0);
}

TEST_CASE("two million tail calls on one slot: all counted, with a bounded number of entries") {
  Harness& harness = the_harness();
  static uint32_t even = hook(reinterpret_cast<void*>(tail_even)), odd = hook(reinterpret_cast<void*>(tail_odd));
  harness.drain();
  constexpr int kJumps = 2000000;
  uint64_t counts[2] = {}, wrong_kind = 0;
  CHECK(tail_even(100000) == 0);  // within the ring
  for (const CallRecord& call : harness.drain().calls)
    counts[call.site == odd]++, wrong_kind += call.kind != ExitKind::returned;
  CHECK(counts[0] == 50001);
  CHECK(counts[1] == 50000);
  CHECK(wrong_kind == 0);
  uint64_t begun = harness.calls_begun(), lost = harness.lost(LossCause::no_return_entry);
  CHECK(tail_even(kJumps) == 0);
  CHECK(harness.calls_begun() - begun == kJumps + 1);
  CHECK(harness.lost(LossCause::no_return_entry) == lost);
  harness.drain();
  harness.enable(even, false);
  harness.enable(odd, false);
}

TEST_CASE("a stack taken below a shared slot has its caller once") {
  Harness& harness = the_harness();
  static uint32_t jumps = hook(reinterpret_cast<void*>(tail_looks)), looks = hook(reinterpret_cast<void*>(look));
  std::vector<void*> truth;
  for (int hooked = 0; hooked < 2; hooked++) {
    harness.enable(jumps, hooked);
    harness.enable(looks, hooked);
    CHECK(tail_looks(5, look) == 5);
    if (!hooked) truth = looked;
  }
  unsigned trampolines = 0;
  std::vector<void*> others;
  for (void* pc : looked)
    if (harness.is_trampoline(reinterpret_cast<uint64_t>(pc))) trampolines++;
    else others.push_back(pc);
  CHECK(trampolines == 1);
  CHECK((others == truth));
  harness.drain();
}
