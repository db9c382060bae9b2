#include "host/report/footer.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "core/walk/reason.h"
#include "host/plan/plan.h"
#include "host/report/sums.h"
#include "host/report/text.h"
#include "host/words.h"

namespace sonde::host {

namespace {

// Cost of one probed call where the trace does not say: `./dev bench`, rounded, on the machine of docs/measurements.md.
constexpr double kDefaultCallCostNs = 30;

// A trap's signal comes on top.
bool by_trap(const RecordedSite& site) { return site.method == describe(Method::trap); }

// Opened again, a library has new sites of the same functions.
bool first_of_function(const Recording& recording, const RecordedSite& site) {
  return &site == &recording.sites[site.function];
}

std::string counted_text(uint64_t n, const std::string& one) { return format_count(n) + " " + plural(n, one); }

struct Footer {
  uint64_t calls = 0, in_flight = 0, waits = 0, waited_ticks = 0;
  std::map<std::string, uint64_t> lost, refused, not_hooked;
  double cost_ns = 0;
  std::vector<std::pair<double, std::string>> costliest;  // ns
};

Footer gather(const Recording& recording, const Survey& survey) {
  Footer f;
  f.calls = survey.calls + survey.entries;
  f.in_flight = survey.kinds[static_cast<size_t>(ExitKind::unfinished)];
  for (const RecordedThread& t : recording.threads) {
    f.waits += t.waits;
    f.waited_ticks += t.waited_ticks;
    for (unsigned c = 0; c < kLossCauses; c++)
      if (t.lost[c]) f.lost[describe(static_cast<LossCause>(c))] += t.lost[c];
  }
  if (recording.lost_no_ring) f.lost[describe(LossCause::no_ring)] += recording.lost_no_ring;
  if (recording.lost_no_thread_state) f.lost["no state left for the thread"] += recording.lost_no_thread_state;
  for (const RefusedFunction& r : recording.refused) f.refused[r.reason.substr(0, r.reason.find(" (at"))]++;
  for (const RecordedSite& s : recording.sites)
    if (!s.no_hijack.empty() && !s.method.empty() && first_of_function(recording, s)) f.not_hooked[s.no_hijack]++;
  double each = recording.call_cost_ns > 0 ? recording.call_cost_ns : kDefaultCallCostNs;
  std::map<uint32_t, double> costs;  // ns, by function
  for (uint32_t s = 0; s < survey.sites.size() && s < recording.sites.size(); s++) {
    uint64_t hits = survey.sites[s].calls + survey.sites[s].entries;
    double cost = static_cast<double>(hits) * (each + (by_trap(recording.sites[s]) ? recording.trap_cost_ns : 0));
    if (hits) costs[recording.function_of(s)] += cost;
    f.cost_ns += cost;
  }
  for (auto [function, cost] : costs) f.costliest.emplace_back(cost, recording.sites[function].name);
  std::sort(f.costliest.rbegin(), f.costliest.rend());
  if (f.costliest.size() > 5) f.costliest.resize(5);
  return f;
}

// "3 a, 1 b", or "none" if that is certain.
std::string list(const std::map<std::string, uint64_t>& counts, bool complete) {
  std::string text;
  for (const auto& [what, n] : counts) text += fmt::format("{}{} {}", text.empty() ? "" : ", ", format_count(n), what);
  if (!complete) return (text.empty() ? "unknown" : "at least " + text) + " (the end of the recording is missing)";
  return text.empty() ? "none" : text;
}

// What the file lacks stands first: beside it "lost: none" would say the opposite.
std::string losses(const Recording& recording, const Footer& f) {
  if (recording.not_written_why.empty()) return "lost: " + list(f.lost, recording.complete);
  std::string text =
      fmt::format("not written: {} ({})", counted_text(recording.not_written, "event"), recording.not_written_why);
  return f.lost.empty() ? text : text + "; lost: " + list(f.lost, true);
}

std::string waits_text(const Recording& recording, const Footer& f) {
  if (!recording.complete && f.waits == 0) return "unknown";
  return fmt::format("{}{} ({})", recording.complete ? "" : "at least ",
                     format_time(recording.nanoseconds(f.waited_ticks)), counted_text(f.waits, "time"));
}

std::string sums_text(const Recording& recording) {
  SumLimits limits = limits_of_sums(recording);
  std::string text = "an aggregated recording (--sum): the program kept sums of its calls, no single ones\n";
  if (limits.too_deep)
    text += fmt::format("calls too deep for the tree (more than {} levels): {}\n", kMaxSumDepth,
                        format_count(limits.too_deep));
  if (limits.no_node) text += fmt::format("calls for which the tree was full: {}\n", format_count(limits.no_node));
  if (limits.too_deep + limits.no_node)
    text += fmt::format(
        "counted instead: {} with a call of the same function further out, {} below the root, {} only in their "
        "caller's "
        "time\n",
        format_count(limits.within), format_count(limits.displaced), format_count(limits.unplaced));
  if (limits.untimed)
    text += fmt::format("in flight when their process was killed or replaced: {}, counted without their time\n",
                        format_count(limits.untimed));
  return text;
}

}  // namespace

std::string footer_text(const Recording& recording, const Survey& survey) {
  Footer f = gather(recording, survey);
  std::string text = "\n" + counted_text(f.calls, "call");
  if (survey.stacks) text += " and " + counted_text(survey.stacks, "stack");
  text += " of " + counted_text(recording.threads.size(), "thread");
  if (!recording.ended.empty())
    text += fmt::format("; the program {} {}", recording.ended.starts_with("killed") ? "was" : "ended with",
                        recording.ended);
  text += fmt::format("\n{}; waited for room in a ring: {}", losses(recording, f), waits_text(recording, f));
  if (recording.ring_waits)
    text += fmt::format("; new threads waited for a ring: {} ({})",
                        format_time(recording.nanoseconds(recording.ring_waited_ticks)),
                        counted_text(recording.ring_waits, "time"));
  text += "\n";
  if (recording.summed) text += sums_text(recording);
  if (f.in_flight) text += fmt::format("calls still running at the end: {}\n", format_count(f.in_flight));
  if (survey.stacks) {
    text +=
        fmt::format("unreliable stacks: {} % of {}",
                    format_percent(static_cast<double>(survey.unreliable_stacks), static_cast<double>(survey.stacks)),
                    format_count(survey.stacks));
    for (unsigned r = 0; r < kReasons; r++)
      if (survey.unreliable_by[r])
        text += fmt::format("; {} {}", format_count(survey.unreliable_by[r]), describe(static_cast<Reason>(r)));
    text += "\n";
  }
  text += fmt::format("functions refused: {}\n", list(f.refused, recording.complete));
  if (!f.not_hooked.empty()) text += fmt::format("returns not hooked: {}\n", list(f.not_hooked, true));
  text += fmt::format("the probes' own cost: about {} ({} a call{}", format_time(f.cost_ns),
                      format_time(recording.call_cost_ns > 0 ? recording.call_cost_ns : kDefaultCallCostNs),
                      recording.call_cost_ns > 0 ? "" : ", not measured here");
  if (std::ranges::any_of(recording.sites, by_trap))
    text += fmt::format(", {} more by a trap", format_time(recording.trap_cost_ns));
  text += ")";
  for (size_t i = 0; i < f.costliest.size(); i++)
    text += fmt::format("{} {} {}", i ? "," : "; most for", shorten(printable(f.costliest[i].second), 40),
                        format_time(f.costliest[i].first));
  text += "\n";
  for (const std::string& note : recording.notes) text += "note: " + printable(note) + "\n";
  return text;
}

std::string footer_json(const Recording& recording, const Survey& survey) {
  Footer f = gather(recording, survey);
  nlohmann::json j = {
      {"events", f.calls + survey.stacks},
      {"calls", f.calls},
      {"threads", recording.threads.size()},
      {"command", recording.command},
      {"ended", recording.ended},
      {"in_flight", f.in_flight},
      {"lost", f.lost},
      {"complete", recording.complete},
      {"not_written", recording.not_written},
      {"not_written_why", recording.not_written_why},
      {"waits", f.waits},
      {"waited_ns", recording.nanoseconds(f.waited_ticks)},
      {"ring_waits", recording.ring_waits},
      {"ring_waited_ns", recording.nanoseconds(recording.ring_waited_ticks)},
      {"stacks", survey.stacks},
      {"unreliable_stacks", survey.unreliable_stacks},
      {"refused", f.refused},
      {"not_hooked", f.not_hooked},
      {"armed", std::count_if(recording.sites.begin(), recording.sites.end(),
                              [&](auto& s) { return !s.method.empty() && first_of_function(recording, s); })},
      {"cost_ns", f.cost_ns},
      {"trap_cost_ns", recording.trap_cost_ns},
      {"notes", recording.notes}};
  if (recording.summed) {
    SumLimits limits = limits_of_sums(recording);
    j["summed"] = {{"too_deep", limits.too_deep},   {"no_node", limits.no_node},   {"within", limits.within},
                   {"displaced", limits.displaced}, {"unplaced", limits.unplaced}, {"untimed", limits.untimed}};
  }
  nlohmann::json list = nlohmann::json::array();
  for (const RefusedFunction& r : recording.refused)
    list.push_back({{"name", r.name}, {"module", r.module}, {"reason", r.reason}});
  j["refused_functions"] = list;
  return j.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

}  // namespace sonde::host
