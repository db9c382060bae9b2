// longjmp over hooked frames, and recursion deeper than the pool of return entries.
#include <doctest/doctest.h>

#include <pthread.h>
#include <setjmp.h>

#include "tests/probe/chains.h"

using namespace sonde;
using namespace sonde::test;

namespace {

jmp_buf target;
int sum;

SONDE_HOOKABLE int jumps_away(int left) {
  volatile char room[64];
  room[left] = 1;
  if (left == 0 && sum >= 0) longjmp(target, 1);
  return left > 0 ? jumps_away(left - 1) + room[left] : 0;
}
SONDE_HOOKABLE int stays(int x) {
  sum += x;
  return x;
}

int big_depth;
void* run_on_big_stack(void*) {
  at_the_leaf = [] {};
  return reinterpret_cast<void*>(static_cast<intptr_t>(run_deep(big_depth)));
}

int deep_on_big_stack(int depth) {
  big_depth = depth;
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setstacksize(&attributes, size_t{1} << 28);
  pthread_t thread;
  REQUIRE(pthread_create(&thread, &attributes, run_on_big_stack, nullptr) == 0);
  void* result;
  pthread_join(thread, &result);
  return static_cast<int>(reinterpret_cast<intptr_t>(result));
}

}  // namespace

TEST_CASE("20,000 longjmps over 17 hooked frames neither exhaust the pool nor mix up calls") {
  Harness& harness = the_harness();
  static uint32_t away = harness.hook(reinterpret_cast<void*>(jumps_away)),
                  stay = harness.hook(reinterpret_cast<void*>(stays));
  harness.drain();
  constexpr int kJumps = 20000, kFrames = 17;
  uint64_t lost = harness.lost(LossCause::no_return_entry), abandoned = 0, wrong = 0, stayed = 0;
  static int i;  // not in a register: setjmp
  for (i = 0; i < kJumps; i++) {
    if (!setjmp(target)) jumps_away(kFrames - 1);
    stays(1);
    if (i % 1000 != 999) continue;
    for (const CallRecord& call : harness.drain().calls) {
      abandoned += call.site == away && call.kind == ExitKind::abandoned;
      stayed += call.site == stay && call.kind == ExitKind::returned;
      wrong += call.site == stay ? call.kind != ExitKind::returned : call.kind != ExitKind::abandoned;
    }
  }
  CHECK(sum == kJumps);
  CHECK(stayed == kJumps);
  CHECK(wrong == 0);
  CHECK(harness.lost(LossCause::no_return_entry) == lost);
  // 340,000 entries were taken of 131,072: at least the difference was taken back.
  CHECK(abandoned >= kJumps * kFrames - kTrampolines);
  CHECK(abandoned < kJumps * kFrames);
}

TEST_CASE("recursion deeper than the pool: the calls beyond it are counted, the others return in balance") {
  Harness& harness = the_harness();
  uint32_t site = hook_chain()[kChain];
  harness.drain();
  constexpr int kDepth = 200000;
  uint64_t first_lost = 0;
  for (int round = 0; round < 3; round++) {
    uint64_t lost = harness.lost(LossCause::no_return_entry), begun = harness.calls_begun(), ended = 0, wrong = 0;
    enable_subset(1 << kChain);
    CHECK(deep_on_big_stack(kDepth) == kDepth);
    enable_subset(0);
    uint64_t last_slot = 0;
    for (const CallRecord& call : harness.drain().calls) {
      if (call.site != site) continue;
      ended++;
      wrong += call.kind != ExitKind::returned || (last_slot && call.slot <= last_slot);
      last_slot = call.slot;
    }
    lost = harness.lost(LossCause::no_return_entry) - lost;
    CHECK(wrong == 0);
    CHECK(lost >= kDepth + 1 - kTrampolines);
    CHECK(ended == kDepth + 1 - lost);
    CHECK(harness.calls_begun() - begun == ended);
    if (round == 0) first_lost = lost;
    CHECK(lost < first_lost + 2 * kKeepFree);  // the entries came back, but for what threads keep
  }
}
