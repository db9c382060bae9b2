// Sites patched with a trap: hits are as everywhere, and the program's own SIGTRAPs are its own.
#include <doctest/doctest.h>

#include <execinfo.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/probe/programs.h"

using namespace sonde;
using namespace sonde::test;

namespace {

std::vector<void*> stack_seen;
SONDE_HOOKABLE int trapped_inner(int x) {
  void* pcs[64];
  int count = backtrace(pcs, 64);
  stack_seen.assign(pcs + 1, pcs + count);
  return x * 3;
}
SONDE_HOOKABLE int trapped_outer(int x) { return trapped_inner(x) + 1; }
SONDE_HOOKABLE int trapped_throws(int x) {
  if (x > 0) throw x;
  return x;
}

volatile sig_atomic_t own_traps, on_alternate;
char alternate[32768];
void own_handler(int, siginfo_t*, void*) {
  own_traps = own_traps + 1;
  char here;
  on_alternate = &here >= alternate && &here < alternate + sizeof alternate;
  trapped_outer(1);
}

KernelSigaction program_wants(uint64_t handler, uint64_t flags) { return {handler, flags, 0, 0}; }

template <class Function>
int status_of(Function function) {
  pid_t child = fork();
  if (child == 0) {
    function();
    _exit(42);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return status;
}

}  // namespace

TEST_CASE("trap sites: calls are recorded, stacks and results are those of the unhooked program") {
  Harness& harness = the_harness();
  std::vector<void*> truth;
  static uint32_t inner, outer;
  for (int hooked = 0; hooked < 2; hooked++) {
    if (hooked) {
      inner = harness.hook_by_trap(reinterpret_cast<void*>(trapped_inner));
      outer = harness.hook_by_trap(reinterpret_cast<void*>(trapped_outer));
      harness.hook_by_trap(reinterpret_cast<void*>(trapped_throws));
      harness.drain();
    }
    CHECK(trapped_outer(5) == 16);
    if (!hooked) truth = stack_seen;
  }
  std::vector<void*> others;
  for (void* pc : stack_seen)
    if (!harness.is_trampoline(reinterpret_cast<uint64_t>(pc))) others.push_back(pc);
  CHECK(others.size() + 2 == stack_seen.size());
  CHECK((others == truth));
  auto calls = harness.drain().calls;
  REQUIRE(calls.size() == 2);
  CHECK(calls[0].site == inner);
  CHECK(calls[1].site == outer);
  CHECK(calls[1].entry < calls[0].entry);
  int caught = 0;
  for (int i = 1; i <= 100; i++) {
    try {
      trapped_throws(i);
    } catch (int x) {
      caught += x == i;
    }
  }
  CHECK(caught == 100);
  calls = harness.drain().calls;
  CHECK(calls.size() == 100);
  for (const CallRecord& call : calls) CHECK(call.kind == ExitKind::unwound);
}

TEST_CASE("a SIGTRAP of the program's own goes where the program wants it") {
  Harness& harness = the_harness();
  KernelSigaction before = harness.control()->program_trap;
  auto handler = reinterpret_cast<uint64_t>(own_handler);
  // Its own handler, also on its own stack; a hit inside it is a hit.
  stack_t stack{alternate, 0, sizeof alternate};
  sigaltstack(&stack, nullptr);
  for (int on_stack = 0; on_stack < 2; on_stack++) {
    own_traps = 0;
    harness.control()->program_trap = program_wants(handler, SA_SIGINFO | (on_stack ? SA_ONSTACK : 0));
    harness.drain();
    asm volatile("int3");
    raise(SIGTRAP);
    CHECK(own_traps == 2);
    CHECK(on_alternate == on_stack);
    CHECK(harness.drain().calls.size() == 4);
  }
  stack.ss_flags = SS_DISABLE;
  sigaltstack(&stack, nullptr);
  // Default and ignored.
  auto traps = [] { asm volatile("int3"); };
  auto raises = [] { raise(SIGTRAP); };
  harness.control()->program_trap = program_wants(0, 0);
  int status = status_of(traps);
  CHECK((WIFSIGNALED(status) && WTERMSIG(status) == SIGTRAP));
  status = status_of(raises);
  CHECK((WIFSIGNALED(status) && WTERMSIG(status) == SIGTRAP));
  harness.control()->program_trap = program_wants(1, 0);
  status = status_of(traps);
  CHECK((WIFSIGNALED(status) && WTERMSIG(status) == SIGTRAP));
  status = status_of(raises);
  CHECK((WIFEXITED(status) && WEXITSTATUS(status) == 42));
  // Once only.
  harness.control()->program_trap = program_wants(handler, SA_SIGINFO | SA_RESETHAND);
  status = status_of([] { raise(SIGTRAP), raise(SIGTRAP); });
  CHECK((WIFSIGNALED(status) && WTERMSIG(status) == SIGTRAP));
  harness.control()->program_trap = before;
}
