// Every call, thread by thread in order of entry, nested by indentation; with recorded stacks below their hits.
#include <fmt/format.h>

#include <algorithm>
#include <unordered_map>

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

// How calls end whose record does not tell: found when they are left, to be shown where they are entered.
class EndCollector : public CallVisitor {
 public:
  struct End {
    uint64_t ticks;
    ExitKind kind;
  };
  void enter(uint32_t, OpenCall&, OpenCall*) override {}
  void leave(uint32_t, OpenCall& call, OpenCall*) override {
    if (call.end != call.event.exit || call.kind != call.event.kind) ends_[call.number] = {call.end, call.kind};
  }
  // Of a call that was just entered.
  End end_of(const OpenCall& call) const {
    auto at = ends_.find(call.number);
    return at == ends_.end() ? End{call.event.exit, call.event.kind} : at->second;
  }

 private:
  std::unordered_map<uint64_t, End> ends_;  // by OpenCall::number
};

// Calls are printed as soon as the stacks recorded at their entry are known: those of one moment together.
class CallsPrinter : public CallVisitor {
 public:
  CallsPrinter(const Recording& recording, const ViewOptions& options, std::FILE* out)
      : recording_(recording), options_(options), symbolizer_(recording), out_(out) {}

  void begin_thread(const EndCollector& ends) {
    ends_ = &ends;
    path_.clear();
  }

  void enter(uint32_t thread, OpenCall& call, OpenCall* parent) override {
    EndCollector::End end = ends_->end_of(call);
    double duration = recording_.nanoseconds(end.ticks - call.event.entry);
    if (full() || (call.timed() && duration < options_.min_time_ns)) return;
    if (!pending_.empty() && pending_.front().entry != call.event.entry) flush();
    call.context = ++rows_;
    pending_.push_back(
        {call.event.entry, call.event.site,
         options_.json ? json(thread, call, parent, end.kind, duration) : text(call, parent, end.kind, duration), ""});
  }
  void leave(uint32_t, OpenCall&, OpenCall*) override {}

  void stack(uint32_t thread, OpenCall* call, const Event& event) override {
    if (call && call->context == 0) return;  // it is not shown
    auto of = std::ranges::find_if(pending_, [&](const Row& row) {
      return row.entry == event.entry && row.site == event.site && row.stack.empty();
    });
    if (of != pending_.end()) return void(of->stack = frames(event));
    if (full() || options_.min_time_ns > 0) return;
    flush();
    rows_++;
    std::string row = options_.json ? json_without_call(thread, event) : text_without_call(event);
    pending_.push_back({event.entry, event.site, std::move(row), frames(event)});
  }

  // To be called after the last call of a thread.
  void flush() {
    for (const Row& row : pending_) {
      if (options_.json) fmt::print(out_, "{}{}{}}}", printed_++ ? "," : "", row.head, row.stack);
      else fmt::print(out_, "{}{}", row.head, row.stack);
    }
    pending_.clear();
  }

  unsigned deepest() const { return deepest_; }

 private:
  struct Row {
    uint64_t entry;
    uint32_t site;
    std::string head, stack;
  };

  bool full() const { return options_.limit && rows_ >= options_.limit; }
  double at(uint64_t ticks) const { return recording_.nanoseconds(ticks - recording_.start_ticks); }
  std::string name(uint32_t site) const {
    return site_name(recording_, site, options_, options_.width > 70 ? options_.width - 40 : 30);
  }

  // Without the brace that closes it.
  std::string json(uint32_t thread, const OpenCall& call, const OpenCall* parent, ExitKind kind, double duration) {
    return fmt::format(
        "{{\"tid\":{},\"at_ns\":{:.0f},\"depth\":{},\"parent\":{},\"name\":{},\"duration_ns\":{},\"exit\":\"{}\","
        "\"tail\":{}",
        recording_.threads[thread].tid, at(call.event.entry), call.depth,
        parent && parent->context ? std::to_string(parent->context - 1) : "null",
        json_string(recording_.sites[call.event.site].name), call.timed() ? fmt::format("{:.0f}", duration) : "null",
        call.point        ? "instruction"
        : call.entry_only ? "not hooked"
                          : exit_word(kind),
        call.tail);
  }

