// Nesting of calls. The expected trees of the property test come from the generator, which runs the calls on simulated
// stacks and knows who called whom; the report sees only the records.
#include "host/report/calls.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <random>

#include "host/report/testing.h"
#include "host/report/tree.h"

namespace sonde::host {
namespace {

using testing::call;
using testing::nest;

TEST_CASE("nested calls by interval and slot") {
  // main(0) calls a(1) twice, the second a calls b(2).
  CHECK(nest({call(1, 90, 20, 30), call(2, 80, 45, 50), call(1, 90, 40, 60), call(0, 100, 10, 70)}) ==
        "10 0 total 60 self 30\n"
        "  20 1 total 10 self 10\n"
        "  40 1 total 20 self 15\n"
        "    45 2 total 5 self 5\n");
}

TEST_CASE("a call that ended with its thread has the time of its callees only: when it ended is not known") {
  CHECK(nest({call(2, 80, 30, 35), call(0, 100, 10, 99, ExitKind::thread_ended),
              call(1, 90, 20, 99, ExitKind::thread_ended)}) ==
        "10 0 thread-ended total 5 self 0\n"
        "  20 1 thread-ended total 5 self 0\n"
        "    30 2 total 5 self 5\n");
}

TEST_CASE("tail calls share a slot and nest, innermost ended first") {
  CHECK(nest({call(3, 90, 40, 50), call(2, 90, 30, 50), call(1, 90, 20, 50), call(0, 100, 10, 70)}) ==
        "10 0 total 60 self 30\n"
        "  20 1 total 30 self 10\n"
        "    30 2 tail total 20 self 10\n"
        "      40 3 tail total 10 self 10\n");
}

TEST_CASE("a call at the same slot afterwards is a sibling") {
  CHECK(nest({call(1, 90, 20, 30), call(2, 90, 30, 40)}) == "20 1 total 10 self 10\n30 2 total 10 self 10\n");
}

TEST_CASE("an abandoned call ends when its slot is used again") {
  // f(1) calls g(2), g leaves by longjmp to main; then main calls f again. Noticed at the end only.
  CHECK(nest({call(1, 90, 50, 60), call(2, 80, 30, 99, ExitKind::abandoned), call(1, 90, 20, 99, ExitKind::abandoned),
              call(0, 100, 10, 100)}) ==
        "10 0 total 90 self 50\n"
        "  20 1 abandoned total 30 self 10\n"
        "    30 2 abandoned total 20 self 20\n"
        "  50 1 total 10 self 10\n");
}

TEST_CASE("an abandoned call ends with its caller at the latest") {
  CHECK(nest({call(0, 100, 10, 40), call(1, 90, 20, 99, ExitKind::abandoned)}) ==
        "10 0 total 30 self 10\n  20 1 abandoned total 20 self 20\n");
}

TEST_CASE("abandoned calls at one slot, noticed together, are no tail calls") {
  CHECK(nest({call(1, 90, 40, 99, ExitKind::abandoned), call(1, 90, 20, 99, ExitKind::abandoned),
              call(0, 100, 10, 100)}) ==
        "10 0 total 90 self 11\n"
        "  20 1 abandoned total 20 self 20\n"
        "  40 1 abandoned total 59 self 59\n");
}

TEST_CASE("unfinished calls and tail calls among them") {
  CHECK(nest({call(2, 90, 30, 99, ExitKind::unfinished), call(1, 90, 20, 99, ExitKind::unfinished),
              call(0, 100, 10, 99, ExitKind::unfinished)}) ==
        "10 0 unfinished total 89 self 10\n"
        "  20 1 unfinished total 79 self 10\n"
        "    30 2 unfinished tail total 69 self 69\n");
}

TEST_CASE("fibers interleave: a resumed call finds its own stack") {
  // Stack of main at 1000000 and a fiber's 64 KiB stack at 8192 slots below 500000. resume(1) runs work(2), which
  // yields; resume again runs step(3), called by work.
  CHECK(nest({call(1, 999990, 20, 30), call(3, 499980, 45, 48), call(2, 499990, 22, 55), call(1, 999990, 40, 60),
              call(0, 1000000, 10, 70)}) ==
        "10 0 total 60 self 30\n"
        "  20 1 total 10 self 10\n"
        "22 2 total 33 self 30\n"
        "  40 1 total 20 self 20\n"
        "  45 3 total 3 self 3\n");
}

TEST_CASE("neighbouring 64 KiB fibers are not each other's callers") {
  // Fibers at tops 500000 and 491808; the first is suspended in yield(2) while resume(4) runs the second's base(3).
  CHECK(nest({call(3, 491800, 30, 40), call(4, 4999990, 25, 45), call(2, 499900, 21, 80), call(1, 499990, 20, 81),
              call(0, 5000000, 10, 90)}) ==
        "10 0 total 80 self 60\n"
        "20 1 total 61 self 2\n"
        "  21 2 total 59 self 59\n"
        "  25 4 total 20 self 20\n"
        "30 3 total 10 self 10\n");
}

// Slots 4990000 to 5000000.
const AddrRange kSignalStack{Addr(4990000 * 8), Addr(5000000 * 8)};

// main(0) calls crash(1); its signal runs handler(2) on the signal stack, which calls log(3) and leaves by siglongjmp to main.
// Later main calls f(4).
const std::vector<testing::Words> kHandlerLeft{
    call(3, 4999980, 24, 26), call(4, 999990, 40, 50),
    call(4, 999990, 71, 80),  call(1, 999990, 20, 99, ExitKind::abandoned),
    call(0, 1000000, 10, 99), call(2, 4999990, 22, 100, ExitKind::unfinished)};

TEST_CASE("a handler on the signal stack ends when the thread goes on where it was interrupted") {
  CHECK(nest(kHandlerLeft, kSignalStack) ==
        "10 0 total 89 self 50\n"
        "  20 1 abandoned total 20 self 20\n"
        "22 2 abandoned total 18 self 16\n"
        "  24 3 total 2 self 2\n"
        "  40 4 total 10 self 10\n"
        "  71 4 total 9 self 9\n");
}

TEST_CASE("without a known signal stack such a handler may be a suspended fiber") {
  CHECK(nest(kHandlerLeft) ==
        "10 0 total 89 self 50\n"
        "  20 1 abandoned total 20 self 20\n"
        "22 2 unfinished total 78 self 76\n"
        "  24 3 total 2 self 2\n"
        "  40 4 total 10 self 10\n"
        "  71 4 total 9 self 9\n");
}

TEST_CASE("a handler that interrupted main itself ends with main's next call") {
  CHECK(nest({call(4, 999990, 40, 50), call(0, 1000000, 10, 99), call(2, 4999990, 22, 100, ExitKind::unfinished)},
             kSignalStack) ==
        "10 0 total 89 self 79\n"
        "22 2 abandoned total 18 self 18\n"
        "  40 4 total 10 self 10\n");
}

TEST_CASE("a handler ends where all that was interrupted is replaced by the next call") {
  CHECK(nest({call(4, 999990, 40, 50), call(1, 999990, 20, 99, ExitKind::abandoned),
              call(2, 4999990, 22, 100, ExitKind::unfinished)},
             kSignalStack) ==
        "20 1 abandoned total 20 self 20\n"
        "22 2 abandoned total 18 self 18\n"
        "40 4 total 10 self 10\n");
}

TEST_CASE("a handler that runs at the end, or returns, or starts a fiber has not been left") {
  std::vector<testing::Words> records{call(4, 999990, 12, 15), call(3, 4999980, 24, 99, ExitKind::unfinished),
                                      call(0, 1000000, 10, 99, ExitKind::unfinished),
                                      call(2, 4999990, 22, 99, ExitKind::unfinished)};
  CHECK(nest(records, kSignalStack) ==
        "10 0 unfinished total 89 self 86\n"
        "  12 4 total 3 self 3\n"
        "22 2 unfinished total 77 self 2\n"
        "  24 3 unfinished total 75 self 75\n");
  // It goes to a stack that was not there before.
  CHECK(nest({call(5, 9999990, 30, 40), call(0, 1000000, 10, 99), call(2, 4999990, 22, 99, ExitKind::unfinished)},
             kSignalStack) ==
        "10 0 total 89 self 89\n"
        "22 2 unfinished total 77 self 77\n"
        "30 5 total 10 self 10\n");
  // It is suspended while main goes on, and returns.
  CHECK(nest({call(4, 999990, 40, 50), call(2, 4999990, 22, 60), call(0, 1000000, 10, 99)}, kSignalStack) ==
        "10 0 total 89 self 79\n"
        "22 2 total 38 self 38\n"
        "  40 4 total 10 self 10\n");
}

TEST_CASE(
    "each signal begins at the top of the signal stack; one that is an array of main's is a stack of its own all the "
    "same") {
  AddrRange array{Addr(999000 * 8), Addr(999900 * 8)};
  std::vector<testing::Words> records;
  for (uint64_t at : {100, 200, 300}) {
    records.push_back(call(1, 998000, at, 999, ExitKind::abandoned));
    records.push_back(call(2, 999890, at + 2, 999, at == 300 ? ExitKind::unfinished : ExitKind::abandoned));
    records.push_back(call(4, 998500, at + 10, at + 15));
  }
  records.push_back(call(0, 1000000, 10, 999));
  CHECK(nest(records, array) ==
        "10 0 total 989 self 944\n"
        "  100 1 abandoned total 10 self 10\n"
        "102 2 abandoned total 8 self 8\n"
        "  110 4 total 5 self 5\n"
        "  200 1 abandoned total 10 self 10\n"
        "202 2 abandoned total 8 self 8\n"
        "  210 4 total 5 self 5\n"
        "  300 1 abandoned total 10 self 10\n"
        "302 2 abandoned total 8 self 8\n"
        "  310 4 total 5 self 5\n");
}

TEST_CASE("entry-only records are calls without duration") {
  CHECK(nest({testing::entry(1, 90, 20), call(2, 90, 30, 40), call(0, 100, 10, 70)}) ==
        "10 0 total 60 self 50\n  20 1 entry-only\n  30 2 total 10 self 10\n");
}

TEST_CASE("a signal handler's calls between exit time and record of the interrupted call") {
  // handler(2) runs after call 1 took its exit time but before its record was written.
  CHECK(nest({call(2, 80, 31, 35), call(1, 90, 20, 30), call(0, 100, 10, 70)}) ==
        "10 0 total 60 self 46\n  20 1 total 10 self 10\n  31 2 total 4 self 4\n");
}

// A program of random calls on several stacks of one thread.
class Generator {
 public:
  explicit Generator(uint32_t seed) : random_(seed) {}

