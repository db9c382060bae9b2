// Every call, thread by thread in order of entry, nested by indentation; with recorded stacks below their hits.
#include <fmt/format.h>

#include <algorithm>

#include "core/walk/reason.h"
#include "host/report/calls.h"
#include "host/report/footer.h"
#include "host/report/symbolize.h"
#include "host/report/text.h"
#include "host/report/view.h"

namespace sonde::host {

namespace {

const char* exit_word(ExitKind kind) {
  static const char* kWords[] = {"returned",   "unwound",      "abandoned",
                                 "unfinished", "thread ended", "began before the fork"};
  return kWords[static_cast<size_t>(kind)];
}

class CallsPrinter : public CallVisitor {
 public:
  CallsPrinter(const Recording& recording, const ViewOptions& options, std::FILE* out)
      : recording_(recording), options_(options), symbolizer_(recording), out_(out) {}

  void enter(uint32_t thread, OpenCall& call, OpenCall*) override {
    uint64_t duration = call.event.exit - call.event.entry;
    if (full() || (call.timed() && recording_.nanoseconds(duration) < options_.min_time_ns)) return;
    rows_++;
    double at = recording_.nanoseconds(call.event.entry - recording_.start_ticks);
    if (options_.json) {
      fmt::print(
          out_,
          "{}{{\"tid\":{},\"at_ns\":{:.0f},\"depth\":{},\"name\":{},\"duration_ns\":{},\"exit\":\"{}\",\"tail\":{}}}",
          rows_ > 1 ? "," : "", recording_.threads[thread].tid, at, call.depth,
          json_string(recording_.sites[call.event.site].name),
          !call.timed() ? "null" : fmt::format("{:.0f}", recording_.nanoseconds(duration)),
          call.entry_only ? "not hooked" : exit_word(call.event.kind), call.tail);
      return;
    }
    std::string marks;
    if (call.entry_only) marks = "  [return not hooked]";
    else if (call.event.kind != ExitKind::returned) marks = fmt::format("  [{}]", exit_word(call.event.kind));
    if (call.tail) marks += "  [tail call]";
    deepest_ = std::max(deepest_, call.depth);
    fmt::print(out_, "{:>14.3f} us {:>10}  {}{}{}\n", at / 1e3,
               !call.timed() ? "-" : format_time(recording_.nanoseconds(duration)), indentation(call.depth),
               site_name(recording_, call.event.site, options_, options_.width > 70 ? options_.width - 40 : 30), marks);
  }
  void leave(uint32_t, OpenCall&, OpenCall*) override {}

  void stack(uint32_t, OpenCall*, const Event& event) override {
    if (full() || options_.json) return;
    for (size_t i = 0; i < event.frames.size(); i++) {
      Frame frame = unpack_frame(event.frames[i]);
      for (const std::string& name : symbolizer_.inlined(frame.code(), event.entry))
        fmt::print(out_, "{:>30}{:<4} {}  [inlined]\n", "", "", printable(name));
      fmt::print(out_, "{:>30}#{:<3} {}{}\n", "", i, printable(symbolizer_.name(frame.code(), event.entry)),
                 frame.reason == Reason::reliable ? "" : fmt::format("  [{}]", describe(frame.reason)));
    }
  }

  unsigned deepest() const { return deepest_; }
  bool full() const { return options_.limit && rows_ >= options_.limit; }

 private:
  const Recording& recording_;
  const ViewOptions& options_;
  Symbolizer symbolizer_;
  std::FILE* out_;
  size_t rows_ = 0;
  unsigned deepest_ = 0;
};

}  // namespace

Result<void> print_calls(const Recording& recording, const ViewOptions& options, std::FILE* out) {
  if (recording.summed)
    return fail(
        fmt::format(
            "--calls: {} was recorded with --sum and holds sums of calls, not the single ones; record without --sum",
            recording.path),
        2);
  EntryOrder order(recording, accept_for(recording, options), recording.stacks && !options.json);
  Survey survey = SONDE_TRY(order.survey());
  CallsPrinter printer(recording, options, out);
  if (options.json) fmt::print(out, "{{\"calls\":[");
  for (uint32_t t = 0; t < recording.threads.size(); t++) {
    if (t < survey.thread_records.size() && survey.thread_records[t] == 0) continue;
    if (options.tid && recording.threads[t].tid != *options.tid) continue;
    std::vector<bool> only(recording.threads.size());
    only[t] = true;
    if (!options.json)
      fmt::print(out, "thread {} {}\n", recording.threads[t].tid, printable(recording.threads[t].name));
    CallNester nester(recording.threads.size(), printer);
    SONDE_TRY_VOID(order.replay([&](uint32_t thread, const Event& event) { nester.add(thread, event); }, &only));
    nester.finish();
  }
  if (options.json) fmt::print(out, "],\"footer\":{}}}\n", footer_json(recording, survey));
  else std::fputs((indentation_hint(printer.deepest()) + footer_text(recording, survey)).c_str(), out);
  return {};
}

}  // namespace sonde::host
