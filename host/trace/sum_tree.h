// One thread's aggregated call tree as the host has it: taken from the target's memory (core/event/sum.h), which is not
// believed, and as it stands in the trace file.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "core/event/sum.h"

namespace sonde::host {

struct SumTreeNode {
  uint32_t site = 0;
  uint32_t parent = 0;  // its place in the list, before this one; 0: the root
  std::array<uint64_t, 5> kinds{};  // calls by ExitKind; `unfinished` are those in flight
  uint64_t entries = 0;  // hits whose return was not hooked
  uint64_t tail_calls = 0;
  uint64_t total = 0, longest = 0, shortest = 0;  // ticks; shortest is valid if any call has ended
  uint64_t within = 0, displaced = 0, elsewhere = 0, unplaced = 0;  // see SumNode

  uint64_t calls() const { return kinds[0] + kinds[1] + kinds[2] + kinds[3] + kinds[4]; }
  bool operator==(const SumTreeNode&) const = default;
};

struct SumTree {
  std::vector<SumTreeNode> nodes;  // nodes[0] is the root and no function; parents stand before their children
  uint64_t too_deep = 0, no_node = 0;  // calls that did not get the node they should have

  bool empty() const { return nodes.size() <= 1; }
  uint64_t calls() const;
  uint64_t unfinished() const;
  bool operator==(const SumTree&) const = default;
};

// The tree in an area of so many bytes, as it is at this moment. What contradicts itself is left out.
SumTree read_sum_tree(const SumArea* area, uint64_t area_bytes);
// The number that a node of `from` has in `to`, made if need be with all that is above it.
uint32_t copy_path(SumTree& to, const SumTree& from, uint32_t node);

// docs/formats.md, a chunk of sums behind its thread index.
void encode_sum_tree(const SumTree& tree, std::vector<uint8_t>& out);
std::optional<SumTree> decode_sum_tree(std::span<const uint8_t> bytes);

}  // namespace sonde::host
