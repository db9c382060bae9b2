#include "tests/step/compare.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/walk/reason.h"

namespace sonde::stepping {
namespace {

constexpr size_t kWrongInWords = 5;

bool same_frames(const Walk& a, const Walk& b, size_t count) {
  if (a.frames.size() < count || b.frames.size() < count) return false;
  for (size_t i = 0; i < count; i++)
    if (a.frames[i].pc != b.frames[i].pc || a.frames[i].cfa != b.frames[i].cfa ||
        a.frames[i].reason != b.frames[i].reason || a.frames[i].source != b.frames[i].source)
      return false;
  return true;
}

std::string hex(std::span<const uint8_t> bytes) {
  std::string text;
  for (uint8_t byte : bytes) text += fmt::format("{:02x} ", byte);
  return text;
}

}  // namespace

Truth truth_of(const Shadow& shadow, const Program& program) {
  Truth truth;
  truth.known = shadow.known(), truth.to_the_end = shadow.bottom_known();
  auto calls = shadow.calls();
  truth.chain = {program.pc()}, truth.slots = {0}, truth.sps = {program.sp()};
  for (size_t i = calls.size(); i-- > 0;) {
    truth.chain.push_back(calls[i].pc);
    truth.slots.push_back(calls[i].interrupted || !shadow.pushes() ? 0 : calls[i].slot);
    truth.sps.push_back(calls[i].caller_sp);
  }
  return truth;
}

Answer judge(const Chain& chain, const Truth& truth, Program& program) {
  for (size_t i = 0; i < chain.pcs.size(); i++) {
    if (i >= truth.chain.size()) {
      if (truth.to_the_end && chain.pcs[i] != 0) return Answer::wrong;
      break;
    }
    uint64_t held = 0;
    if (chain.pcs[i] == truth.chain[i]) continue;
    if (!truth.slots[i] || !program.read_as(Addr(truth.slots[i]), &held) || held != chain.pcs[i]) return Answer::wrong;
  }
  return chain.pcs.size() < truth.chain.size() ? Answer::refused : Answer::right;
}

size_t Comparison::first_false(const Walk& walk, const Truth& truth) {
  for (size_t i = 0; i < walk.frames.size(); i++) {
    const Frame& frame = walk.frames[i];
    if (i >= truth.chain.size()) {
      if (truth.to_the_end && is_reliable(frame)) return i + 1;
      break;
    }
    if (frame.recovered & kMarked) break;
    if (frame.pc.value != truth.chain[i]) {
      uint64_t held = 0;
      bool is_what_the_slot_holds =
          truth.slots[i] && program_.read_as(Addr(truth.slots[i]), &held) && held == frame.pc.value;
      if (!is_what_the_slot_holds && is_reliable(frame)) return i + 1;
      if (is_what_the_slot_holds) counts.rewritten++;
    }
    if (!is_reliable(frame)) break;
    if (i > 0 && walk.frames[i - 1].cfa.value != truth.sps[i]) return i;
  }
  if (walk.result.whole() && truth.to_the_end && walk.frames.size() != truth.chain.size()) return walk.frames.size();
  return 0;
}

bool Comparison::compare(const Truth& truth, bool* compared) {
  program_.look();
  walks_.refresh();
  Walk walk = walks_.walk(true, true), best = walks_.walk(false, true), long_way = walks_.walk(true, false),
       best_long_way = walks_.walk(false, false);
  size_t trusted = walk.frames.size();
  bool same = walk.result.reason == best.result.reason && walk.result.reason == long_way.result.reason &&
              walk.frames.size() == long_way.frames.size() && best.frames.size() == best_long_way.frames.size() &&
              same_frames(walk, long_way, trusted) && same_frames(best, best_long_way, best.frames.size());
  // A best-effort walk finds the same frames and goes on where the reliable one stops.
  for (size_t i = 0; same && i < trusted; i++)
    same = i < best.frames.size() && best.frames[i].pc == walk.frames[i].pc &&
           best.frames[i].reason == walk.frames[i].reason;
  if (!same && counts.forms_differ++ < kWrongInWords)
    counts.first_wrong.push_back("FORMS DIFFER\n" + in_words(walk, truth, 0) + "without cache\n" +
                                 in_words(long_way, truth, 0) + "best effort\n" + in_words(best, truth, 0));
  const bool whole = walk.result.whole();
  *compared = truth.known && (truth.to_the_end || !whole);
  if (!truth.known) {
    counts.unknown++;
    counts.unknown_reliable += whole;
    return whole;
  }
  size_t wrong = first_false(walk, truth);
  if (!wrong) wrong = first_false(best, truth);
  if (!wrong && !*compared) {
    counts.unknown++;
    counts.unknown_reliable += whole;
    return whole;
  }
  counts.states++;
  counts.deepest = std::max(counts.deepest, truth.chain.size());
  if (wrong) {
    counts.wrong_places[walks_.name(walk.frames[0].pc.value, false)]++;
    if (counts.wrong++ < kWrongInWords) counts.first_wrong.push_back(in_words(walk, truth, wrong));
  }
  Answer plain = judge(walks_.plain(truth.chain.size() + 1), truth, program_);
  last_plain = plain;
  counts.plain_refused += plain == Answer::refused;
  counts.plain_wrong += plain == Answer::wrong;
  if (whole) {
    counts.reliable += !wrong;
    return true;
  }
  counts.plain_bad_where_unreliable += plain != Answer::right;
  const char* reason = describe(walk.result.reason);
  counts.reasons[reason]++;
  const Frame& last = walk.frames.back();
  std::string place = walks_.place(last.pc.value, last.is_return);
  const size_t count = walk.frames.size();
  if (!walks_.image_at(last.code().lookup().value) && count > 1)
    place += " from " + walks_.place(walk.frames[count - 2].pc.value, walk.frames[count - 2].is_return);
  if (counts.places[fmt::format("{} {}", reason, place)]++ < show)
    fmt::print(stderr, "{}", in_words(walk, truth, walk.frames.size()));
  Chain chain;
  for (const Frame& frame : best.frames) chain.pcs.push_back(frame.pc.value);
  counts.best_effort_right += judge(chain, truth, program_) == Answer::right;
  return false;
}

std::string Comparison::in_words(const Walk& walk, const Truth& truth, size_t first) const {
  std::string text = fmt::format("step {} at {}\n", program_.steps(), walks_.name(program_.pc(), false));
  text += stepping::in_words(program_.registers());
  size_t shown = std::max(walk.frames.size(), truth.chain.size());
  for (size_t i = 0; i < shown && i < first + 6; i++) {
    text += fmt::format("  #{} ", i);
    if (i < walk.frames.size()) {
      const Frame& f = walk.frames[i];
      text += fmt::format("walk {:#x} {} cfa {:#x} {}{}", f.pc.value, walks_.name(f.pc.value, f.is_return), f.cfa.value,
                          describe(f.reason), f.recovered & kMarked ? " (marked)" : "");
    }
    text += " | ";
    if (i < truth.chain.size())
      text +=
          fmt::format("truth {:#x} {} slot {:#x}", truth.chain[i], walks_.name(truth.chain[i], i > 0), truth.slots[i]);
    text += "\n";
    if (i < truth.chain.size() && i < first + 2) {
      uint8_t bytes[24] = {};
      bool has = program_.read(Addr(truth.chain[i] - 8), bytes);
      text += fmt::format("     code from -8: {}\n     row: {}\n", has ? hex(bytes) : "unreadable",
                          walks_.row(truth.chain[i], i > 0));
    }
  }
  return text;
}

}  // namespace sonde::stepping
