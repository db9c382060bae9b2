// How deep the agent's paths go on the program's stack: measured on painted memory, and held against a budget each, so that growth
// is noticed. A handler may have no more than some hundred bytes (tests/cases/113, 115). Depth counts from the sp at the
// site, for a handler from its return slot, down to the lowest byte that was changed.
#include <doctest/doctest.h>

#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "core/native/syscall.h"
#include "core/probe/alternate_stack.h"
#include "core/probe/signal_abi.h"
#include "tests/probe/programs.h"

using namespace sonde;
using namespace sonde::test;

extern "C" {
extern uint64_t budget_call[7], budget_result, budget_handler_sp;  // number and arguments
extern char budget_call_site[];
void budget_makes_call();
void budget_handler(int);
uint64_t budget_call[7], budget_result, budget_handler_sp;
}
asm(R"(
    .text
    .globl budget_makes_call, budget_call_site, budget_handler
    .type budget_makes_call, @function
budget_makes_call:
    mov budget_call(%rip), %rax
    mov budget_call+8(%rip), %rdi
    mov budget_call+16(%rip), %rsi
    mov budget_call+24(%rip), %rdx
    mov budget_call+32(%rip), %r10
    mov budget_call+40(%rip), %r8
    mov budget_call+48(%rip), %r9
budget_call_site:
    syscall
    nopl (%rax)
    mov %rax, budget_result(%rip)
    ret
    .size budget_makes_call, . - budget_makes_call
    .type budget_handler, @function
budget_handler:
    mov %rsp, budget_handler_sp(%rip)
    ret
    .size budget_handler, . - budget_handler
)");

namespace {

SONDE_HOOKABLE void does_nothing() { asm volatile("" ::: "memory"); }
SONDE_HOOKABLE void does_nothing_either() { asm volatile("nop" ::: "memory"); }
jmp_buf target;
SONDE_HOOKABLE void jumps_away() { longjmp(target, 1); }

constexpr unsigned char kPaint = 0x5a;
alignas(16) unsigned char painted[65536];
unsigned char* const top = painted + sizeof painted;

void paint() { std::memset(painted, kPaint, sizeof painted); }
uint64_t lowest() {
  unsigned char* at = painted;
  while (at < top && *at == kPaint) at++;
  return reinterpret_cast<uint64_t>(at);
}

// Of a function that needs no stack itself. What calling it unhooked costs is its return address, from which depth counts.
[[gnu::noinline]] uint64_t depth_of(void (*function)()) {
  paint();
  asm volatile("mov %%rsp, %%rbx; mov %0, %%rsp; call *%1; mov %%rbx, %%rsp"
               :
               : "r"(top), "r"(function)
               : "rbx", "rax", "rcx", "rdx", "rsi", "rdi", "r8", "r9", "r10", "r11", "memory", "cc");
  return reinterpret_cast<uint64_t>(top) - 8 - lowest();
}

uint64_t make_call(
    std::initializer_list<uint64_t> call, uint64_t (*make)() = [] { return budget_makes_call(), uint64_t{0}; }) {
  std::memset(budget_call, 0, sizeof budget_call);
  std::copy(call.begin(), call.end(), budget_call);
  uint64_t depth = make();
  CHECK(budget_result == 0);
  return depth;
}
uint64_t depth_of_call(std::initializer_list<uint64_t> call) {
  return make_call(call, [] { return depth_of(budget_makes_call); });
}

[[gnu::noinline]] void leave() {
  if (!setjmp(target)) jumps_away();
}

// The way in and the way out of a handler on the painted stack.
uint64_t depth_of_handler() {
  paint();
  system_call(SYS_tgkill, static_cast<uint64_t>(getpid()), static_cast<uint64_t>(gettid()), SIGUSR1);
  return budget_handler_sp - lowest();
}

const timespec none{};
uint64_t word(const void* p) { return reinterpret_cast<uint64_t>(p); }

}  // namespace

#define CHECK_BUDGET(what, depth, budget) \
  do { \
    uint64_t bytes = depth; \
    MESSAGE(what, ": ", bytes, " bytes of ", budget, ""); \
    CHECK(bytes <= budget); \
    CHECK(bytes > 64); /* it was there at all */ \
  } while (false)

