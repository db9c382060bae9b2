#include "host/report/sums.h"

#include <algorithm>

namespace sonde::host {

namespace {

uint64_t less(uint64_t from, uint64_t what) { return from > what ? from - what : 0; }

// Ticks of each node's own code: its calls' time without that of the wanted calls they made.
std::vector<uint64_t> self_times(const SumTree& tree, const std::vector<bool>& wanted) {
  std::vector<uint64_t> covered(tree.nodes.size()), self(tree.nodes.size());
  for (size_t i = tree.nodes.size(); i-- > 1;) {
    const SumTreeNode& node = tree.nodes[i];
    uint64_t inside = covered[i] + node.elsewhere;
    self[i] = less(node.total, inside);
    covered[node.parent] += wanted[i] ? node.total : inside;
  }
  return self;
}

std::vector<bool> wanted_nodes(const Recording& recording, uint32_t thread, const SumTree& tree,
                               const EntryOrder::Accept& accept) {
  std::vector<bool> wanted(tree.nodes.size());
  for (size_t i = 1; i < wanted.size(); i++) wanted[i] = accept(thread, recording.function_of(tree.nodes[i].site));
  return wanted;
}

}  // namespace

Survey survey_sums(const Recording& recording) {
  Survey survey;
  survey.sites.resize(recording.sites.size());
  survey.thread_records.resize(recording.threads.size());
  for (const auto& [thread, tree] : recording.sums) {
    for (size_t i = 1; i < tree.nodes.size(); i++) {
      const SumTreeNode& node = tree.nodes[i];
      if (node.site >= survey.sites.size()) {
        survey.bad_records += node.calls() + node.entries;
        continue;
      }
      survey.sites[node.site].calls += node.calls();
      survey.sites[node.site].entries += node.entries;
      survey.calls += node.calls();
      survey.entries += node.entries;
      for (size_t k = 0; k < node.kinds.size(); k++) survey.kinds[k] += node.kinds[k];
      if (thread < survey.thread_records.size()) survey.thread_records[thread] += node.calls() + node.entries;
    }
  }
  return survey;
}

CallTree tree_of_sums(const Recording& recording, const EntryOrder::Accept& accept, std::vector<uint32_t> group_of) {
  std::vector<uint32_t> groups = group_of;
  CallTree result(std::move(group_of));
  for (const auto& [thread, tree] : recording.sums) {
    if (thread >= groups.size()) continue;
    std::vector<bool> wanted = wanted_nodes(recording, thread, tree, accept);
    std::vector<uint64_t> self = self_times(tree, wanted);
    std::vector<bool> used(tree.nodes.size());  // it or something below it was called
    for (size_t i = tree.nodes.size(); i-- > 1;) {
      used[i] = used[i] || tree.nodes[i].calls() + tree.nodes[i].entries != 0;
      if (used[i]) used[tree.nodes[i].parent] = true;
    }
    std::vector<uint32_t> place(tree.nodes.size(), kNoNode);
    for (size_t i = 1; i < tree.nodes.size(); i++) {
      const SumTreeNode& node = tree.nodes[i];
      place[i] = place[node.parent];
      if (!wanted[i] || !used[i]) continue;
      TreeNode sums;
      sums.calls = node.calls();
      sums.entries = node.entries;
      sums.tail_calls = node.tail_calls;
      sums.total = node.total;
      sums.self = self[i];
      sums.kinds = node.kinds;
      place[i] = result.add(groups[thread], place[node.parent], recording.function_of(node.site), sums);
    }
  }
  return result;
}

std::vector<SummedFunction> functions_of_sums(const Recording& recording, const EntryOrder::Accept& accept) {
  std::vector<SummedFunction> functions(recording.sites.size());
  for (const auto& [thread, tree] : recording.sums) {
    std::vector<bool> wanted = wanted_nodes(recording, thread, tree, accept);
    std::vector<uint64_t> self = self_times(tree, wanted);
    for (size_t i = 1; i < tree.nodes.size(); i++) {
      const SumTreeNode& node = tree.nodes[i];
      uint32_t function = recording.function_of(node.site);
      if (!wanted[i] || function >= functions.size()) continue;
      SummedFunction& f = functions[function];
      f.calls += node.calls();
      f.entries += node.entries;
      f.self += self[i];
      f.sum += node.total;
      f.timed += less(node.calls(), node.within + node.kinds[static_cast<size_t>(ExitKind::thread_ended)]);
      for (size_t k = 0; k < node.kinds.size(); k++) f.kinds[k] += node.kinds[k];
      if (node.shortest || node.longest) f.min = std::min(f.min, node.shortest);
      f.max = std::max(f.max, node.longest);
      bool outermost = true;
      for (uint32_t at = node.parent; at && outermost; at = tree.nodes[at].parent)
        outermost = !wanted[at] || recording.function_of(tree.nodes[at].site) != function;
      if (outermost) f.total += node.total;
    }
  }
  return functions;
}

SumLimits limits_of_sums(const Recording& recording) {
  SumLimits limits;
  for (const auto& [thread, tree] : recording.sums) {
    limits.too_deep += tree.too_deep;
    limits.no_node += tree.no_node;
    for (const SumTreeNode& node : tree.nodes) {
      limits.within += node.within;
      limits.displaced += node.displaced;
      limits.unplaced += node.unplaced;
    }
  }
  for (const RecordedThread& t : recording.threads) limits.untimed += t.in_flight_unseen;
  return limits;
}

}  // namespace sonde::host
