#include "host/report/tree.h"

#include <algorithm>

namespace sonde::host {

CallTree::CallTree(std::vector<uint32_t> group_of) : group_of_(std::move(group_of)) {
  uint32_t groups = 0;
  for (uint32_t group : group_of_) groups = std::max(groups, group + 1);
  roots_.assign(groups, kNoNode);
}

uint32_t CallTree::child(uint32_t group, uint32_t parent, uint32_t site) {
  uint64_t owner = parent == kNoNode ? (1ull << 32) + group : parent;
  auto [at, added] = index_.try_emplace({owner, site}, static_cast<uint32_t>(nodes_.size()));
  if (added) {
    uint32_t& first = parent == kNoNode ? roots_[group] : nodes_[parent].first_child;
    TreeNode node;
    node.site = site;
    node.parent = parent;
    node.next_sibling = first;
    first = static_cast<uint32_t>(nodes_.size());
    nodes_.push_back(node);
  }
  return at->second;
}

void CallTree::enter(uint32_t thread, OpenCall& call, OpenCall* parent) {
  call.context = child(group_of_[thread], parent ? parent->context : kNoNode, call.event.site);
}

void CallTree::mark_counted(uint32_t index) {
  for (; index != kNoNode && !nodes_[index].counted; index = nodes_[index].parent) nodes_[index].counted = true;
}

void CallTree::leave(uint32_t, OpenCall& call, OpenCall*) {
  TreeNode& node = nodes_[call.context];
  if (call.inherited()) return void(node.total += call.duration());
  mark_counted(call.context);
  node.tail_calls += call.tail;
  if (call.entry_only) return void(++node.entries);
  ++node.calls;
  node.total += call.duration();
  node.self += call.self();
  ++node.kinds[static_cast<unsigned>(call.kind)];
}

uint32_t CallTree::add(uint32_t group, uint32_t parent, uint32_t site, const TreeNode& sums) {
  uint32_t index = child(group, parent, site);
  TreeNode& node = nodes_[index];
  if (sums.calls + sums.entries) mark_counted(index);
  node.calls += sums.calls;
  node.entries += sums.entries;
  node.tail_calls += sums.tail_calls;
  node.total += sums.total;
  node.self += sums.self;
  for (size_t k = 0; k < node.kinds.size(); k++) node.kinds[k] += sums.kinds[k];
  return index;
}

uint64_t CallTree::total(uint32_t group) const {
  uint64_t sum = 0;
  for (uint32_t root = roots_[group]; root != kNoNode; root = nodes_[root].next_sibling) sum += nodes_[root].total;
  return sum;
}

}  // namespace sonde::host
