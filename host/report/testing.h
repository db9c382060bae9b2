// For the tests of host/report: recordings written by hand.
#pragma once

#include <fmt/format.h>

#include <string>
#include <vector>

#include "host/report/calls.h"

namespace sonde::host::testing {

using Words = std::vector<uint64_t>;

inline Words call(uint32_t site, uint32_t slot, uint64_t entry, uint64_t exit, ExitKind kind = ExitKind::returned) {
  return {record_word(RecordType::call, uint8_t(kind), site, slot), entry, exit};
}
inline Words entry(uint32_t site, uint32_t slot, uint64_t at) {
  return {record_word(RecordType::entry, 0, site, slot), at};
}
inline Words stack(uint32_t site, uint64_t at, std::vector<Frame> frames, bool cut = false) {
  Words words{record_word(RecordType::stack, cut, site, static_cast<uint32_t>(frames.size())), at};
  for (const Frame& frame : frames) words.push_back(pack_frame(frame));
  return words;
}
inline Words join(const std::vector<Words>& records) {
  Words all;
  for (const Words& words : records) all.insert(all.end(), words.begin(), words.end());
  return all;
}

// One thread, sites "f0", "f1", ..., one tick per nanosecond.
inline Recording recording(std::vector<Words> threads, size_t sites = 8) {
  Recording r;
  for (uint32_t i = 0; i < threads.size(); ++i) r.threads.push_back({.pid = 100, .tid = 100 + i, .name = "prog"});
  for (size_t i = 0; i < sites; ++i)
    r.sites.push_back({fmt::format("f{}", i), "prog", 0, "nops", "", {}, static_cast<uint32_t>(i)});
  r.records = std::make_shared<MemorySource>(std::move(threads));
  return r;
}

inline void replay(const Words& words, CallVisitor& visitor, uint32_t window = 65536, AddrRange signal_stack = {}) {
  Recording r = recording({words});
  r.threads[0].signal_stack = signal_stack;
  EntryOrder order(r, nullptr, true, window);
  CallNester nester(r, visitor);
  if (!order.survey()) throw std::runtime_error("survey failed");
  if (!order.replay([&](uint32_t thread, const Event& event) { nester.add(thread, event); }))
    throw std::runtime_error("replay failed");
  nester.finish();
}

// The calls as indented lines, in order of entry; roots at the left.
inline std::string nest(const std::vector<Words>& records, AddrRange signal_stack = {}) {
  struct Lines : CallVisitor {
    std::vector<std::string> lines;
    void enter(uint32_t, OpenCall& call, OpenCall*) override {
      call.context = static_cast<uint32_t>(lines.size());
      lines.push_back("");
    }
    void leave(uint32_t, OpenCall& call, OpenCall*) override {
      static constexpr const char* kKinds[] = {"", " unwound", " abandoned", " unfinished", " thread-ended"};
      std::string times = call.entry_only ? " entry-only"
                                          : fmt::format("{}{} total {} self {}", kKinds[unsigned(call.kind)],
                                                        call.tail ? " tail" : "", call.duration(), call.self());
      lines[call.context] =
          fmt::format("{}{} {}{}\n", std::string(2 * call.depth, ' '), call.event.entry, call.event.site, times);
    }
  } visitor;
  replay(join(records), visitor, 65536, signal_stack);
  std::string all;
  for (const std::string& line : visitor.lines) all += line;
  return all;
}

}  // namespace sonde::host::testing
