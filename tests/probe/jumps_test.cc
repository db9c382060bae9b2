// longjmp over hooked frames, and recursion deeper than the pool of return entries.
#include <doctest/doctest.h>

#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

#include "core/native/thread_pointer.h"
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
SONDE_HOOKABLE int leaves(int x) {
  if (x > 0) longjmp(target, 1);
  return x;
}
SONDE_HOOKABLE int leaves_by_trap(int x) {
  if (x > 0) longjmp(target, 1);
  return x + 1;
}
SONDE_HOOKABLE int stays_too(int x) {
  asm volatile("" ::: "memory");
  return x;
}
SONDE_HOOKABLE int leaves_at_last(int x) {
  if (x > 0) longjmp(target, 1);
  return x + 2;
}
SONDE_HOOKABLE int stays_at_last(int x) {
  asm volatile("" ::: "memory");
  return x;
}
SONDE_HOOKABLE int stays(int x) {
  sum += x;
  return x;
}

// Always the same call, with the same slot.
[[gnu::noinline]] void leave(int (*function)(int)) {
  if (!setjmp(target)) function(1);
}

SONDE_HOOKABLE int is_thrown_out(int x) {
  sum += x;
  return x;
}
sigjmp_buf out_of_the_engine;
long thrown_out;
void throw_out(int) {
  thrown_out++;
  siglongjmp(out_of_the_engine, 1);
}

// Where sonde_entry stands when it has taken an entry from the list: behind cmpxchg %rsi,32(%rdx); jne.
uint64_t behind_the_taking(const Harness& harness) {
  auto* entry = reinterpret_cast<const unsigned char*>(harness.agent_symbol("sonde_entry"));
  const std::vector<unsigned char> taking = {0x48, 0x0f, 0xb1, 0x72, 0x20};
  auto* found = std::search(entry, entry + 512, taking.begin(), taking.end());
  REQUIRE(found != entry + 512);
  REQUIRE(found[taking.size()] == 0x75);
  return reinterpret_cast<uint64_t>(found) + taking.size() + 2;
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

// In a child of its own, as it uses up the pool. Returns how many of the last hundred calls were recorded.
static int throw_out_of_the_engine(Harness& harness, uint32_t site, uint64_t at) {
  struct sigaction action{};
  action.sa_handler = throw_out;
  action.sa_flags = SA_NODEFER;
  sigaction(SIGTRAP, &action, nullptr);
  unsigned char saved = *reinterpret_cast<unsigned char*>(at), trap = 0xcc;
  constexpr long kThrown = kTrampolines + 10000;  // more than the pool has
  static long tries;
  Harness::write_code(at, &trap, 1);
  // The path that is thrown out is the usual one; the next hit settles what it left, and takes the full one.
  while (thrown_out < kThrown && tries++ < 20000000) {
    if (!sigsetjmp(out_of_the_engine, 0)) is_thrown_out(1), is_thrown_out(1);
    if (tries % 1000 == 0) harness.drain();
  }
  if (thrown_out < kThrown) return -1;
  Harness::write_code(at, &saved, 1);
  harness.drain();
  for (int i = 0; i < 100; i++) is_thrown_out(1);
  int returned = 0;
  for (const CallRecord& call : harness.drain().calls) returned += call.site == site && call.kind == ExitKind::returned;
  return returned;
}

TEST_CASE("entries that a handler's jump took out of the engine's hands are found again") {
  Harness& harness = the_harness();
  uint32_t site = harness.hook(reinterpret_cast<void*>(is_thrown_out));
  harness.drain();
  uint64_t at = behind_the_taking(harness);
  pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) _exit(throw_out_of_the_engine(harness, site, at));
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 100);
}

namespace {

// One context stops behind the taking of its entry, the other uses up the pool, and lets the first go on in the middle of that.
ucontext_t stopped, going_on;
bool stops;
SONDE_HOOKABLE int is_stopped(int x) {
  sum += x;
  return x + 1;
}
int stopped_result;
void body_of_stopped() {
  stopped_result = is_stopped(41);
  setcontext(&going_on);
}
void stop(int, siginfo_t*, void* context) {
  static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_RIP]--;  // back to what the trap stands for
  stops = false;
  swapcontext(&stopped, &going_on);
}
// The first goes on when all entries are used up.
void let_go_on() { swapcontext(&going_on, &stopped); }

