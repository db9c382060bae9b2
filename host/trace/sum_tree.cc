#include "host/trace/sum_tree.h"

#include <algorithm>

#include "core/base/cursor.h"

namespace sonde::host {

namespace {

uint64_t load(const uint64_t& shared) { return __atomic_load_n(&shared, __ATOMIC_RELAXED); }

void put_uleb(std::vector<uint8_t>& out, uint64_t value) {
  for (; value >= 0x80; value >>= 7) out.push_back(static_cast<uint8_t>(value | 0x80));
  out.push_back(static_cast<uint8_t>(value));
}

// Every number of a node but its parent, in the order of the file.
template <class Node, class Visit>
void each_number(Node& node, Visit&& visit) {
  for (auto& kind : node.kinds) visit(kind);
  for (auto* number : {&node.entries, &node.tail_calls, &node.total, &node.longest, &node.shortest, &node.within,
                       &node.displaced, &node.elsewhere, &node.unplaced})
    visit(*number);
}

SumTreeNode read_node(const SumNode& shared) {
  SumTreeNode node;
  node.site = __atomic_load_n(&shared.site, __ATOMIC_RELAXED);
  auto& kinds = node.kinds;
  kinds[static_cast<size_t>(ExitKind::returned)] = load(shared.returned);
  kinds[static_cast<size_t>(ExitKind::unwound)] = load(shared.unwound);
  kinds[static_cast<size_t>(ExitKind::abandoned)] = load(shared.abandoned);
  uint64_t ended = node.calls() + load(shared.moved);
  // Begun last: while the thread runs, more may have ended meanwhile, never fewer have begun.
  uint64_t entered = load(shared.entered);
  kinds[static_cast<size_t>(ExitKind::unfinished)] = entered > ended ? entered - ended : 0;
  node.entries = load(shared.entries);
  node.tail_calls = load(shared.tail_calls);
  node.total = load(shared.total);
  node.longest = load(shared.longest);
  uint64_t shortest = load(shared.shortest_inverted);
  node.shortest = shortest ? ~shortest : 0;
  node.within = load(shared.within);
  node.displaced = load(shared.displaced);
  node.elsewhere = load(shared.elsewhere);
  node.unplaced = load(shared.unplaced);
  return node;
}

}  // namespace

uint64_t SumTree::calls() const {
  uint64_t sum = 0;
  for (const SumTreeNode& node : nodes) sum += node.calls() + node.entries + node.unplaced;
  return sum;
}

uint64_t SumTree::unfinished() const {
  uint64_t sum = 0;
  for (const SumTreeNode& node : nodes) sum += node.kinds[static_cast<size_t>(ExitKind::unfinished)];
  return sum;
}

SumTree read_sum_tree(const SumArea* area, uint64_t area_bytes) {
  SumTree tree;
  if (!__atomic_load_n(&area->process, __ATOMIC_ACQUIRE)) return tree;
  tree.too_deep = load(area->too_deep);
  tree.no_node = load(area->no_node);
  uint64_t count = std::min<uint64_t>(load(area->nodes_taken), sum_node_limit(area_bytes));
  auto* nodes = reinterpret_cast<const SumNode*>(reinterpret_cast<const char*>(area) + kSumPage +
                                                 sum_table_entries(area_bytes) * 8);
  tree.nodes.reserve(count);
  for (uint64_t i = 0; i < count; i++) {
    SumTreeNode node = read_node(nodes[i]);
    uint32_t parent = __atomic_load_n(&nodes[i].parent, __ATOMIC_RELAXED);
    if (i && (parent >= i || node.site >= kMaxSites)) node = {};  // overwritten by the program
    else node.parent = parent;
    tree.nodes.push_back(node);
  }
  return tree;
}

uint32_t copy_path(SumTree& to, const SumTree& from, uint32_t node) {
  if (to.nodes.empty()) to.nodes.emplace_back();
  std::vector<uint32_t> path;
  for (uint32_t at = node; at && at < from.nodes.size(); at = from.nodes[at].parent) path.push_back(at);
  uint32_t mine = 0;
  for (auto at = path.rbegin(); at != path.rend(); ++at) {
    uint32_t site = from.nodes[*at].site;
    auto found = std::find_if(to.nodes.begin() + 1, to.nodes.end(),
                              [&](const SumTreeNode& n) { return n.parent == mine && n.site == site; });
    if (found == to.nodes.end()) {
      to.nodes.push_back({.site = site, .parent = mine});
      mine = static_cast<uint32_t>(to.nodes.size() - 1);
    } else {
      mine = static_cast<uint32_t>(found - to.nodes.begin());
    }
  }
  return mine;
}

void encode_sum_tree(const SumTree& tree, std::vector<uint8_t>& out) {
  put_uleb(out, tree.nodes.size());
  put_uleb(out, tree.too_deep);
  put_uleb(out, tree.no_node);
  for (size_t i = 0; i < tree.nodes.size(); i++) {
    const SumTreeNode& node = tree.nodes[i];
    put_uleb(out, node.site);
    put_uleb(out, i - node.parent);
    each_number(node, [&](uint64_t number) { put_uleb(out, number); });
  }
}

std::optional<SumTree> decode_sum_tree(std::span<const uint8_t> bytes) {
  Cursor in(bytes);
  SumTree tree;
  uint64_t count = in.uleb();
  tree.too_deep = in.uleb();
  tree.no_node = in.uleb();
  if (!in.ok() || count > bytes.size()) return std::nullopt;
  for (uint64_t i = 0; i < count; i++) {
    SumTreeNode node;
    uint64_t site = in.uleb(), back = in.uleb();
    if (site >= kMaxSites || back > i || (i && !back)) return std::nullopt;
    node.site = static_cast<uint32_t>(site);
    node.parent = static_cast<uint32_t>(i - back);
    each_number(node, [&](uint64_t& number) { number = in.uleb(); });
    if (!in.ok()) return std::nullopt;
    tree.nodes.push_back(node);
  }
  if (in.left() != 0) return std::nullopt;
  return tree;
}

}  // namespace sonde::host
