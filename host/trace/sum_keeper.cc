#include "host/trace/sum_keeper.h"

#include <fcntl.h>
#include <linux/falloc.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace sonde::host {

SumKeeper::Kept& SumKeeper::at(uint32_t thread) {
  if (kept_.size() <= thread) kept_.resize(thread + 1);
  return kept_[thread];
}

void SumKeeper::take(uint32_t ring, uint32_t thread) {
  auto* area = reinterpret_cast<const SumArea*>(ring_data(session_.ring(ring)));
  SumTree tree = read_sum_tree(area, session_.layout().ring_bytes);
  Kept& kept = at(thread);
  if (tree == kept.tree) return;
  kept.tree = std::move(tree);
  kept.changed = true;
}

void SumKeeper::account(uint32_t thread, TraceThread& info) const {
  if (thread >= kept_.size()) return;
  const Kept& kept = kept_[thread];
  info.calls = kept.tree.calls();
  info.records = info.calls - kept.tree.unfinished() + kept.still_running;
}

void SumKeeper::clear(uint32_t ring) {
  RingHeader* header = session_.ring(ring);
  uint64_t bytes = session_.layout().ring_bytes;
  auto offset = reinterpret_cast<char*>(ring_data(header)) - reinterpret_cast<char*>(session_.header());
  if (fallocate(session_.fd(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, static_cast<off_t>(bytes)) != 0)
    std::memset(ring_data(header), 0, bytes);
}

void SumKeeper::end_later(uint32_t thread, uint32_t origin, const InFlight& call, uint64_t now) {
  if (call.sum.slot && !(call.sum.flags & kSumUnplaced)) endings_.push_back({thread, origin, call, now});
}

void SumKeeper::finish() {
  for (const Ending& ending : endings_) end(ending);
  endings_.clear();
}

void SumKeeper::end(const Ending& ending) {
  const auto& [thread, origin, call, now] = ending;
  at(std::max(thread, origin));
  Kept& kept = at(thread);
  std::vector<SumTreeNode>& nodes = kept.tree.nodes;
  constexpr auto kInFlight = static_cast<size_t>(ExitKind::unfinished);
  uint32_t node = call.sum.node;
  if (thread != origin) {
    node = copy_path(kept.tree, at(origin).tree, node);
    if (node && nodes[node].site == call.site) nodes[node].kinds[kInFlight]++;
  }
  if (node == 0 || node >= nodes.size() || nodes[node].site != call.site) return;
  SumTreeNode& counted = nodes[node];
  if (!counted.kinds[kInFlight]) return;  // it has ended since
  // Seen to be left by longjmp while its thread still ran.
  ExitKind kind = call.sum.left_ticks ? ExitKind::abandoned : call.kind;
  uint64_t until = call.sum.left_ticks ? call.sum.left_ticks : now;
  uint64_t duration = until > call.entry_ticks ? until - call.entry_ticks : 0;
  bool first = counted.calls() == counted.kinds[kInFlight] && counted.longest == 0;
  counted.kinds[kInFlight]--;
  counted.kinds[static_cast<size_t>(kind)]++;
  kept.changed = true;
  if (kind == ExitKind::thread_ended) return;  // when, nobody knows
  if (!(call.sum.flags & kSumWithin)) counted.total += duration;
  if (call.sum.flags & kSumDisplaced && thread == origin && call.sum.parent < nodes.size())
    nodes[call.sum.parent].elsewhere += duration;
  counted.longest = std::max(counted.longest, duration);
  counted.shortest = first ? duration : std::min(counted.shortest, duration);
  kept.still_running += kind == ExitKind::unfinished;
}

void SumKeeper::write(TraceWriter& writer, bool last) {
  for (uint32_t i = 0; i < kept_.size(); i++) {
    if (kept_[i].changed) writer.sums(i, kept_[i].tree, last);
    kept_[i].changed = !writer.failure().empty();
  }
}

uint64_t SumKeeper::calls() const {
  uint64_t sum = 0;
  for (const Kept& kept : kept_) sum += kept.tree.calls();
  return sum;
}

}  // namespace sonde::host