  std::string json_without_call(uint32_t thread, const Event& event) {
    return fmt::format(
        "{{\"tid\":{},\"at_ns\":{:.0f},\"depth\":null,\"parent\":null,\"name\":{},\"duration_ns\":null,"
        "\"exit\":\"not recorded\",\"tail\":false",
        recording_.threads[thread].tid, at(event.entry), json_string(recording_.sites[event.site].name));
  }

  std::string text(const OpenCall& call, const OpenCall* parent, ExitKind kind, double duration) {
    std::string marks, above;
    if (call.point) marks = "  [instruction]";
    else if (call.entry_only) marks = "  [return not hooked]";
    else if (kind != ExitKind::returned) marks = fmt::format("  [{}]", exit_word(kind));
    if (call.tail) marks += "  [tail call]";
    deepest_ = std::max(deepest_, call.depth);
    // Calls on another stack stand in between: what lies above this line is not what the indentation says.
    if (parent && parent->context && (path_.size() < call.depth || path_[call.depth - 1] != parent->number))
      above = fmt::format("{:>30}{}{}  [goes on]\n", "", indentation(parent->depth), name(parent->event.site));
    path_.resize(call.depth + 1, ~0ull);
    path_[call.depth] = call.number;
    if (parent) path_[call.depth - 1] = parent->number;
    return fmt::format("{}{:>14.3f} us {:>10}  {}{}{}\n", above, at(call.event.entry) / 1e3,
                       call.timed() ? format_time(duration) : "-", indentation(call.depth), name(call.event.site),
                       marks);
  }

  std::string text_without_call(const Event& event) {
    path_.clear();
    return fmt::format("{:>14.3f} us {:>10}  {}  [call not recorded]\n", at(event.entry) / 1e3, "-", name(event.site));
  }

  std::string frames(const Event& event) {
    std::string out;
    Reason reason = Reason::end;
    if (options_.json) {
      bool reliable = stack_reliable(event.frames, event.overflow, &reason);
      out = fmt::format(",\"verdict\":\"{}\",\"reason\":\"{}\",\"frames\":[", reliable ? "reliable" : "unreliable",
                        describe(reason));
    }
    for (size_t i = 0; i < event.frames.size(); i++) {
      Frame frame = unpack_frame(event.frames[i]);
      if (options_.json) {
        out += (i ? "," : "") + symbolizer_.json(frame, event.entry);
        continue;
      }
      for (const std::string& name : symbolizer_.inlined(frame.code(), event.entry))
        out += fmt::format("{:>30}{:<4} {}  [inlined]\n", "", "", printable(name));
      out += fmt::format("{:>30}#{:<3} {}{}\n", "", i, printable(symbolizer_.name(frame.code(), event.entry)),
                         frame.reason == Reason::reliable ? "" : fmt::format("  [{}]", describe(frame.reason)));
    }
    return options_.json ? out + "]" : out;
  }

  const Recording& recording_;
  const ViewOptions& options_;
  Symbolizer symbolizer_;
  std::FILE* out_;
  const EndCollector* ends_ = nullptr;
  std::vector<Row> pending_;  // calls entered at the same ticks
  std::vector<uint64_t> path_;  // text: by depth, the number of the call that the lines so far show there
  uint32_t rows_ = 0;
  size_t printed_ = 0;
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
  EntryOrder order(recording, accept_for(recording, options), recording.stacks);
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
    auto nest = [&](CallVisitor& visitor) -> Result<void> {
      CallNester nester(recording, visitor);
      SONDE_TRY_VOID(order.replay([&](uint32_t thread, const Event& event) { nester.add(thread, event); }, &only));
      nester.finish();
      return {};
    };
    EndCollector ends;
    bool any_late = survey.kinds[size_t(ExitKind::abandoned)] + survey.kinds[size_t(ExitKind::unfinished)] > 0;
    if (any_late) SONDE_TRY_VOID(nest(ends));
    printer.begin_thread(ends);
    SONDE_TRY_VOID(nest(printer));
    printer.flush();
  }
  if (options.json) fmt::print(out, "],\"footer\":{}}}\n", footer_json(recording, survey));
  else std::fputs((indentation_hint(printer.deepest()) + footer_text(recording, survey)).c_str(), out);
  return {};
}

}  // namespace sonde::host
