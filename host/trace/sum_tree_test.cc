// Trees are written and read back, taken from areas that the program has written over, and from files cut anywhere.
#include "host/trace/sum_tree.h"

#include <doctest/doctest.h>

#include <cstring>
#include <random>

namespace sonde::host {

namespace {

constexpr uint64_t kBytes = 1 << 16;

struct Area {
  std::vector<uint64_t> memory = std::vector<uint64_t>(kBytes / 8);
  std::vector<SumCall> calls = std::vector<SumCall>(64);
  SumArea* area = reinterpret_cast<SumArea*>(memory.data());
  Area() { sum_prepare(area, kBytes, 0, kBytes, 1); }
  void begin(uint32_t index, uint32_t site, uint64_t slot) { sum_begin(area, calls.data(), index, site, slot, false); }
  void end(uint32_t index, uint32_t site, uint64_t ticks) {
    sum_end(area, calls.data(), index, site, ExitKind::returned, ticks);
  }
};

SumTree random_tree(uint32_t seed) {
  std::mt19937_64 random(seed);
  SumTree tree;
  tree.too_deep = random() >> (random() % 64), tree.no_node = random() % 3;
  tree.nodes.emplace_back();
  for (uint32_t i = 1; i < 50; i++) {
    SumTreeNode node;
    node.site = static_cast<uint32_t>(random() % kMaxSites);
    node.parent = static_cast<uint32_t>(random() % i);
    for (uint64_t& kind : node.kinds) kind = random() >> (random() % 64);
    node.total = random(), node.longest = random() % 100, node.shortest = random() % 10, node.entries = random() % 2;
    node.elsewhere = random() % 1000, node.within = random() % 5, node.displaced = 7, node.unplaced = random() % 2;
    tree.nodes.push_back(node);
  }
  return tree;
}

}  // namespace

TEST_CASE("sum tree: what is written is read") {
  for (uint32_t seed = 0; seed < 50; seed++) {
    std::vector<uint8_t> bytes;
    SumTree tree = random_tree(seed);
    encode_sum_tree(tree, bytes);
    auto read = decode_sum_tree(bytes);
    REQUIRE(read.has_value());
    REQUIRE(*read == tree);
  }
}

TEST_CASE("sum tree: bytes that are cut or changed are refused or a tree whose parents come first") {
  std::vector<uint8_t> bytes;
  encode_sum_tree(random_tree(1), bytes);
  for (size_t size = 0; size < bytes.size(); size++) REQUIRE_FALSE(decode_sum_tree(std::span(bytes).first(size)));
  std::mt19937 random(7);
  size_t accepted = 0;
  for (int i = 0; i < 20000; i++) {
    std::vector<uint8_t> changed = bytes;
    changed[random() % changed.size()] = static_cast<uint8_t>(random());
    auto tree = decode_sum_tree(changed);
    if (!tree) continue;
    accepted++;
    for (size_t n = 1; n < tree->nodes.size(); n++) REQUIRE(tree->nodes[n].parent < n);
  }
  CHECK(accepted > 0);
  CHECK(accepted < 20000);
}

TEST_CASE("sum tree: an area is read with its calls in flight") {
  Area a;
  a.begin(0, 5, 0x3000);
  a.begin(1, 6, 0x2000);
  a.end(1, 6, 30);
  a.begin(1, 6, 0x2000);
  a.end(1, 6, 20);
  SumTree tree = read_sum_tree(a.area, kBytes);
  REQUIRE(tree.nodes.size() == 3);
  CHECK(tree.nodes[1].site == 5);
  CHECK(tree.nodes[1].kinds == std::array<uint64_t, 5>{0, 0, 0, 1, 0});
  CHECK(tree.nodes[2].parent == 1);
  CHECK(tree.nodes[2].kinds == std::array<uint64_t, 5>{2, 0, 0, 0, 0});
  CHECK(tree.nodes[2].total == 50);
  CHECK(tree.nodes[2].shortest == 20);
  CHECK(tree.nodes[2].longest == 30);
  CHECK(tree.calls() == 3);
  CHECK(tree.unfinished() == 1);
}

TEST_CASE("sum tree: an area that nobody has used is empty, one overwritten with anything gives a sound tree") {
  std::vector<uint64_t> memory(kBytes / 8);
  auto* area = reinterpret_cast<SumArea*>(memory.data());
  CHECK(read_sum_tree(area, kBytes).empty());
  std::mt19937_64 random(3);
  for (int i = 0; i < 200; i++) {
    for (uint64_t& word : memory) word = i % 2 ? random() : random() >> (random() % 64);
    SumTree tree = read_sum_tree(area, kBytes);
    REQUIRE(tree.nodes.size() <= sum_node_limit(kBytes));
    for (size_t n = 1; n < tree.nodes.size(); n++) {
      REQUIRE(tree.nodes[n].parent < n);
      REQUIRE(tree.nodes[n].site < kMaxSites);
    }
  }
}

TEST_CASE("sum tree: a path is copied once") {
  SumTree from = random_tree(2), to;
  uint32_t deepest = static_cast<uint32_t>(from.nodes.size() - 1);
  uint32_t copied = copy_path(to, from, deepest);
  size_t size = to.nodes.size();
  CHECK(to.nodes[copied].site == from.nodes[deepest].site);
  CHECK(copy_path(to, from, deepest) == copied);
  CHECK(to.nodes.size() == size);
}

}  // namespace sonde::host
