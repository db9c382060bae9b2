// Summing with real calls: what the tree in the ring's area says after recursion, tail calls, exceptions, longjmp, fibers
// and handlers on a stack of their own.
#include <doctest/doctest.h>
#include <setjmp.h>
#include <signal.h>
#include <ucontext.h>

#include <map>
#include <string>
#include <thread>

#include "core/event/sum.h"
#include "harness.h"

namespace sonde::test {
namespace {

using Tree = std::map<std::string, SumNode>;  // by the sites on the path, as letters

// One harness for all cases: what a case sees is what was counted since it began.
class Sums {
 public:
  Sums() { before_ = read(); }

  // The nodes with new counts, of all threads.
  Tree tree() {
    Tree now = read(), fresh;
    for (auto& [path, node] : now) {
      SumNode& old = before_[path];
      for (auto field : {&SumNode::entered, &SumNode::returned, &SumNode::unwound, &SumNode::tail_calls,
                         &SumNode::entries, &SumNode::total})
        node.*field -= old.*field;
      if (node.entered || node.entries) fresh[path] = node;
    }
    return fresh;
  }
  static Harness& harness() {
    static Harness harness([] {
      HarnessOptions options;
      options.ring_bytes = uint64_t{1} << 20;
      options.policy = FullPolicy::sum;
      return options;
    }());
    return harness;
  }

