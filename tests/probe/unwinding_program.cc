// Exceptions, pthread_exit and cancellation through hooked frames. Built once per unwinder (CMakeLists.txt); each hooked call
// left that way must run its cleanups and give an `unwound` record, each that returns a `returned` one.
#include <pthread.h>
#include <semaphore.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <stdexcept>

#include "tests/probe/programs.h"

using namespace sonde;
using namespace sonde::test;

namespace {

int failures;
#define EXPECT_EQ(a, b) \
  do { \
    long left_ = (a), right_ = (b); \
    if (left_ != right_) failures++, std::printf("line %d: %s is %ld, not %ld\n", __LINE__, #a, left_, right_); \
  } while (0)

int cleanups;
struct Cleanup {
  ~Cleanup() { __atomic_fetch_add(&cleanups, 1, __ATOMIC_RELAXED); }
};

enum class Ending { back, exception, exits, waits };
sem_t waiting;

struct Small {
  int value;
};

SONDE_HOOKABLE int innermost(Ending ending, int x) {
  Cleanup cleanup;
  if (ending == Ending::exception) throw Small{x};
  if (ending == Ending::exits) pthread_exit(nullptr);
  if (ending == Ending::waits) sem_post(&waiting), pause();
  return x;
}
SONDE_HOOKABLE int middle(Ending ending, int x, int depth) {
  Cleanup cleanup;
  int result = depth ? middle(ending, x, depth - 1) : innermost(ending, x);
  return result + 1;
}
SONDE_HOOKABLE int catches(int x) {
  try {
    return middle(Ending::exception, x, 3);
  } catch (const Small& small) {
    return small.value + 1000;
  }
}
SONDE_HOOKABLE int rethrows(int x) {
  try {
    return middle(Ending::exception, x, 1);
  } catch (...) {
    Cleanup cleanup;
    throw;
  }
}
SONDE_HOOKABLE int catches_in_cleanup(int x) {
  struct Inner {
    int* sum;
    ~Inner() { *sum += catches(1); }
  };
  int sum = 0;
  try {
    Inner inner{&sum};
    rethrows(x);
  } catch (const Small& small) {
    sum += small.value;
  }
  return sum;
}
// The handler is the direct caller of a hooked function: its frame has the CFA of the trampoline's.
SONDE_HOOKABLE int direct(int x) {
  try {
    return innermost(Ending::exception, x);
  } catch (const Small& small) {
    return -small.value;
  }
}

std::map<std::pair<uint32_t, ExitKind>, long> count(Harness& harness) {
  std::map<std::pair<uint32_t, ExitKind>, long> counts;
  for (const CallRecord& call : harness.drain().calls) counts[{call.site, call.kind}]++;
  return counts;
}

void* thread_exits(void*) {
  middle(Ending::exits, 1, 2);
  return nullptr;
}
void* thread_waits(void*) {
  middle(Ending::waits, 1, 2);
  return nullptr;
}

}  // namespace

int main(int argc, char** argv) {
  auto has = [&](const char* word) {
    for (int i = 1; i < argc; i++)
      if (std::strcmp(argv[i], word) == 0) return true;
    return false;
  };
  HarnessOptions options;
  if (has("own-unwinder")) options.unwinders_of = argv[0];  // what the host does for programs that carry one
  Harness harness(options);
  uint32_t s_inner = harness.hook(reinterpret_cast<void*>(innermost));
  uint32_t s_middle = harness.hook(reinterpret_cast<void*>(middle));
  uint32_t s_catches = harness.hook(reinterpret_cast<void*>(catches));
  uint32_t s_rethrows = harness.hook(reinterpret_cast<void*>(rethrows));
  uint32_t s_cleanup = harness.hook(reinterpret_cast<void*>(catches_in_cleanup));
  uint32_t s_direct = harness.hook(reinterpret_cast<void*>(direct));
  if (has("unhooked")) harness.enable_all(false);
  constexpr auto returned = ExitKind::returned, unwound = ExitKind::unwound;

  constexpr int kRounds = 200;
  for (int i = 0; i < kRounds; i++) {
    EXPECT_EQ(middle(Ending::back, 5, 2), 8);
    EXPECT_EQ(catches(7), 1007);
    EXPECT_EQ(direct(9), -9);
    EXPECT_EQ(catches_in_cleanup(3), 1001 + 3);
  }
  auto counts = count(harness);
  EXPECT_EQ((counts[{s_inner, returned}]), kRounds);
  EXPECT_EQ((counts[{s_inner, unwound}]), 4 * kRounds);
  EXPECT_EQ((counts[{s_middle, returned}]), 3 * kRounds);
  EXPECT_EQ((counts[{s_middle, unwound}]), (4 + 4 + 2) * kRounds);
  EXPECT_EQ((counts[{s_catches, returned}]), 2 * kRounds);
  EXPECT_EQ((counts[{s_rethrows, unwound}]), kRounds);
  EXPECT_EQ((counts[{s_cleanup, returned}]), kRounds);
  EXPECT_EQ((counts[{s_direct, returned}]), kRounds);
  EXPECT_EQ(cleanups, (4 + 5 + 1 + 5 + 3 + 1) * kRounds);

  bool uncaught = false;
  try {
    rethrows(1);
  } catch (const Small&) {
    uncaught = std::uncaught_exceptions() == 0;
  }
  EXPECT_EQ(uncaught, true);
  count(harness);

  // glibc takes pthread_exit and cancellation to libgcc_s whatever the program is linked with; the personality of C++
  // functions then asks the other unwinder about libgcc's context. Such a program crashes untraced ("unhooked" shows it).
  if (has("exceptions-only"))
    return std::printf("%s, exceptions only\n", failures ? "FAILED" : "passed"), failures != 0;

  cleanups = 0;
  sem_init(&waiting, 0, 0);
  constexpr int kThreads = 20;
  for (int i = 0; i < kThreads; i++) {
    pthread_t thread;
    pthread_create(&thread, nullptr, thread_exits, nullptr);
    pthread_join(thread, nullptr);
    pthread_create(&thread, nullptr, thread_waits, nullptr);
    sem_wait(&waiting);
    pthread_cancel(thread);
    void* result = nullptr;
    pthread_join(thread, &result);
    EXPECT_EQ(result == PTHREAD_CANCELED, true);
  }
  counts = count(harness);
  EXPECT_EQ((counts[{s_inner, unwound}]), 2 * kThreads);
  EXPECT_EQ((counts[{s_middle, unwound}]), 6 * kThreads);
  EXPECT_EQ(cleanups, 8 * kThreads);
  EXPECT_EQ(harness.lost(LossCause::nesting), 0);
  EXPECT_EQ(harness.session()->check_reason[0], 0);
  std::printf("%s\n", failures ? "FAILED" : "passed");
  return failures != 0;
}
