// The default view: one line per path of functions, callees below their callers, the costliest first.
#include <fmt/format.h>

#include <algorithm>

#include "host/report/footer.h"
#include "host/report/sums.h"
#include "host/report/text.h"
#include "host/report/tree.h"
#include "host/report/view.h"

namespace sonde::host {

namespace {

class TreePrinter {
 public:
  TreePrinter(const Recording& recording, const CallTree& tree, const ViewOptions& options, std::FILE* out)
      : recording_(recording), tree_(tree), options_(options), out_(out) {}

  void text(uint32_t group) {
    Columns columns({"calls", "total", "self", "%", "function"});
    double whole = static_cast<double>(tree_.total(group));
    unsigned deepest = 0;
    walk(tree_.first_root(group), 0, [&](const TreeNode& node, unsigned depth) {
      if (full()) return false;
      rows_++;
      deepest = std::max(deepest, depth);
      std::string indent = indentation(depth);
      size_t room = options_.width > 48 + indent.size() ? options_.width - 48 - indent.size() : 20;
      std::string name = indent + site_name(recording_, node.site, options_, room) + marks(node);
      bool timed = node.calls > 0;
      columns.add({format_count(node.calls + node.entries), timed ? time(node.total) : "-",
                   timed ? time(node.self) : "-", timed ? format_percent(static_cast<double>(node.total), whole) : "-",
                   name});
      return true;
    });
    std::fputs(columns.text().c_str(), out_);
    if (deepest > kDeepestIndent) fmt::print(out_, "{}--depth N shows N levels\n", indentation_hint(deepest));
  }

  // A list of nodes. Without recursion, as walk().
  void json(uint32_t first) {
    struct Level {
      std::vector<uint32_t> nodes;
      size_t next = 0;
    };
    std::vector<Level> levels{{sorted(first)}};
    while (!levels.empty()) {
      Level& level = levels.back();
      if (level.next == level.nodes.size() || full()) {
        levels.pop_back();
        if (!levels.empty()) std::fputs("]}", out_);
        continue;
      }
      const TreeNode& n = tree_.node(level.nodes[level.next]);
      rows_++;
      fmt::print(
          out_,
          "{}{{\"name\":{},\"module\":{},\"calls\":{},\"entries\":{},\"tail_calls\":{},\"total_ns\":{:.0f},\"self_ns\":"
          "{:.0f},"
          "\"returned\":{},\"unwound\":{},\"abandoned\":{},\"unfinished\":{},\"thread_ended\":{},\"children\":[",
          level.next++ ? "," : "", json_string(recording_.sites[n.site].name),
          json_string(recording_.sites[n.site].module), n.calls, n.entries, n.tail_calls, ns(n.total), ns(n.self),
          n.kinds[0], n.kinds[1], n.kinds[2], n.kinds[3], n.kinds[4]);
      bool deepest = options_.depth && levels.size() >= options_.depth;
      levels.push_back({sorted(deepest ? kNoNode : n.first_child)});
    }
  }

 private:
  bool full() const { return options_.limit && rows_ >= options_.limit; }
  double ns(uint64_t ticks) const { return recording_.nanoseconds(ticks); }
  std::string time(uint64_t ticks) const { return format_time(ns(ticks)); }

  std::string marks(const TreeNode& node) const {
    static const char* kWords[] = {"", "unwound", "abandoned", "unfinished", "thread ended"};
    std::string text;
    for (size_t k = 1; k < 5; k++)
      if (node.kinds[k])
        text += fmt::format("{}{} {}", text.empty() ? "" : ", ", format_count(node.kinds[k]), kWords[k]);
    if (node.tail_calls)
      text += fmt::format("{}{} by tail call", text.empty() ? "" : ", ", format_count(node.tail_calls));
    return text.empty() ? "" : "  [" + text + "]";
  }

  std::vector<uint32_t> sorted(uint32_t first) const {
    std::vector<uint32_t> list;
    for (uint32_t i = first; i != kNoNode; i = tree_.node(i).next_sibling)
      if (const TreeNode& n = tree_.node(i); n.counted && (!n.calls || ns(n.total) >= options_.min_time_ns))
        list.push_back(i);
    std::stable_sort(list.begin(), list.end(), [&](uint32_t a, uint32_t b) {
      const TreeNode &x = tree_.node(a), &y = tree_.node(b);
      return x.total != y.total ? x.total > y.total : x.calls + x.entries > y.calls + y.entries;
    });
    return list;
  }

