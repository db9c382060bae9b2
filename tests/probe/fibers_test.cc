// Stacks of the program's own making: activations end in any order, and on another thread than they began.
#include <doctest/doctest.h>

#include <pthread.h>
#include <signal.h>
#include <sys/time.h>
#include <ucontext.h>

#include <map>
#include <memory>
#include <vector>

#include "tests/probe/programs.h"

using namespace sonde;
using namespace sonde::test;

namespace {

constexpr int kFibers = 50, kSteps = 40;

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  int number = 0, sum = 0;
  bool done = false;
};
Fiber fibers[kFibers];
thread_local ucontext_t scheduler;
thread_local Fiber* current;

__attribute__((noinline)) ucontext_t* this_scheduler() { return &scheduler; }
__attribute__((noinline)) Fiber* this_fiber() { return current; }

SONDE_HOOKABLE int yields(int x) {
  Fiber* fiber = this_fiber();
  swapcontext(&fiber->context, this_scheduler());
  return x + fiber->number;
}
SONDE_HOOKABLE int works(int step) { return yields(step) + yields(step * 2); }

void body() {
  Fiber* fiber = this_fiber();
  for (int step = 0; step < kSteps; step++) fiber->sum += works(step);
  fiber->done = true;
  swapcontext(&fiber->context, this_scheduler());
}

void resume(Fiber* fiber) {
  current = fiber;
  if (!fiber->done) swapcontext(this_scheduler(), &fiber->context);
}

void* one_turn(void* stride) {
  int step = static_cast<int>(reinterpret_cast<intptr_t>(stride));
  for (int i = 0; i < kFibers; i++) resume(&fibers[i * step % kFibers]);
  return nullptr;
}

}  // namespace

TEST_CASE("fibers that interleave and migrate between threads: every call ends once, with its own times") {
  Harness& harness = the_harness();
  static uint32_t yield_site = harness.hook(reinterpret_cast<void*>(yields)),
                  work_site = harness.hook(reinterpret_cast<void*>(works));
  harness.drain();
  for (int i = 0; i < kFibers; i++) {
    Fiber& fiber = fibers[i];
    fiber.number = i;
    fiber.stack.reset(new char[65536]);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = 65536;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, body, 0);
  }
  std::map<std::pair<uint32_t, ExitKind>, int> counts;
  int overlaps = 0;
  std::map<uint32_t, CallRecord> last_yield;
  for (int turn = 0; turn < 2 * kSteps + 1; turn++) {
    void* stride = reinterpret_cast<void*>(static_cast<intptr_t>("\x01\x03\x07"[turn % 3]));
    if (turn % 2) {
      pthread_t thread;
      pthread_create(&thread, nullptr, one_turn, stride);
      pthread_join(thread, nullptr);
    } else {
      one_turn(stride);
    }
    for (const CallRecord& call : harness.drain().calls) {
      counts[{call.site, call.kind}]++;
      if (call.site != yield_site) continue;
      auto [last, fresh] = last_yield.try_emplace(call.slot, call);
      overlaps += !fresh && last->second.exit >= call.entry;
      last->second = call;
    }
  }
  int wrong = 0;
  for (Fiber& fiber : fibers)
    wrong += !fiber.done || fiber.sum != 3 * kSteps * (kSteps - 1) / 2 + 2 * kSteps * fiber.number;
  CHECK(wrong == 0);
  CHECK(counts.size() == 2);
  CHECK((counts[{yield_site, ExitKind::returned}]) == 2 * kSteps * kFibers);
  CHECK((counts[{work_site, ExitKind::returned}]) == kSteps * kFibers);
  CHECK(overlaps == 0);
}

