// One line per function: how often, how long. Time of recursive calls counts once, at the outermost.
#include <fmt/format.h>

#include <algorithm>

#include "host/report/calls.h"
#include "host/report/footer.h"
#include "host/report/histogram.h"
#include "host/report/text.h"
#include "host/report/view.h"

namespace sonde::host {

namespace {

struct FunctionStats {
  uint32_t site = 0;
  uint64_t calls = 0, entries = 0, total = 0, self = 0;  // ticks
  std::array<uint64_t, 5> kinds{};
  Histogram durations;
};

class StatsCollector : public CallVisitor {
 public:
  explicit StatsCollector(size_t sites) : stats(sites) {
    for (size_t s = 0; s < sites; s++) stats[s].site = static_cast<uint32_t>(s);
  }
  void enter(uint32_t, OpenCall&, OpenCall*) override {}
  void leave(uint32_t, OpenCall& call, OpenCall*) override {
    if (call.event.site >= stats.size()) return;
    FunctionStats& s = stats[call.event.site];
    if (call.entry_only) {
      s.entries++;
      return;
    }
    s.calls++;
    s.kinds[static_cast<size_t>(call.kind)]++;
    s.self += call.self();
    if (call.outermost) s.total += call.duration();
    s.durations.add(call.duration());
  }
  std::vector<FunctionStats> stats;
};

using Less = bool (*)(const FunctionStats&, const FunctionStats&);

Less order_by(const std::string& column) {
  if (column == "calls")
    return [](const FunctionStats& a, const FunctionStats& b) { return a.calls + a.entries > b.calls + b.entries; };
  if (column == "self") return [](const FunctionStats& a, const FunctionStats& b) { return a.self > b.self; };
  if (column == "max")
    return [](const FunctionStats& a, const FunctionStats& b) { return a.durations.max() > b.durations.max(); };
  if (column == "avg")
    return [](const FunctionStats& a, const FunctionStats& b) {
      return static_cast<double>(a.durations.sum()) * static_cast<double>(b.calls) >
             static_cast<double>(b.durations.sum()) * static_cast<double>(a.calls);
    };
  if (column == "total") return [](const FunctionStats& a, const FunctionStats& b) { return a.total > b.total; };
  return nullptr;
}

}  // namespace

Result<void> print_stats(const Recording& recording, const ViewOptions& options, std::FILE* out) {
  Less less = order_by(options.sort);
  bool by_name = options.sort == "name";
  if (!less && !by_name)
    return fail(fmt::format("--sort {}: choose total, self, calls, avg, max or name", options.sort), 2);
  EntryOrder order(recording, accept_for(recording, options), false);
  Survey survey = SONDE_TRY(order.survey());
  StatsCollector collector(recording.sites.size());
  CallNester nester(recording.threads.size(), collector);
  SONDE_TRY_VOID(order.replay([&](uint32_t thread, const Event& event) { nester.add(thread, event); }));
  nester.finish();
  auto& stats = collector.stats;
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
    const Histogram& d = s.durations;
    double average = s.calls ? static_cast<double>(d.sum()) / static_cast<double>(s.calls) : 0;
    auto ns = [&](uint64_t ticks) { return recording.nanoseconds(ticks); };
    if (options.json) {
      const RecordedSite& site = recording.sites[s.site];
      fmt::print(
          out,
          "{}{{\"name\":{},\"module\":{},\"address\":{},\"calls\":{},\"total_ns\":{:.0f},\"self_ns\":{:.0f},\"min_ns\":"
          "{:.0f},"
          "\"avg_ns\":{:.0f},\"p50_ns\":{:.0f},\"p99_ns\":{:.0f},\"max_ns\":{:.0f},\"entries_only\":{},\"returned\":{},"
          "\"unwound\":{},\"abandoned\":{},\"unfinished\":{},\"thread_ended\":{},\"method\":{}}}",
          first ? "" : ",", json_string(site.name), json_string(site.module), site.address, s.calls + s.entries,
          ns(s.total), ns(s.self), ns(d.min()), recording.nanoseconds(1) * average, ns(d.percentile(0.5)),
          ns(d.percentile(0.99)), ns(d.max()), s.entries, s.kinds[0], s.kinds[1], s.kinds[2], s.kinds[3], s.kinds[4],
          json_string(site.method));
    } else if (s.calls) {
      auto time = [&](uint64_t ticks) { return format_time(ns(ticks)); };
      columns.add({format_count(s.calls + s.entries), time(s.total), time(s.self), time(d.min()),
                   format_time(recording.nanoseconds(1) * average), time(d.percentile(0.5)), time(d.percentile(0.99)),
                   time(d.max()), site_name(recording, s.site, options, options.width > 90 ? options.width - 85 : 20)});
    } else {
      columns.add({format_count(s.entries), "-", "-", "-", "-", "-", "-", "-",
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