TEST_CASE("stack: what the agent's paths need at most") {
  Harness& harness = the_harness();
  harness.hook(reinterpret_cast<void*>(does_nothing));
  harness.hook(reinterpret_cast<void*>(does_nothing_either), kSiteHijack | kSiteStack);
  harness.hook(reinterpret_cast<void*>(jumps_away));
  harness.hook_system_call(budget_call_site, false);

  static uint64_t first;
  pthread_t thread;
  auto run = [](void*) -> void* { return first = depth_of(does_nothing), nullptr; };
  pthread_create(&thread, nullptr, run, nullptr);
  pthread_join(thread, nullptr);
  CHECK_BUDGET("a thread's first hit", first, 512);
  does_nothing(), does_nothing_either();
  CHECK_BUDGET("a hit and its return", depth_of(does_nothing), 384);
  CHECK_BUDGET("a hit with a stack", depth_of(does_nothing_either), kDeepPathBytes);

  // Handlers on the painted stack, and the calls that lead to them.
  static uint64_t mask = 1 << 11, old_mask, action[4], old_action[4];
  action[0] = word(reinterpret_cast<void*>(budget_handler)), action[1] = SA_ONSTACK | kSaRestorer;
  struct sigaction own{};
  own.sa_handler = budget_handler, own.sa_flags = SA_ONSTACK;
  REQUIRE(sigaction(SIGUSR1, &own, nullptr) == 0);
  system_call(SYS_rt_sigaction, SIGUSR1, 0, word(old_action), 8);
  action[2] = old_action[2];  // libc's restorer
  stack_t stack{};
  stack.ss_sp = painted, stack.ss_size = sizeof painted;
  CHECK_BUDGET("sigaltstack", depth_of_call({SYS_sigaltstack, word(&stack)}), 640);
  CHECK_BUDGET("rt_sigaction", depth_of_call({SYS_rt_sigaction, SIGUSR1, word(action), word(old_action), 8}), 512);
  CHECK_BUDGET("a handler", depth_of_handler(), 192);

  harness.use_traps();
  CHECK_BUDGET("rt_sigaction, traps", depth_of_call({SYS_rt_sigaction, SIGUSR1, word(action), word(old_action), 8}),
               512);
  CHECK_BUDGET("rt_sigprocmask, traps",
               depth_of_call({SYS_rt_sigprocmask, SIG_SETMASK, word(&mask), word(&old_mask), 8}), 576);
  mask = ~uint64_t{0};
  CHECK_BUDGET("rt_sigprocmask that blocks SIGTRAP",
               depth_of_call({SYS_rt_sigprocmask, SIG_SETMASK, word(&mask), 0, 8}), 640);
  mask = 0;
  CHECK_BUDGET("rt_sigprocmask that unblocks it", depth_of_call({SYS_rt_sigprocmask, SIG_SETMASK, word(&mask), 0, 8}),
               576);
  CHECK_BUDGET("ppoll, traps", depth_of_call({SYS_ppoll, 0, 0, word(&none), word(&mask), 8}), 640);
  CHECK_BUDGET("a handler, traps", depth_of_handler(), 384);

  __atomic_fetch_or(&harness.control()->flags, uint32_t{kControlDisarmed | kControlTrapsGone}, __ATOMIC_RELAXED);
  CHECK_BUDGET("rt_sigprocmask, traps gone", depth_of_call({SYS_rt_sigprocmask, SIG_SETMASK, word(&mask), 0, 8}), 448);
  CHECK_BUDGET("ppoll, traps gone", depth_of_call({SYS_ppoll, 0, 0, word(&none), word(&mask), 8}), 448);
  CHECK_BUDGET("a handler, traps gone", depth_of_handler(), 256);
  // On an alternate stack with no room for a walk.
  auto with_room = [&](uint64_t bytes) {
    stack.ss_size = kDeepPathBytes;
    stack.ss_sp = top - bytes;
    make_call({SYS_sigaltstack, word(&stack)});
    return depth_of(does_nothing_either);
  };
  CHECK_BUDGET("a hit with a stack, without room for it", with_room(kDeepPathBytes), 704);
  // Nor for the way there.
  CHECK_BUDGET("a hit whose stack is left out", with_room(704), 416);
  stack.ss_flags = SS_DISABLE;
  make_call({SYS_sigaltstack, word(&stack)});

  // The look through the pool: at the hit that finds it empty.
  uint64_t deepest = 0;
  for (int i = 0; i < 140000; i++) {
    leave();
    if (i >= 131000)
      if (uint64_t depth = depth_of(does_nothing); depth > deepest) deepest = depth;
    if (i % 5000 == 0) harness.drain();
  }
  CHECK_BUDGET("a look through the pool", deepest, kDeepPathBytes);
}
