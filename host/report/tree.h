// The aggregated call tree: one node per path of functions, with counts and times. Built while calls are replayed; its
// memory grows with the number of different paths, not of calls.
#pragma once

#include <array>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "host/report/calls.h"

namespace sonde::host {

constexpr uint32_t kNoNode = ~0u;

struct TreeNode {
  uint32_t site = 0;
  uint32_t parent = kNoNode;
  uint32_t first_child = kNoNode, next_sibling = kNoNode;
  uint64_t calls = 0;       // with a hooked return
  uint64_t entries = 0;     // without
  uint64_t tail_calls = 0;  // of calls + entries, those entered by a jump
  uint64_t total = 0, self = 0;  // ticks
  std::array<uint64_t, 5> kinds{};
  bool counted = false;  // it or one below it has calls or entries; the others are shown nowhere
};

class CallTree : public CallVisitor {
 public:
  // group_of[thread]: which tree a thread's calls go to.
  explicit CallTree(std::vector<uint32_t> group_of);

  void enter(uint32_t thread, OpenCall& call, OpenCall* parent) override;
  void leave(uint32_t thread, OpenCall& call, OpenCall* parent) override;

  // Adds sums (their counts and times) to a path; value: its node.
  uint32_t add(uint32_t group, uint32_t parent, uint32_t site, const TreeNode& sums);

  const std::vector<TreeNode>& nodes() const { return nodes_; }
  const TreeNode& node(uint32_t index) const { return nodes_[index]; }
  // First of the group's outermost nodes, linked by next_sibling; kNoNode if it has no calls.
  uint32_t first_root(uint32_t group) const { return roots_[group]; }
  size_t groups() const { return roots_.size(); }
  // Sum over the group's roots.
  uint64_t total(uint32_t group) const;

 private:
  uint32_t child(uint32_t group, uint32_t parent, uint32_t site);
  void mark_counted(uint32_t index);

  std::vector<uint32_t> group_of_;
  std::vector<uint32_t> roots_;
  std::vector<TreeNode> nodes_;
  struct KeyHash {
    size_t operator()(const std::pair<uint64_t, uint32_t>& key) const {
      uint64_t mixed = (key.first * 0x9e3779b97f4a7c15 ^ key.second) * 0xd6e8feb86659fd93;
      return mixed ^ (mixed >> 32);
    }
  };
  std::unordered_map<std::pair<uint64_t, uint32_t>, uint32_t, KeyHash> index_;  // (parent or group, site) -> node
};

}  // namespace sonde::host
