// Threads and forked children: each has a ring of its own, none takes another's entries for its own.
#include <doctest/doctest.h>

#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include <map>
#include <set>

#include "tests/probe/programs.h"

using namespace sonde;
using namespace sonde::test;

namespace {

SONDE_HOOKABLE long inner(long x) {
  asm volatile("" ::: "memory");  // not pure: calls without a use stay
  return x ^ 1;
}
SONDE_HOOKABLE long outer(long x) { return inner(x) + inner(x + 2); }

uint32_t inner_site() {
  static uint32_t site = the_harness().hook(reinterpret_cast<void*>(inner));
  return site;
}
uint32_t outer_site() {
  static uint32_t site = the_harness().hook(reinterpret_cast<void*>(outer));
  return site;
}

void* many_calls(void* count) {
  long sum = 0;
  for (long i = 0; i < reinterpret_cast<long>(count); i++) sum += outer(4 * i);
  return reinterpret_cast<void*>(sum);
}

pid_t forked;
SONDE_HOOKABLE int forks(int x) {
  forked = fork();
  if (forked == 0) outer(4);
  return x + (forked == 0);
}

std::map<uint32_t, std::map<uint32_t, int>> by_thread(const Records& records) {
  std::map<uint32_t, std::map<uint32_t, int>> counts;
  for (const CallRecord& call : records.calls) counts[call.tid][call.site] += call.kind == ExitKind::returned;
  return counts;
}

}  // namespace

TEST_CASE("threads at once: every thread's calls are complete and in order") {
  Harness& harness = the_harness();
  inner_site(), outer_site();
  harness.drain();
  constexpr long kThreads = 8, kCalls = 50000;
  pthread_t threads[kThreads];
  for (pthread_t& thread : threads) pthread_create(&thread, nullptr, many_calls, reinterpret_cast<void*>(kCalls));
  for (pthread_t thread : threads) {
    void* sum;
    pthread_join(thread, &sum);
    CHECK(reinterpret_cast<long>(sum) == kCalls * (2 * kCalls - 2) * 2 + kCalls * 4);
  }
  Records records = harness.drain();
  auto counts = by_thread(records);
  CHECK(counts.size() == kThreads);
  for (auto& [tid, sites] : counts) {
    CHECK(sites[outer_site()] == kCalls);
    CHECK(sites[inner_site()] == 2 * kCalls);
  }
  int unordered = 0;
  for (size_t i = 1; i < records.calls.size(); i++)
    unordered += records.calls[i].tid == records.calls[i - 1].tid && records.calls[i].exit < records.calls[i - 1].exit;
  CHECK(unordered == 0);
}

TEST_CASE("a thousand threads one after the other, on the same stack: each is told apart") {
  Harness& harness = the_harness();
  inner_site(), outer_site();
  harness.drain();
  std::set<uint32_t> tids;
  int wrong = 0;
  uint64_t no_state = harness.lost_no_thread_state();
  for (int i = 0; i < 1000; i++) {
    pthread_t thread;
    pthread_create(&thread, nullptr, many_calls, reinterpret_cast<void*>(1));
    pthread_join(thread, nullptr);
    auto counts = by_thread(harness.drain());
    wrong += counts.size() != 1 || counts.begin()->second[inner_site()] != 2;
    if (!counts.empty()) tids.insert(counts.begin()->first);
  }
  CHECK(wrong == 0);
  CHECK(tids.size() == 1000);
  CHECK(harness.lost_no_thread_state() == no_state);
  CHECK(harness.lost(LossCause::no_ring) == 0);
}

TEST_CASE("a forked child takes a ring of its own and returns through frames entered by its parent") {
  Harness& harness = the_harness();
  static uint32_t forking = harness.hook(reinterpret_cast<void*>(forks));
  inner_site(), outer_site();
  for (int round = 0; round < 20; round++) {
    harness.drain();
    int result = forks(10);
    if (forked == 0) {
      outer(8);
      _exit(result);
    }
    outer(4);
    int status;
    waitpid(forked, &status, 0);
    REQUIRE(WIFEXITED(status));
    CHECK(WEXITSTATUS(status) == 11);
    Records records = harness.drain();
    auto counts = by_thread(records);
    REQUIRE(counts.size() == 2);
    auto& child = counts[static_cast<uint32_t>(forked)];
    auto& parent = counts[static_cast<uint32_t>(getpid())];
    CHECK(child[forking] == 0);  // it is one call, and its parent's
    REQUIRE(records.inherited.size() == 1);
    CHECK(records.inherited[0].site == forking);
    CHECK(records.inherited[0].kind == ExitKind::inherited);
    CHECK(records.inherited[0].tid == static_cast<uint32_t>(forked));
    CHECK(child[outer_site()] == 2);
    CHECK(child[inner_site()] == 4);
    CHECK(parent[forking] == 1);
    CHECK(parent[outer_site()] == 1);
    CHECK(parent[inner_site()] == 2);
  }
}