  struct Truth {
    uint64_t calls = 0, total = 0, self = 0;
    bool operator==(const Truth&) const = default;
  };

  void run(int steps) {
    for (int fiber = 0; fiber < 4; ++fiber) stacks_.push_back({0x90000000u - uint32_t(fiber) * (16u << 17), {}});
    for (int step = 0; step < steps; ++step) {
      ++now_;
      unsigned what = random_() % 100;
      Fiber& fiber = stacks_[current_];
      if (what < 5) current_ = random_() % stacks_.size();
      else if (what < 50) enter(fiber, false);
      else if (what < 56 && !fiber.calls.empty()) enter(fiber, true);
      else if (what < 94) leave(fiber, random_() % 20 ? ExitKind::returned : ExitKind::unwound);
      else long_jump(fiber);
    }
    ++now_;
    for (Fiber& fiber : stacks_) end_abandoned(fiber, true);
    for (Fiber& fiber : stacks_)
      for (; !fiber.calls.empty(); fiber.calls.pop_back())
        end(fiber, fiber.calls.size() - 1, now_, ExitKind::unfinished);
    std::stable_sort(noticed_late_.begin(), noticed_late_.end(), [](auto& a, auto& b) { return a[2] < b[2]; });
    for (auto& record : noticed_late_) insert_by_end(record);
  }