namespace {

// Contexts of one thread that a timer's handler switches between, wherever they are: also in the middle of a probe path.
constexpr int kPreempted = 6, kRounds = 20000;
ucontext_t preempted[kPreempted], preempting;
volatile int running;
volatile bool ended[kPreempted], preempts;
volatile long switches;
long results[kPreempted];

SONDE_HOOKABLE long level_3(long x) {
  asm volatile("" ::: "memory");
  return x ^ 5;
}
SONDE_HOOKABLE long level_2(long x) { return level_3(x) + level_3(x + 1); }
SONDE_HOOKABLE long level_1(long x) { return level_2(x) + 1; }

int next_of(int from) {
  for (int i = 1; i < kPreempted; i++)
    if (!ended[(from + i) % kPreempted]) return (from + i) % kPreempted;
  return -1;
}
void preempt(int) {
  int from = running, to = next_of(from);
  if (!preempts || to < 0) return;
  running = to;
  switches = switches + 1;
  swapcontext(&preempted[from], &preempted[to]);
}
// The signal is blocked until a context has its own stack: swapcontext sets the mask before it switches.
void preempted_body(int number) {
  sigset_t first;
  sigemptyset(&first);
  sigaddset(&first, SIGALRM);
  sigprocmask(SIG_UNBLOCK, &first, nullptr);
  for (long i = 0; i < kRounds; i++) results[number] += level_1(i);
  sigset_t alarm;
  sigemptyset(&alarm);
  sigaddset(&alarm, SIGALRM);
  sigprocmask(SIG_BLOCK, &alarm, nullptr);
  ended[number] = true;
  int to = next_of(number);
  if (to >= 0) running = to;
  setcontext(to >= 0 ? &preempted[to] : &preempting);
}

}  // namespace

TEST_CASE("contexts that a timer switches in the middle of a probe path: every call is recorded once") {
  Harness& harness = the_harness();
  static uint32_t sites[] = {harness.hook(reinterpret_cast<void*>(level_1)),
                             harness.hook(reinterpret_cast<void*>(level_2)),
                             harness.hook(reinterpret_cast<void*>(level_3))};
  harness.drain();
  std::vector<std::unique_ptr<char[]>> stacks;
  for (int i = 0; i < kPreempted; i++) {
    stacks.emplace_back(new char[65536]);
    getcontext(&preempted[i]);
    preempted[i].uc_stack.ss_sp = stacks.back().get();
    preempted[i].uc_stack.ss_size = 65536;
    preempted[i].uc_link = nullptr;
    sigaddset(&preempted[i].uc_sigmask, SIGALRM);
    makecontext(&preempted[i], reinterpret_cast<void (*)()>(preempted_body), 1, i);
  }
  struct sigaction action = {}, old;
  action.sa_handler = preempt;
  action.sa_flags = SA_RESTART;
  sigaction(SIGALRM, &action, &old);
  uint64_t lost =
      harness.lost(LossCause::nesting) + harness.lost(LossCause::ring_full) + harness.lost(LossCause::no_return_entry);
  itimerval every{{0, 100}, {0, 100}}, never{};
  sigset_t alarm;
  sigemptyset(&alarm);
  sigaddset(&alarm, SIGALRM);
  sigprocmask(SIG_BLOCK, &alarm, nullptr);
  preempts = true;
  setitimer(ITIMER_REAL, &every, nullptr);
  swapcontext(&preempting, &preempted[0]);
  setitimer(ITIMER_REAL, &never, nullptr);
  preempts = false;
  sigprocmask(SIG_UNBLOCK, &alarm, nullptr);
  sigaction(SIGALRM, &old, nullptr);

  std::map<std::pair<uint32_t, ExitKind>, int> counts;
  for (const CallRecord& call : harness.drain().calls) counts[{call.site, call.kind}]++;
  MESSAGE(switches, " switches");
  CHECK(switches > 20);
  for (long result : results) CHECK(result == results[0]);
  CHECK(counts.size() == 3);
  CHECK((counts[{sites[0], ExitKind::returned}]) == kPreempted * kRounds);
  CHECK((counts[{sites[1], ExitKind::returned}]) == kPreempted * kRounds);
  CHECK((counts[{sites[2], ExitKind::returned}]) == 2 * kPreempted * kRounds);
  CHECK(harness.lost(LossCause::nesting) + harness.lost(LossCause::ring_full) +
            harness.lost(LossCause::no_return_entry) ==
        lost);
}