// In a child of its own. 0: all went well.
int go_on_late(Harness& harness, uint64_t at, uint32_t site) {
  constexpr size_t kStack = size_t{1} << 28;
  // The stopped context's stack is below the other's.
  auto* stacks = static_cast<char*>(
      mmap(nullptr, 2 * kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  if (stacks == MAP_FAILED) return 2;
  struct sigaction action{};
  action.sa_sigaction = stop;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGTRAP, &action, nullptr);
  is_stopped(1), is_stopped(1);  // so that the usual path has entries at hand
  getcontext(&stopped);
  stopped.uc_stack.ss_sp = stacks;
  stopped.uc_stack.ss_size = kStack / 2;
  makecontext(&stopped, body_of_stopped, 0);
  unsigned char saved = *reinterpret_cast<unsigned char*>(at), trap = 0xcc;
  Harness::write_code(at, &trap, 1);
  stops = true;
  swapcontext(&going_on, &stopped);
  Harness::write_code(at, &saved, 1);
  if (stops) return 3;
  // On a stack above, deeper than there are entries.
  static ucontext_t deep, back;
  static int depth;
  depth = static_cast<int>(kTrampolines) + 20000;
  at_the_leaf = let_go_on;
  getcontext(&deep);
  deep.uc_stack.ss_sp = stacks + kStack;
  deep.uc_stack.ss_size = kStack;
  deep.uc_link = &back;
  makecontext(&deep, [] { depth -= run_deep(depth); }, 0);
  enable_subset(1 << kChain);
  swapcontext(&back, &deep);
  enable_subset(0);
  if (depth != 0) return 4;
  if (stopped_result != 42) return 5;
  int returned = 0;
  for (const CallRecord& call : harness.drain().calls) returned += call.site == site && call.kind == ExitKind::returned;
  return returned == 3 ? 0 : 6;
}

}  // namespace

TEST_CASE("an entry in the hands of a context that waits is not taken for lost") {
  Harness& harness = the_harness();
  uint32_t site = harness.hook(reinterpret_cast<void*>(is_stopped));
  hook_chain();
  harness.drain();
  uint64_t at = behind_the_taking(harness);
  pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) _exit(go_on_late(harness, at, site));
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
}

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

TEST_CASE("jumps away from one and the same call take the pool from nobody, however many and at whatever times") {
  Harness& harness = the_harness();
  harness.hook(reinterpret_cast<void*>(leaves));
  static uint32_t stay = harness.hook(reinterpret_cast<void*>(stays_too));
  harness.hook_by_trap(reinterpret_cast<void*>(leaves_by_trap));
  int (*const ways[])(int) = {leaves, leaves_by_trap};
  for (int (*function)(int) : ways) {
    CAPTURE(function == leaves);
    for (bool with_gap : {false, true}) {
      CAPTURE(with_gap);
      harness.drain();
      uint64_t lost = harness.lost(LossCause::no_return_entry), returned = 0;
      for (int i = 0; i < 400000; i++) {
        // A few in a hundredth of a second each, then all the others at once: the older half in time is nearly nothing.
        if (with_gap && i < 40) {
          timespec pause{0, 10000000};
          nanosleep(&pause, nullptr);
        }
        leave(function);
        if (i % 5000 == 0) harness.drain();
      }
      harness.drain();
      for (int n = 0; n < 100; n++) CHECK(stays_too(n) == n);
      for (const CallRecord& call : harness.drain().calls)
        returned += call.site == stay && call.kind == ExitKind::returned;
      CHECK(returned == 100);
      CHECK(harness.lost(LossCause::no_return_entry) == lost);
    }
  }
}

namespace {
uint64_t entries_in_use() {
  auto* owners = reinterpret_cast<const Ownership*>(the_harness().agent_symbol("sonde_owners"));
  uint64_t count = 0;
  for (uint32_t i = 0; i < kTrampolines; i++) count += owners[i].state == EntryState::in_use;
  return count;
}
}  // namespace

TEST_CASE("a jump out of a return's path, with no entry left, keeps nothing from being taken back") {
  Harness& harness = the_harness();
  harness.hook(reinterpret_cast<void*>(leaves_at_last));
  static uint32_t stay = harness.hook(reinterpret_cast<void*>(stays_at_last));
  harness.drain();
  while (uint64_t left = kTrampolines - entries_in_use())
    for (; left; left--) {
      leave(leaves_at_last);
      if (left % 5000 == 0) harness.drain();
    }
  harness.drain();
  auto* thread = static_cast<ThreadState*>(harness.control()->thread_area);
  while (thread->key != thread_pointer()) thread++;
  uint64_t lost = harness.lost(LossCause::no_return_entry), returned = 0, sp;
  int wrong = 0;
  asm volatile("mov %%rsp, %0" : "=r"(sp));
  thread->guards[0] = sp - 88;  // sonde_on_return's of a call made here
  for (int n = 0; n < 100; n++) wrong += stays_at_last(n) != n;
  CHECK(wrong == 0);
  for (const CallRecord& call : harness.drain().calls) returned += call.site == stay && call.kind == ExitKind::returned;
  CHECK(returned == 100);
  CHECK(harness.lost(LossCause::no_return_entry) == lost);
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