  std::vector<std::array<uint64_t, 3>> records;
  std::map<std::string, Truth> truth;  // by path

 private:
  struct Open {
    uint32_t site, slot;
    uint64_t entry, children = 0;
    std::string path;
  };
  struct Fiber {
    uint32_t top;
    std::vector<Open> calls;
  };

  void enter(Fiber& fiber, bool tail) {
    uint32_t site = random_() % 6;
    uint32_t slot = fiber.calls.empty() ? fiber.top : fiber.calls.back().slot - (tail ? 0 : 1 + random_() % 300);
    std::string path = (fiber.calls.empty() ? "" : fiber.calls.back().path) + "/" + std::to_string(site);
    // After a longjmp the next call at this depth must be seen to replace what was there: the first call of a stack
    // always has the same slot, and others may lie deeper than the abandoned ones, which no report could tell apart.
    if (replaced_.count(&fiber)) {
      if (!fiber.calls.empty()) slot = fiber.calls.back().slot - 1;
      if (tail) return;
      end_abandoned(fiber);
    }
    fiber.calls.push_back({site, slot, now_, 0, path});
  }

  void end(Fiber& fiber, size_t index, uint64_t at, ExitKind kind, uint64_t noticed = 0) {
    Open& open = fiber.calls[index];
    uint64_t duration = at - open.entry;
    Truth& t = truth[open.path];
    ++t.calls;
    t.total += duration;
    t.self += duration - open.children;
    if (index > 0) fiber.calls[index - 1].children += duration;
    std::array<uint64_t, 3> record{record_word(RecordType::call, uint8_t(kind), open.site, open.slot), open.entry,
                                   noticed ? noticed : at};
    if (noticed) noticed_late_.push_back(record);
    else records.push_back(record);
  }

