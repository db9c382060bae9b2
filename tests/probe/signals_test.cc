// S17 and context levels: signals at any instruction of the engine, whose handlers call hooked functions, take stacks, or
// never come back.
#include <doctest/doctest.h>

#include <execinfo.h>
#include <setjmp.h>
#include <signal.h>
#include <string.h>
#include <sys/time.h>
#include <ucontext.h>

#include <cstdlib>
#include <map>

#include "tests/probe/programs.h"

using namespace sonde;
using namespace sonde::test;

namespace {

SONDE_HOOKABLE int leaf(int x) {
  asm volatile("" ::: "memory");  // not pure: all calls stay
  return x + 1;
}
SONDE_HOOKABLE int branch(int x) { return leaf(x) + leaf(x); }
SONDE_HOOKABLE int from_handler(int x) { return leaf(x) * 2; }

long handled, wrong_stacks, in_engine, in_detours, wrong_results;
void* outermost[3];  // return addresses that end every stack of this thread
bool jumps;
sigjmp_buf back;
constexpr int kMostFrames = 256;

void stop_signals() {
  itimerval timer{};
  setitimer(ITIMER_REAL, &timer, nullptr);
}

void handler(int, siginfo_t*, void* context) {
  handled++;
  int error = 4711;
  std::swap(error, errno);
  auto pc = static_cast<uint64_t>(static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_RIP]);
  wrong_results += from_handler(static_cast<int>(handled & 15)) != 2 * (1 + static_cast<int>(handled & 15));
  in_engine += the_harness().is_agent(pc);
  void* pcs[kMostFrames];
  int count = backtrace(pcs, kMostFrames);
  // A jump out of a handler lets the next signal in before the jump is done. Where a handler takes longer than the timer's
  // interval, that one jumps too, and so on without end: with no hooks as well. So the timer pauses; the test starts it again.
  if (jumps && count == kMostFrames) {
    stop_signals();
    std::swap(error, errno);
    siglongjmp(back, 1);
  }
  bool through_detour = false;  // interrupted in a detour, here or in an outer handler: only sonde's walker knows those
  for (int i = 0; i < count; i++) through_detour |= the_harness().is_detour(reinterpret_cast<uint64_t>(pcs[i]));
  in_detours += through_detour;
  for (int i = 0; i < 3 && !through_detour; i++) wrong_stacks += count < 6 || pcs[count - 3 + i] != outermost[i];
  std::swap(error, errno);
  if (jumps && handled % 3 == 0) siglongjmp(back, 1);
}

void start_signals(long microseconds, int flags) {
  struct sigaction action{};
  action.sa_sigaction = handler;
  action.sa_flags = SA_SIGINFO | flags;
  sigaction(SIGALRM, &action, nullptr);
  itimerval timer{{0, microseconds}, {0, microseconds}};
  setitimer(ITIMER_REAL, &timer, nullptr);
}

void note_outermost() {
  void* pcs[256];
  int count = backtrace(pcs, 256);
  for (int i = 0; i < 3; i++) outermost[i] = pcs[count - 3 + i];
}

long wanted_signals() {
  const char* wanted = getenv("SONDE_SIGNALS");
  return wanted ? atol(wanted) : 10000;
}

struct Sites {
  uint32_t leaf, branch, from_handler;
};
const Sites& hook_all() {
  static Sites sites{the_harness().hook(reinterpret_cast<void*>(leaf)),
                     the_harness().hook(reinterpret_cast<void*>(branch)),
                     the_harness().hook(reinterpret_cast<void*>(from_handler))};
  return sites;
}

}  // namespace

