// The tree against a model that keeps for every call what it was called from, on stacks that are chosen at random: calls,
// returns, tail calls, exceptions, longjmps, fibers, signal handlers. The model knows the truth because it makes it.
#include "core/event/sum.h"

#include <doctest/doctest.h>
#include <sys/mman.h>

#include <algorithm>
#include <map>
#include <random>
#include <vector>

namespace sonde {
namespace {

constexpr uint32_t kAreas = 3, kEntries = 4096;

struct Areas {
  explicit Areas(uint64_t bytes, uint32_t processes = 1) : stride(kSumPage + bytes), calls(kEntries) {
    memory = mmap(nullptr, stride * kAreas, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    REQUIRE(memory != MAP_FAILED);
    for (uint32_t i = 0; i < kAreas; i++) sum_prepare(area(i), bytes, i, stride, processes == 1 ? 1 : i + 1);
  }
  ~Areas() { munmap(memory, stride * kAreas); }
  Areas(const Areas&) = delete;
  SumArea* area(uint32_t i) const { return reinterpret_cast<SumArea*>(static_cast<char*>(memory) + i * stride); }
  void begin(uint32_t i, uint32_t index, uint32_t site, uint64_t slot, bool tail = false) {
    sum_begin(area(i), calls.data(), index, site, slot, tail);
  }
  void end(uint32_t i, uint32_t index, uint32_t site, uint64_t ticks, ExitKind kind = ExitKind::returned) {
    sum_end(area(i), calls.data(), index, site, kind, ticks);
  }

  uint64_t stride;
  void* memory;
  std::vector<SumCall> calls;
};

using Path = std::vector<uint32_t>;  // of sites, outermost first
struct Counts {
  uint64_t entered = 0, returned = 0, unwound = 0, abandoned = 0, total = 0, tail = 0;
  bool operator==(const Counts&) const = default;
};

Path path_of(SumArea* area, uint32_t node) {
  Path path;
  for (; node; node = sum_nodes(area)[node].parent) path.insert(path.begin(), sum_nodes(area)[node].site);
  return path;
}

// What the area holds, by path; nodes without calls left out.
std::map<Path, Counts> contents(SumArea* area) {
  std::map<Path, Counts> all;
  for (uint32_t i = 1; i < area->nodes_taken && i < area->node_limit; i++) {
    const SumNode& n = sum_nodes(area)[i];
    Counts counts{n.entered, n.returned, n.unwound, n.abandoned, n.total, n.tail_calls};
    if (counts == Counts{}) continue;
    Path path = path_of(area, i);
    CHECK_FALSE(all.contains(path));
    all[path] = counts;
  }
  return all;
}

std::string print(const std::map<Path, Counts>& all) {
  std::string text;
  for (const auto& [path, c] : all) {
    for (uint32_t site : path) text += std::to_string(site) + " ";
    text += ": " + std::to_string(c.entered) + " entered " + std::to_string(c.returned) + " returned " +
            std::to_string(c.unwound) + " unwound " + std::to_string(c.abandoned) + " abandoned " +
            std::to_string(c.total) + " ticks " + std::to_string(c.tail) + " tail\n";
  }
  return text;
}

class Model {
 public:
  Model(Areas& areas, uint32_t seed) : areas_(areas), random_(seed) {
    // The first stack lies far from the fibers', whose stacks lie side by side.
    stacks_.push_back({0x7ffff0000000, {}});
    for (uint64_t i = 0; i < 6; i++) stacks_.push_back({0x500000000000 + i * 0x10000, {}});
    for (uint32_t i = kEntries; i-- > 0;) free_.push_back(i);
    call();
  }

  void step() {
    Stack& stack = stacks_[current_];
    switch (random_() % 16) {
      case 0:
      case 1:
      case 2:
      case 3:
      case 4: return call();
      case 5:
        if (!stack.calls.empty()) tail_call();
        return;
      case 6:
        if (stack.calls.size() > 2) long_jump();
        return;
      case 7:
        current_ = random_() % stacks_.size();
        if (stacks_[current_].calls.empty()) call();
        return;
      case 8:
        if (!stack.calls.empty()) leave(ExitKind::unwound);
        return;
      default:
        if (!stack.calls.empty()) leave(ExitKind::returned);
        return;
    }
  }