 private:
  static Tree read();
  Tree before_;
};

volatile int kept;
jmp_buf back;

SONDE_HOOKABLE void leaf() { kept = kept + 1; }
SONDE_HOOKABLE void twice() {
  leaf(), leaf();
  kept = kept + 1;
}
SONDE_HOOKABLE int recurse(int n) {
  int inner = n ? recurse(n - 1) : 0;
  kept = inner;
  return inner + 1;
}
SONDE_HOOKABLE void throws() { throw 1; }
SONDE_HOOKABLE void passes() {
  throws();
  kept = kept + 1;
}
SONDE_HOOKABLE void jumps() { longjmp(back, 1); }
SONDE_HOOKABLE void entered_only() { kept = kept + 1; }
[[gnu::noinline]] void deeper(int n) {
  volatile char room[512] = {};
  if (n) deeper(n - 1);
  else leaf();
  kept = kept + room[7];
}
SONDE_HOOKABLE void sets_jump() {
  if (!setjmp(back)) jumps();
  deeper(3);  // its frames lie where that of jumps was, and its call below
}

ucontext_t main_context, fiber_contexts[2];
alignas(16) char fiber_stacks[2][64 << 10];
SONDE_HOOKABLE void yields(int i) { swapcontext(&fiber_contexts[i], &main_context), leaf(); }
SONDE_HOOKABLE void fiber(int i) {
  yields(i), yields(i);
  kept = kept + 1;
}
SONDE_HOOKABLE void resumes(int i) { swapcontext(&main_context, &fiber_contexts[i]), leaf(); }

SONDE_HOOKABLE void handles() {
  leaf();
  kept = kept + 1;
}
void on_signal(int) { handles(); }
SONDE_HOOKABLE void interrupted() { raise(SIGUSR1), leaf(); }

std::map<uint32_t, char>& names() {
  static std::map<uint32_t, char> all;
  if (!all.empty()) return all;
  auto hook = [](char name, auto* function, uint32_t flags = kSiteHijack) {
    all[Sums::harness().hook(reinterpret_cast<void*>(function), flags)] = name;
  };
  hook('l', leaf), hook('t', twice), hook('r', recurse), hook('e', entered_only, 0), hook('x', throws),
      hook('p', passes);
  hook('s', sets_jump), hook('j', jumps), hook('m', resumes), hook('f', fiber), hook('y', yields), hook('h', handles);
  hook('i', interrupted);
  return all;
}

Tree Sums::read() {
  Tree all;
  std::map<uint32_t, char>& name = names();
  for (uint32_t r = 0; r < harness().rings_taken(); r++) {
    auto* area = reinterpret_cast<SumArea*>(ring_data(ring_header(harness().session(), r)));
    if (!area->process) continue;
    SumNode* nodes = sum_nodes(area);
    for (uint32_t i = 1; i < area->nodes_taken; i++) {
      std::string path;
      for (uint32_t at = i; at; at = nodes[at].parent) path.insert(0, 1, name[nodes[at].site]);
      SumNode& sum = all[path];
      for (auto field : {&SumNode::entered, &SumNode::returned, &SumNode::unwound, &SumNode::tail_calls,
                         &SumNode::entries, &SumNode::total})
        sum.*field += nodes[i].*field;
    }
  }
  return all;
}

}  // namespace

TEST_CASE("sums: calls by their callers, recursion, hits without a hooked return") {
  Sums sums;
  for (int i = 0; i < 5; i++) twice();
  leaf();
  recurse(2);
  entered_only();
  Tree tree = sums.tree();
  CHECK(tree.size() == 7);
  CHECK(tree["t"].returned == 5);
  CHECK(tree["tl"].returned == 10);
  CHECK(tree["l"].returned == 1);
  CHECK(tree["r"].returned == 1);
  CHECK(tree["rr"].returned == 1);
  CHECK(tree["rrr"].returned == 1);
  CHECK(tree["e"].entries == 1);
  CHECK(tree["tl"].total <= tree["t"].total);
  CHECK(tree["rr"].total < tree["r"].total);
  CHECK(Sums::harness().drain().calls.empty());
}

TEST_CASE("sums: exceptions end calls as unwound") {
  Sums sums;
  for (int i = 0; i < 3; i++) {
    try {
      passes();
    } catch (int) {
    }
    leaf();
  }
  Tree tree = sums.tree();
  CHECK(tree.size() == 3);
  CHECK(tree["p"].unwound == 3);
  CHECK(tree["px"].unwound == 3);
  CHECK(tree["l"].returned == 3);
}

TEST_CASE("sums: what follows a longjmp is not called from what it left, even deeper on the stack") {
  Sums sums;
  for (int i = 0; i < 4; i++) sets_jump();
  leaf();
  Tree tree = sums.tree();
  CHECK(tree.size() == 4);
  CHECK(tree["s"].returned == 4);
  CHECK(tree["sj"].entered == 4);
  CHECK(tree["sj"].returned == 0);
  CHECK(tree["sl"].returned == 4);
  CHECK(tree["l"].returned == 1);
}

TEST_CASE("sums: fibers keep their own chains of callers") {
  Sums sums;
  for (int i = 0; i < 2; i++) {
    getcontext(&fiber_contexts[i]);
    fiber_contexts[i].uc_stack = {fiber_stacks[i], 0, sizeof fiber_stacks[i]};
    fiber_contexts[i].uc_link = &main_context;
    makecontext(&fiber_contexts[i], reinterpret_cast<void (*)()>(fiber), 1, i);
  }
  for (int round = 0; round < 3; round++) resumes(0), resumes(1);
  Tree tree = sums.tree();
  CHECK(tree.size() == 5);
  CHECK(tree["m"].returned == 6);
  CHECK(tree["ml"].returned == 6);
  CHECK(tree["f"].returned == 2);
  CHECK(tree["fy"].returned == 4);
  CHECK(tree["fyl"].returned == 4);
}

TEST_CASE("sums: a handler nests where it interrupts, and below the root on a stack of its own") {
  static char stack[64 << 10];
  stack_t alternate{stack, 0, sizeof stack}, before;
  REQUIRE(sigaltstack(&alternate, &before) == 0);
  Sums sums;
  for (int flags : {0, SA_ONSTACK}) {
    struct sigaction action{}, old;
    action.sa_handler = on_signal;
    action.sa_flags = flags;
    REQUIRE(sigaction(SIGUSR1, &action, &old) == 0);
    interrupted();
    sigaction(SIGUSR1, &old, nullptr);
  }
  sigaltstack(&before, nullptr);
  Tree tree = sums.tree();
  CHECK(tree.size() == 6);
  CHECK(tree["i"].returned == 2);
  CHECK(tree["il"].returned == 2);
  CHECK(tree["ih"].returned == 1);
  CHECK(tree["ihl"].returned == 1);
  CHECK(tree["h"].returned == 1);
  CHECK(tree["hl"].returned == 1);
}

TEST_CASE("sums: each thread has a tree") {
  Sums sums;
  std::thread first([] {
    for (int i = 0; i < 1000; i++) twice();
  }),
      second([] {
        for (int i = 0; i < 500; i++) twice();
      });
  first.join();
  second.join();
  Tree tree = sums.tree();
  CHECK(tree["t"].returned == 1500);
  CHECK(tree["tl"].returned == 3000);
}

}  // namespace sonde::test
