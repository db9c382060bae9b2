// One line per function: how often, how long. Time of recursive calls counts once, at the outermost. Of a recording with
// --sum percentiles are not known.
#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "core/base/check.h"
#include "host/report/calls.h"
#include "host/report/footer.h"
#include "host/report/histogram.h"
#include "host/report/sums.h"
#include "host/report/text.h"
#include "host/report/view.h"

namespace sonde::host {

namespace {

struct FunctionStats {
  uint32_t site = 0;
  uint64_t calls = 0, entries = 0, total = 0, self = 0;  // ticks
  std::array<uint64_t, 5> kinds{};
  uint64_t sum = 0, timed = 0, min = 0, max = 0;  // durations of `timed` calls
  std::optional<uint64_t> p50, p99;
  double average() const { return timed ? static_cast<double>(sum) / static_cast<double>(timed) : 0; }
};

class StatsCollector : public CallVisitor {
 public:
  explicit StatsCollector(size_t sites) : stats(sites), durations_(sites) {
    for (size_t s = 0; s < sites; s++) stats[s].site = static_cast<uint32_t>(s);
  }
  void enter(uint32_t, OpenCall&, OpenCall*) override {}
  void leave(uint32_t, OpenCall& call, OpenCall*) override {
    if (call.event.site >= stats.size() || call.inherited()) return;
    FunctionStats& s = stats[call.event.site];
    if (call.entry_only) {
      s.entries++;
      return;
    }
    s.calls++;
    s.kinds[static_cast<size_t>(call.kind)]++;
    if (!call.timed()) return;
    s.self += call.self();
    if (call.outermost) s.total += call.duration();
    durations_[call.event.site].add(call.duration());
  }
  void finish() {
    for (size_t i = 0; i < stats.size(); i++) {
      const Histogram& d = durations_[i];
      stats[i].sum = d.sum(), stats[i].timed = d.count(), stats[i].min = d.min(), stats[i].max = d.max();
      stats[i].p50 = d.percentile(0.5), stats[i].p99 = d.percentile(0.99);
    }
  }
  std::vector<FunctionStats> stats;

 private:
  std::vector<Histogram> durations_;
};

Result<std::vector<FunctionStats>> collect(const Recording& recording, const ViewOptions& options, Survey& survey) {
  EntryOrder order(recording, accept_for(recording, options), false);
  survey = SONDE_TRY(order.survey());
  StatsCollector collector(recording.sites.size());
  CallNester nester(recording, collector);
  SONDE_TRY_VOID(order.replay([&](uint32_t thread, const Event& event) { nester.add(thread, event); }));
  nester.finish();
  collector.finish();
  return std::move(collector.stats);
}

std::vector<FunctionStats> collect_sums(const Recording& recording, const ViewOptions& options) {
  std::vector<FunctionStats> stats;
  for (const SummedFunction& f : functions_of_sums(recording, accept_for(recording, options)))
    stats.push_back({static_cast<uint32_t>(stats.size()),
                     f.calls,
                     f.entries,
                     f.total,
                     f.self,
                     f.kinds,
                     f.sum,
                     f.timed,
                     f.min == ~0ull ? 0 : f.min,
                     f.max,
                     {},
                     {}});
  return stats;
}

using Less = bool (*)(const FunctionStats&, const FunctionStats&);

Less order_by(const std::string& column) {
  if (column == "calls")
    return [](const FunctionStats& a, const FunctionStats& b) { return a.calls + a.entries > b.calls + b.entries; };
  if (column == "self") return [](const FunctionStats& a, const FunctionStats& b) { return a.self > b.self; };
  if (column == "max") return [](const FunctionStats& a, const FunctionStats& b) { return a.max > b.max; };
  if (column == "avg") return [](const FunctionStats& a, const FunctionStats& b) { return a.average() > b.average(); };
  if (column == "total") return [](const FunctionStats& a, const FunctionStats& b) { return a.total > b.total; };
  return nullptr;
}

}  // namespace

Result<void> print_stats(const Recording& recording, const ViewOptions& options, std::FILE* out) {
  Less less = order_by(options.sort);
  bool by_name = options.sort == "name";
  SONDE_CHECK(less || by_name);
  Survey survey;
  std::vector<FunctionStats> stats;
  if (recording.summed) stats = collect_sums(recording, options), survey = survey_sums(recording);
  else stats = SONDE_TRY(collect(recording, options, survey));
  std::erase_if(stats, [&](const FunctionStats& s) {
    return s.calls + s.entries == 0 || (s.calls && recording.nanoseconds(s.total) < options.min_time_ns);
  });
  std::stable_sort(stats.begin(), stats.end(), [&](const FunctionStats& a, const FunctionStats& b) {
    return by_name ? recording.sites[a.site].name < recording.sites[b.site].name : less(a, b);
  });
  if (options.limit && stats.size() > options.limit) stats.resize(options.limit);

  Columns columns({"calls", "total", "self", "min", "avg", "p50", "p99", "max", "function"});
  if (options.json) fmt::print(out, "{{\"functions\":[");
  bool first = true;
  for (const FunctionStats& s : stats) {
    auto ns = [&](uint64_t ticks) { return recording.nanoseconds(ticks); };
    if (options.json) {
      auto maybe = [&](std::optional<uint64_t> ticks) { return ticks ? fmt::format("{:.0f}", ns(*ticks)) : "null"; };
      const RecordedSite& site = recording.sites[s.site];
      fmt::print(
          out,
          "{}{{\"name\":{},\"module\":{},\"address\":{},\"calls\":{},\"total_ns\":{:.0f},\"self_ns\":{:.0f},\"min_ns\":"
          "{:.0f},"
          "\"avg_ns\":{:.0f},\"p50_ns\":{},\"p99_ns\":{},\"max_ns\":{:.0f},\"entries_only\":{},\"returned\":{},"
          "\"unwound\":{},\"abandoned\":{},\"unfinished\":{},\"thread_ended\":{},\"method\":{}}}",
          first ? "" : ",", json_string(site.name), json_string(site.module), site.address, s.calls + s.entries,
          ns(s.total), ns(s.self), ns(s.min), recording.nanoseconds(1) * s.average(), maybe(s.p50), maybe(s.p99),
          ns(s.max), s.entries, s.kinds[0], s.kinds[1], s.kinds[2], s.kinds[3], s.kinds[4], json_string(site.method));
    } else if (s.timed) {
      auto time = [&](uint64_t ticks) { return format_time(ns(ticks)); };
      columns.add({format_count(s.calls + s.entries), time(s.total), time(s.self), time(s.min),
                   format_time(recording.nanoseconds(1) * s.average()), s.p50 ? time(*s.p50) : "-",
                   s.p99 ? time(*s.p99) : "-", time(s.max),
                   site_name(recording, s.site, options, options.width > 90 ? options.width - 85 : 20)});
    } else {
      columns.add({format_count(s.calls + s.entries), "-", "-", "-", "-", "-", "-", "-",
                   site_name(recording, s.site, options, options.width > 90 ? options.width - 85 : 20)});
    }
    first = false;
  }
  if (options.json) {
    fmt::print(out, "],\"footer\":{}}}\n", footer_json(recording, survey));
    return {};
  }
  std::fputs(columns.text().c_str(), out);
  std::fputs(footer_text(recording, survey).c_str(), out);
  return {};
}

}  // namespace sonde::host