  const std::map<Path, Counts>& truth() const { return truth_; }

 private:
  struct Call {
    uint32_t index, site;
    uint64_t slot;
    Path path;
    uint64_t begun;
  };
  struct Stack {
    uint64_t top;
    std::vector<Call> calls;
  };

  void begin(uint64_t slot, bool tail) {
    Stack& stack = stacks_[current_];
    uint32_t index = free_.back(), site = random_() % 5;
    free_.pop_back();
    Path path = stack.calls.empty() ? Path{} : stack.calls.back().path;
    path.push_back(site);
    areas_.begin(0, index, site, slot, tail);
    REQUIRE(path_of(areas_.area(0), areas_.area(0)->top.node) == path);
    truth_[path].entered++;
    truth_[path].tail += tail;
    stack.calls.push_back({index, site, slot, path, now_});
  }
  void call() {
    now_ += random_() % 1000;
    const Stack& stack = stacks_[current_];
    if (stack.calls.size() >= 12) return;
    uint64_t from = stack.calls.empty() ? stack.top : stack.calls.back().slot;
    begin(from - 16 - random_() % 60 * 16, false);
  }
  void tail_call() {
    now_ += random_() % 1000;
    if (stacks_[current_].calls.size() < 12) begin(stacks_[current_].calls.back().slot, true);
  }
  // The innermost call ends, and with it those that left their slot to it.
  void leave(ExitKind kind) {
    now_ += random_() % 1000;
    std::vector<Call>& calls = stacks_[current_].calls;
    uint64_t slot = calls.back().slot;
    for (; !calls.empty() && calls.back().slot == slot; calls.pop_back()) {
      const Call& call = calls.back();
      areas_.end(0, call.index, call.site, now_ - call.begun, kind);
      Counts& counts = truth_[call.path];
      (kind == ExitKind::returned ? counts.returned : counts.unwound)++;
      counts.total += now_ - call.begun;
      free_.push_back(call.index);
    }
  }
  // Out of some calls, back into one that did not share its slot with them; their entries are never freed here. Then that
  // one makes a call where the first of them was made, or nearer: what was left is found dead.
  void long_jump() {
    std::vector<Call>& calls = stacks_[current_].calls;
    size_t keep = 1 + random_() % (calls.size() - 1);
    while (keep < calls.size() && calls[keep].slot == calls[keep - 1].slot) keep++;
    if (keep == calls.size() || free_.size() < 100) return;
    uint64_t slot = calls[keep].slot + random_() % ((calls[keep - 1].slot - calls[keep].slot) / 16) * 16;
    calls.resize(keep);
    now_ += random_() % 1000;
    begin(slot, false);
  }