TEST_CASE("a fast timer over hooked code: results, records and stacks are right") {
  Harness& harness = the_harness();
  const Sites& sites = hook_all();
  harness.drain();
  note_outermost();
  handled = wrong_stacks = in_engine = in_detours = wrong_results = 0, jumps = false;
  uint64_t begun = harness.calls_begun(), lost = harness.lost(LossCause::nesting);
  std::map<uint32_t, long> counts;
  long wrong = 0, wrong_kinds = 0, rounds = 0;
  auto count = [&] {
    for (const CallRecord& call : harness.drain().calls)
      counts[call.site]++, wrong_kinds += call.kind != ExitKind::returned;
  };
  start_signals(100, 0);
  while (handled < wanted_signals()) {
    for (int i = 0; i < 1000; i++, rounds++) wrong += branch(i) != 2 * (i + 1);
    count();
  }
  stop_signals();
  count();
  MESSAGE(handled, " stacks taken in a handler, ", wrong_stacks, " wrong; ", in_engine, " signals hit the engine, ",
          in_detours, " detours");
  CHECK(wrong == 0);
  CHECK(wrong_results == 0);
  CHECK(wrong_kinds == 0);
  CHECK(wrong_stacks == 0);
  CHECK(in_engine > handled / 20);  // the test does hit the engine
  CHECK(in_detours < handled / 4);
  CHECK(counts[sites.branch] == rounds);
  CHECK(counts[sites.from_handler] == handled);
  CHECK(counts[sites.leaf] == 2 * rounds + handled);
  CHECK(harness.calls_begun() - begun == static_cast<uint64_t>(3 * rounds + 2 * handled));
  CHECK(harness.lost(LossCause::nesting) == lost);
}

TEST_CASE("handlers that leave by siglongjmp, from a stack of their own too, block neither levels nor ring") {
  Harness& harness = the_harness();
  const Sites& sites = hook_all();
  static char alternate[1 << 20];  // for the nesting that ends with kMostFrames
  stack_t stack{alternate, 0, sizeof alternate};
  sigaltstack(&stack, nullptr);
  for (int flags : {0, SA_ONSTACK}) {
    CAPTURE(flags);
    harness.drain();
    note_outermost();
    handled = wrong_stacks = wrong_results = 0, jumps = true;
    uint64_t nesting = harness.lost(LossCause::nesting);
    static long counts[3], finished, wrong;
    counts[0] = counts[1] = counts[2] = finished = wrong = 0;
    sigsetjmp(back, 1);
    start_signals(100, flags);
    while (handled < wanted_signals() / 2) {
      wrong += branch(5) != 12;
      finished++;
      if (finished % 1000) continue;
      sigset_t alarm, before;  // no jump out of malloc
      sigemptyset(&alarm), sigaddset(&alarm, SIGALRM);
      sigprocmask(SIG_BLOCK, &alarm, &before);
      for (const CallRecord& call : harness.drain().calls)
        if (call.kind == ExitKind::returned) counts[call.site == sites.branch ? 0 : call.site == sites.leaf ? 1 : 2]++;
      sigprocmask(SIG_SETMASK, &before, nullptr);
    }
    stop_signals();
    jumps = false;
    MESSAGE(handled, " stacks taken in a handler that may jump away, ", wrong_stacks, " wrong");
    CHECK(wrong == 0);
    CHECK(wrong_results == 0);
    CHECK(wrong_stacks == 0);
    uint64_t before = harness.lost(LossCause::nesting);
    harness.drain();
    for (int i = 0; i < 100; i++) CHECK(branch(1) == 4);
    long returned = 0;  // beside these, abandoned ones may be noticed just now
    for (const CallRecord& call : harness.drain().calls) returned += call.kind == ExitKind::returned;
    CAPTURE(harness.lost(LossCause::no_return_entry));
    CAPTURE(harness.lost(LossCause::ring_full));
    CAPTURE(harness.lost(LossCause::abandoned));
    CHECK(returned == 300);  // the ring publishes, no level is blocked
    CHECK(harness.lost(LossCause::nesting) == before);
    CHECK(before - nesting < 10);
  }
  stack.ss_flags = SS_DISABLE;
  sigaltstack(&stack, nullptr);
}