  void leave(Fiber& fiber, ExitKind kind) {
    if (fiber.calls.empty()) return;  // after a longjmp out of all: nothing tells that they ended
    end_abandoned(fiber);
    uint32_t slot = fiber.calls.back().slot;
    for (; !fiber.calls.empty() && fiber.calls.back().slot == slot; fiber.calls.pop_back())
      end(fiber, fiber.calls.size() - 1, now_, kind);
  }

  // Back to a random caller, or out of all; nothing is recorded yet.
  void long_jump(Fiber& fiber) {
    if (fiber.calls.empty() || replaced_.count(&fiber)) return;
    size_t keep = random_() % fiber.calls.size();
    while (keep > 0 && fiber.calls[keep - 1].slot == fiber.calls[keep].slot) --keep;
    // Abandoned tail calls look like a call repeated at the same slot; the report takes them for that.
    for (size_t i = keep + 1; i < fiber.calls.size(); ++i)
      if (fiber.calls[i].slot == fiber.calls[i - 1].slot) return;
    replaced_[&fiber] = keep;
    jumped_[&fiber] = fiber.calls;
    fiber.calls.resize(keep);
  }

  // The stack is used again: what the longjmp left ends now, as far as anyone can know.
  void end_abandoned(Fiber& fiber, bool recording_ends = false) {
    auto at = replaced_.find(&fiber);
    if (at == replaced_.end()) return;
    size_t keep = at->second;
    uint64_t noticed = recording_ends ? now_ : now_ + 1 + random_() % 1000;
    fiber.calls.swap(jumped_[&fiber]);
    for (; fiber.calls.size() > keep; fiber.calls.pop_back())
      end(fiber, fiber.calls.size() - 1, now_, ExitKind::abandoned, noticed);
    replaced_.erase(at);
  }

  void insert_by_end(const std::array<uint64_t, 3>& record) {
    auto at = std::upper_bound(records.begin(), records.end(), record, [](auto& a, auto& b) { return a[2] < b[2]; });
    records.insert(at, record);
  }

  std::mt19937 random_;
  uint64_t now_ = 100;
  size_t current_ = 0;
  std::vector<Fiber> stacks_;
  std::map<Fiber*, size_t> replaced_;
  std::map<Fiber*, std::vector<Open>> jumped_;
  std::vector<std::array<uint64_t, 3>> noticed_late_;
};

std::string path_of(const CallTree& tree, uint32_t index) {
  const TreeNode& node = tree.node(index);
  return (node.parent == kNoNode ? "" : path_of(tree, node.parent)) + "/" + std::to_string(node.site);
}

TEST_CASE("random programs: the tree is the generator's own") {
  for (uint32_t seed = 1; seed <= 300; ++seed) {
    Generator generator(seed);
    generator.run(50 + seed * 10);
    std::vector<uint64_t> words;
    for (auto& record : generator.records) words.insert(words.end(), record.begin(), record.end());
    for (uint32_t window : {65536u, 7u}) {  // small windows: straddlers everywhere
      CallTree tree({0});
      testing::replay(words, tree, window);
      std::map<std::string, Generator::Truth> seen;
      for (uint32_t i = 0; i < tree.nodes().size(); ++i) {
        const TreeNode& n = tree.node(i);
        seen[path_of(tree, i)] = {n.calls, n.total, n.self};
      }
      CAPTURE(seed);
      CAPTURE(window);
      REQUIRE(seen == generator.truth);
    }
  }
}

}  // namespace
}  // namespace sonde::host