  Areas& areas_;
  std::mt19937 random_;
  std::vector<Stack> stacks_;
  size_t current_ = 0;
  std::vector<uint32_t> free_;
  std::map<Path, Counts> truth_;
  uint64_t now_ = 1;
};

}  // namespace

TEST_CASE("calls are counted below their callers, whatever stacks a thread runs on and however calls end") {
  for (uint32_t seed = 0; seed < 60; seed++) {
    CAPTURE(seed);
    Areas areas(1 << 20);
    Model model(areas, seed);
    for (int i = 0; i < 4000; i++) model.step();
    REQUIRE(areas.area(0)->too_deep == 0);
    REQUIRE(areas.area(0)->no_node == 0);
    REQUIRE(print(contents(areas.area(0))) == print(model.truth()));
  }
}

TEST_CASE("the shortest and the longest call are kept, zero ticks too") {
  Areas areas(1 << 16);
  for (uint64_t ticks : {50, 7, 90}) {
    areas.begin(0, 0, 3, 0x1000);
    areas.end(0, 0, 3, ticks);
  }
  const SumNode& node = sum_nodes(areas.area(0))[1];
  CHECK(node.longest == 90);
  CHECK(~node.shortest_inverted == 7);
  areas.begin(0, 0, 3, 0x1000);
  areas.end(0, 0, 3, 0);
  CHECK(~node.shortest_inverted == 0);
}

TEST_CASE("recursion deeper than the tree is counted with the deepest call of the same function, its time once") {
  Areas areas(1 << 20);
  constexpr uint32_t kDeep = 3000;
  uint64_t slot = 0x7ffff0000000;
  for (uint32_t i = 0; i < kDeep; i++) areas.begin(0, i, 7, slot - i * 64);
  for (uint32_t i = kDeep; i-- > 0;) areas.end(0, i, 7, kDeep - i);
  SumArea* area = areas.area(0);
  CHECK(area->nodes_taken == 1 + kMaxSumDepth);
  CHECK(area->too_deep == kDeep - kMaxSumDepth);
  CHECK(area->no_node == 0);
  const SumNode& deepest = sum_nodes(area)[kMaxSumDepth];
  CHECK(deepest.entered == kDeep - kMaxSumDepth + 1);
  CHECK(deepest.returned == deepest.entered);
  CHECK(deepest.within == deepest.entered - 1);
  CHECK(deepest.total == kDeep - kMaxSumDepth + 1);
  CHECK(area->top.call == 0);
}

TEST_CASE("what is too deep and no recursion is counted below the root, its time taken from its caller") {
  Areas areas(1 << 20);
  uint64_t slot = 0x7ffff0000000;
  for (uint32_t i = 0; i <= kMaxSumDepth; i++) areas.begin(0, i, i, slot - i * 64);
  for (uint32_t i = kMaxSumDepth + 1; i-- > 0;) areas.end(0, i, i, 1000 - i);
  SumArea* area = areas.area(0);
  CHECK(area->too_deep == 1);
  const SumNode& node = sum_nodes(area)[kMaxSumDepth + 1];
  CHECK(path_of(area, kMaxSumDepth + 1) == Path{kMaxSumDepth});
  CHECK(node.entered == 1);
  CHECK(node.returned == 1);
  CHECK(node.displaced == 1);
  CHECK(node.total == 1000 - kMaxSumDepth);
  CHECK(sum_nodes(area)[kMaxSumDepth].elsewhere == 1000 - kMaxSumDepth);
}

TEST_CASE("a full tree loses no call") {
  Areas areas(1 << 16);
  SumArea* area = areas.area(0);
  uint32_t functions = area->node_limit + 100, entered = 0, unplaced = 0, displaced = 0;
  areas.begin(0, 0, 0, 0x7ffff0000000);
  for (uint32_t site = 1; site < functions; site++) {
    areas.begin(0, 1, site, 0x7fffefff0000);
    areas.end(0, 1, site, 5);
  }
  areas.end(0, 0, 0, 5 * functions);
  CHECK(area->nodes_taken == area->node_limit);
  uint64_t elsewhere = 0;
  for (uint32_t i = 0; i < area->node_limit; i++) {
    const SumNode& node = sum_nodes(area)[i];
    CHECK(node.entered == node.returned);
    entered += node.entered;
    unplaced += node.unplaced;
    displaced += node.displaced;
    elsewhere += node.elsewhere;
  }
  CHECK(entered + unplaced == functions);
  CHECK(displaced > 0);
  CHECK(unplaced > 0);
  CHECK(displaced + unplaced == area->no_node);
  CHECK(elsewhere == displaced * 5);
}

TEST_CASE("a call that ends in another thread is counted there, with what it was called from") {
  Areas areas(1 << 16);
  areas.begin(0, 0, 1, 0x2000);
  areas.begin(0, 1, 2, 0x1000);
  areas.end(1, 1, 2, 70);
  CHECK(print(contents(areas.area(1))) == print({{Path{1, 2}, {1, 1, 0, 0, 70, 0}}}));
  CHECK(sum_nodes(areas.area(0))[2].entered == 1);
  CHECK(sum_nodes(areas.area(0))[2].moved == 1);
  areas.begin(1, 1, 3, 0x1800);  // goes on where the call came from
  CHECK(path_of(areas.area(1), areas.area(1)->top.node) == Path{1, 3});
}

TEST_CASE("a forked child counts what it inherited and leaves the parent's tree alone") {
  Areas areas(1 << 16, 2);
  areas.begin(0, 0, 1, 0x2000);
  areas.begin(0, 1, 2, 0x1000);
  areas.end(1, 1, 2, 70);
  CHECK(print(contents(areas.area(1))) == print({{Path{1, 2}, {1, 1, 0, 0, 70, 0}}}));
  CHECK(sum_nodes(areas.area(0))[2].moved == 0);
}

TEST_CASE("a call left by longjmp is over when the next one takes its place") {
  Areas areas(1 << 16);
  areas.begin(0, 0, 1, 0x7ffff0000000);
  areas.begin(0, 1, 2, 0x7fffefff0000);
  areas.begin(0, 2, 3, 0x7fffeffe0000);
  areas.begin(0, 3, 4, 0x7fffefff1000);  // above both
  CHECK(path_of(areas.area(0), areas.area(0)->top.node) == Path{1, 4});
  CHECK(areas.calls[0].left_ticks == 0);
  CHECK(areas.calls[1].left_ticks != 0);
  CHECK(areas.calls[2].left_ticks == areas.calls[1].left_ticks);
  sum_end_abandoned(areas.area(0), areas.calls.data(), 2, 3, areas.calls[2].left_ticks - 9, ~uint64_t{0});
  CHECK(contents(areas.area(0))[Path{1, 2, 3}] == Counts{1, 0, 0, 1, 9, 0});
}

TEST_CASE("a hit without a hooked return is counted below the running call and changes nothing") {
  Areas areas(1 << 16);
  areas.begin(0, 0, 1, 0x2000);
  sum_entry(areas.area(0), areas.calls.data(), 5, 0x1f00);
  CHECK(areas.area(0)->top.call == 1);
  const SumNode& node = sum_nodes(areas.area(0))[2];
  CHECK(path_of(areas.area(0), 2) == Path{1, 5});
  CHECK(node.entries == 1);
  CHECK(node.entered == 0);
}

TEST_CASE("a handler on a stack of its own stands below the root and leaves the thread where it was") {
  Areas areas(1 << 16);
  SumArea* area = areas.area(0);
  areas.begin(0, 0, 1, 0x7ffff0000000);
  for (int i = 0; i < 3; i++) {
    areas.begin(0, 1, 2, 0x600000000000);
    CHECK(path_of(area, area->top.node) == Path{2});
    areas.begin(0, 2, 3, 0x5ffffffff000);
    CHECK(path_of(area, area->top.node) == Path{2, 3});
    areas.end(0, 2, 3, 1);
    areas.end(0, 1, 2, 2);
    CHECK(path_of(area, area->top.node) == Path{1});
  }
  areas.begin(0, 1, 4, 0x7fffeffff000);
  CHECK(path_of(area, area->top.node) == Path{1, 4});
  CHECK(area->remembered == 0);  // so that calls take the short way again
}

TEST_CASE("a handler on the signal stack that does not return is over when the interrupted stack goes on") {
  for (bool known : {true, false}) {
    CAPTURE(known);
    Areas areas(1 << 16);
    SumArea* area = areas.area(0);
    if (known) area->signal_begin = 0x600000000000 - 0x8000, area->signal_end = 0x600000000000 + 0x8000;
    areas.begin(0, 0, 1, 0x7ffff0000000);
    areas.begin(0, 1, 2, 0x7fffeffff000);
    areas.begin(0, 2, 3, 0x600000000000);
    areas.begin(0, 3, 4, 0x5ffffffff000);
    areas.begin(0, 4, 5, 0x7fffeffff000);  // main's next call, where the interrupted one was
    CHECK(path_of(area, area->top.node) == Path{1, 5});
    CHECK(areas.calls[0].left_ticks == 0);
    CHECK((areas.calls[2].left_ticks != 0) == known);
    CHECK(areas.calls[3].left_ticks == areas.calls[2].left_ticks);
    if (known) CHECK(area->remembered == 0);
  }
  // A fiber that it starts has not left it.
  Areas areas(1 << 16);
  SumArea* area = areas.area(0);
  area->signal_begin = 0x600000000000 - 0x8000, area->signal_end = 0x600000000000 + 0x8000;
  areas.begin(0, 0, 1, 0x7ffff0000000);
  areas.begin(0, 1, 3, 0x600000000000);
  areas.begin(0, 2, 4, 0x500000000000);
  CHECK(areas.calls[1].left_ticks == 0);
}

}  // namespace sonde