  // Depth first, without recursion: traces of deep recursion have deep trees.
  template <class Visit>
  void walk(uint32_t first, unsigned depth, Visit&& visit) const {
    std::vector<std::pair<uint32_t, unsigned>> stack;
    auto push = [&](uint32_t from, unsigned at) {
      auto list = sorted(from);
      for (auto i = list.rbegin(); i != list.rend(); ++i) stack.emplace_back(*i, at);
    };
    push(first, depth);
    while (!stack.empty()) {
      auto [index, at] = stack.back();
      stack.pop_back();
      const TreeNode& node = tree_.node(index);
      if (!visit(node, at)) return;
      if (!options_.depth || at + 1 < options_.depth) push(node.first_child, at + 1);
    }
  }

  const Recording& recording_;
  const CallTree& tree_;
  const ViewOptions& options_;
  std::FILE* out_;
  size_t rows_ = 0;
};

// The recording's calls as one tree per group of threads.
Result<CallTree> build_tree(const Recording& recording, const ViewOptions& options, std::vector<uint32_t> groups,
                            Survey& survey) {
  if (recording.summed) {
    survey = survey_sums(recording);
    return tree_of_sums(recording, accept_for(recording, options), std::move(groups));
  }
  EntryOrder order(recording, accept_for(recording, options), false);
  survey = SONDE_TRY(order.survey());
  CallTree tree(groups);
  CallNester nester(recording, tree);
  SONDE_TRY_VOID(order.replay([&](uint32_t thread, const Event& event) { nester.add(thread, event); }));
  nester.finish();
  return tree;
}

}  // namespace

Result<void> print_tree(const Recording& recording, const ViewOptions& options, std::FILE* out) {
  std::vector<uint32_t> groups(recording.threads.size());
  for (size_t t = 0; t < groups.size() && options.per_thread; t++) groups[t] = static_cast<uint32_t>(t);
  Survey survey;
  CallTree tree = SONDE_TRY(build_tree(recording, options, groups, survey));
  TreePrinter printer(recording, tree, options, out);
  if (options.json) {
    fmt::print(out, "{{\"trees\":[");
    for (uint32_t g = 0; g < tree.groups(); g++) {
      fmt::print(out, "{}{{\"tid\":{},\"roots\":[", g ? "," : "", options.per_thread ? recording.threads[g].tid : 0);
      printer.json(tree.first_root(g));
      std::fputs("]}", out);
    }
    fmt::print(out, "],\"footer\":{}}}\n", footer_json(recording, survey));
    return {};
  }
  for (uint32_t g = 0; g < tree.groups(); g++) {
    if (options.per_thread)
      fmt::print(out, "{}thread {} {}\n", g ? "\n" : "", recording.threads[g].tid,
                 printable(recording.threads[g].name));
    printer.text(g);
  }
  std::fputs(footer_text(recording, survey).c_str(), out);
  return {};
}

// A line per path; what lies deeper than so many levels is one more frame of its ancestor there, since each level of a
// recursion would repeat all those above it.
Result<void> print_folded(const Recording& recording, const ViewOptions& options, std::FILE* out) {
  constexpr unsigned kDeepestFolded = 1000;
  unsigned deepest = options.depth ? options.depth : kDeepestFolded;
  Survey survey;
  CallTree tree = SONDE_TRY(build_tree(recording, options, std::vector<uint32_t>(recording.threads.size()), survey));
  const auto& nodes = tree.nodes();  // parents stand before their children
  std::vector<unsigned> level(nodes.size());
  std::vector<uint32_t> shown(nodes.size());  // itself, or its ancestor on the deepest level
  std::vector<uint64_t> weight(nodes.size()), deeper(nodes.size());
  for (uint32_t i = 0; i < nodes.size(); i++) {
    const TreeNode& node = nodes[i];
    uint64_t own = options.counts ? node.calls + node.entries : static_cast<uint64_t>(recording.nanoseconds(node.self));
    level[i] = node.parent == kNoNode ? 1 : level[node.parent] + 1;
    shown[i] = level[i] <= deepest ? i : shown[node.parent];
    (shown[i] == i ? weight : deeper)[shown[i]] += own;
  }
  for (uint32_t i = 0; i < nodes.size(); i++) {
    if (weight[i] + deeper[i] == 0) continue;
    std::vector<uint32_t> path;
    for (uint32_t at = i; at != kNoNode; at = nodes[at].parent) path.push_back(nodes[at].site);
    std::string line;
    for (auto site = path.rbegin(); site != path.rend(); ++site)
      line += (line.empty() ? "" : ";") + folded_name(recording.sites[*site].name);
    if (weight[i]) fmt::print(out, "{} {}\n", line, weight[i]);
    if (deeper[i]) fmt::print(out, "{};[deeper] {}\n", line, deeper[i]);
  }
  return {};
}

}  // namespace sonde::host
