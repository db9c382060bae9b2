// See planner.h. Punned jumps: Chamith et al., "Instruction punning" (PLDI 2017); Duck et al., "Binary rewriting without
// control flow recovery" (PLDI 2020).
#include "host/plan/planner.h"

#include <algorithm>
#include <cstring>
#include <set>

#include "core/base/check.h"
#include "core/isa/x86_64_detour.h"

namespace sonde::host {
namespace {

constexpr uint64_t kPageBytes = 4096, kReach = uint64_t{1} << 31, kReachMargin = uint64_t{1} << 20;
constexpr size_t kSlotBound = 176;  // bytes of arena reserved per site: the longest detour of a 5-byte window, aligned
constexpr uint64_t kPointerBytes = 8;
constexpr uint32_t kShortJumpBytes = 2, kSyscallBytes = 2;
constexpr uint64_t kUserEnd = 0x7ffffffff000;
// In front of a near jmp all processors ignore REX.W, which must come last, and segment overrides.
constexpr uint8_t kIgnoredPrefixes[] = {0x48, 0x3e, 0x36, 0x26};

std::vector<uint8_t> jump_bytes(uint64_t from, uint64_t to) {
  CodeBuffer code(from);
  code.jump(to);
  SONDE_CHECK(code.size() == kJumpBytes);
  return std::move(code.bytes());
}

std::vector<uint8_t> pointer_bytes(uint64_t value) {
  CodeBuffer word(0);
  word.append64(value);
  return std::move(word.bytes());
}

// Extends nops by those that follow: the detour goes back behind all of them, but skips none that is itself probed.
Displaced all_nops(const CodeView& view, const Targets& targets, const Window& w, uint64_t end) {
  Displaced d = w.first(w.length);
  d.copied = false;
  while (w.patch + d.length < end && !targets.marked(w.patch + d.length)) {
    auto insn = decode(view.code_at(w.patch + d.length), w.patch + d.length);
    if (!insn || !insn->nop) break;
    d.length += insn->length;
  }
  return d;
}

}  // namespace

Planner::Planner(const CodeView& view, const PlanRequest& request)
    : view_(view), request_(request), targets_(view), space_(view, request.used) {
  reach_begin_ = view.end > kReach - kReachMargin ? view.end - (kReach - kReachMargin) : 0;
  reach_end_ = view.begin + kReach - kReachMargin;
  if (request.system_calls) calls_ = find_system_calls(view_, &targets_);
  reserve_arena(request.functions.size() + request.points.size() + calls_.found.size());
  for (AddrRange r : request.kept) locked_.add(r.begin.value, r.end.value), earlier_.add(r.begin.value, r.end.value);
}

void Planner::reserve_arena(size_t sites) {
  uint64_t size = (kPointerBytes + sites * kSlotBound + kPageBytes - 1) & ~(kPageBytes - 1);
  auto at = space_.closest(view_.begin, reach_begin_, reach_end_, size);
  if (!at) return;
  arena_ = *at, arena_at_ = *at + kPointerBytes, arena_end_ = *at + size;
  space_.take(arena_, arena_end_);
  arena_bytes_ = pointer_bytes(request_.entry_trampoline.value);
}

void Planner::plan_system_calls(ImagePlan& plan) {
  for (uint64_t at : calls_.doubtful) plan.doubtful.push_back(Addr(at));
  auto harmless = [](const SystemCall& call) { return !is_minded(call.number); };
  plan.harmless_system_calls = std::erase_if(calls_.found, harmless);
  for (const SystemCall& call : calls_.found) targets_.mark(call.at), targets_.add_near(call.code.begin, call.code.end);
  uint32_t number = request_.first_site + static_cast<uint32_t>(request_.functions.size() + request_.points.size());
  std::vector<Candidate> candidates;
  plan.system_calls.resize(calls_.found.size());
  for (size_t i = 0; i < calls_.found.size(); i++) {
    const SystemCall& call = calls_.found[i];
    SystemCallPlan& planned = plan.system_calls[i];
    planned.number = call.number;
    size_t f = view_.function_from(call.at);
    bool known = f < view_.functions.size() && view_.functions[f].begin <= call.at;
    planned.site.function = known ? static_cast<uint32_t>(f) : kNoFunction;
    planned.site.entry = planned.site.patch = Addr(call.at);
    candidates.push_back({&planned.site, number++, call.code, window_inside(view_, targets_, call.code, call.at)});
    if (locked_.overlaps(call.at, call.at + kSyscallBytes))
      refuse(candidates.back(), Refusal::engine), candidates.pop_back();
  }
  choose(std::move(candidates), false);
  wanted_ = {};
}

void Planner::find_points(std::span<SitePlan> sites, std::span<const CodeRange> functions) {
  if (sites.empty()) return;
  std::set<uint64_t> entries;  // where the functions' own patches will stand
  for (CodeRange f : functions) entries.insert(window_at(view_, targets_, f).patch);
  uint32_t number = request_.first_site + static_cast<uint32_t>(functions.size());
  Decoded decoded;
  for (SitePlan& site : sites) {
    Candidate c{&site, number++, {}, {}};
    uint64_t at = site.entry.value;
    size_t f = view_.function_from(at);
    bool known = f < view_.functions.size() && view_.functions[f].begin <= at;
    if (known) site.function = static_cast<uint32_t>(f), c.function = view_.functions[f];
    if (site.refusal != Refusal::none) continue;
    Refusal why = known ? check_point(c, at, decoded) : Refusal::not_code;
    if (why == Refusal::none && entries.contains(c.window.patch)) why = Refusal::function_entry;
    if (why != Refusal::none) {
      refuse(c, why);
      continue;
    }
    // The one of a landing pad and the one behind it are the same place.
    if (!points_.empty() && points_.back().window.patch == c.window.patch)
      refuse(points_.back(), Refusal::landing_pad), points_.pop_back();
    site.patch = Addr(c.window.patch);
    points_.push_back(std::move(c));
  }
  for (const Candidate& c : points_) targets_.add_near(c.function.begin, c.function.end);
  // Where a trap can take its place, no watched system call needs what stands behind it.
  if (!request_.allow_traps) return;
  mark_points();
  for (const Candidate& c : points_) wanted_.add(c.window.patch, c.window.patch + 1);
}

// No other patch covers one.
void Planner::mark_points() {
  for (const Candidate& c : points_) targets_.mark(c.window.patch);
}

// Whether an instruction begins there that a patch may replace; sets window.patch to it.
Refusal Planner::check_point(Candidate& c, uint64_t at, Decoded& decoded) const {
  if (decoded.function != c.function.begin || decoded.end > at) decoded = {c.function.begin, c.function.begin};
  auto wrong = [&](Refusal why, uint64_t where) {
    c.window.reason_offset = static_cast<uint32_t>(where - c.function.begin);
    return why;
  };
  auto insn = decode(view_.code_at(decoded.end), decoded.end);
  while (insn && insn->next() <= at) {
    decoded.end = insn->next();
    insn = decode(view_.code_at(decoded.end), decoded.end);
  }
  if (!insn) return wrong(decoded.end == at ? Refusal::not_code : Refusal::data_in_text, decoded.end);
  if (decoded.end != at) return wrong(Refusal::inside_instruction, at);
  c.window.patch = insn->landing_pad ? insn->next() : at;
  auto call = std::ranges::find(calls_.found, c.window.patch, &SystemCall::at);
  bool watched = call != calls_.found.end() && is_minded(call->number);
  return watched ? wrong(Refusal::system_call, call->at) : Refusal::none;
}

// Those of the points that can be.
std::vector<Planner::Candidate> Planner::open_points() {
  mark_points();
  std::vector<Candidate> open;
  for (Candidate& c : points_) {
    uint64_t patch = c.window.patch;
    c.window = window_inside(view_, targets_, c.function, patch);
    bool earlier = earlier_.overlaps(patch, patch + 1);
    // The patch of a watched system call may cover what follows.
    if (earlier || locked_.overlaps(patch, patch + 1) || changed_.overlaps(patch, patch + 1)) {
      c.window.reason_offset = static_cast<uint32_t>(patch - c.function.begin);
      refuse(c, earlier ? Refusal::engine : Refusal::system_call);
    } else {
      open.push_back(std::move(c));
    }
  }
  return open;
}

void Planner::plan(std::span<SitePlan> sites, std::span<const CodeRange> functions) {
  std::vector<Candidate> candidates = open_points();
  for (size_t i = 0; i < functions.size(); i++) {
    if (sites[i].refusal != Refusal::none) continue;
    targets_.add_near(functions[i].begin, functions[i].end);
  }
  for (size_t i = 0; i < functions.size(); i++) {
    if (sites[i].refusal != Refusal::none) continue;
    Candidate c{&sites[i], request_.first_site + static_cast<uint32_t>(i), functions[i],
                window_at(view_, targets_, functions[i])};
    c.site->patch = Addr(c.window.patch);
    c.site->loop_head = targets_.loops_to(functions[i].begin, c.window.patch);
    bool call = std::ranges::find(calls_.found, c.window.patch, &SystemCall::at) != calls_.found.end();
    if (call || locked_.overlaps(c.window.patch, c.window.patch + 1)) {
      refuse(c, call ? Refusal::system_call : Refusal::engine);
      continue;
    }
    candidates.push_back(std::move(c));
  }
  choose(std::move(candidates), request_.force_traps);
}

void Planner::choose(std::vector<Candidate> candidates, bool force_traps) {
  std::vector<Candidate> left;
  for (Candidate& c : candidates)
    if (force_traps || !plan_jump(c)) left.push_back(std::move(c));
  // A punned jump reads bytes above its own: from high addresses to low these are settled.
  std::sort(left.begin(), left.end(),
            [](const Candidate& a, const Candidate& b) { return a.window.patch > b.window.patch; });
  for (Candidate& c : left) {
    if (!force_traps && (plan_short_jump(c) || plan_punned_jump(c))) continue;
    Refusal no_jump = c.window.reason != Refusal::none ? c.window.reason : Refusal::no_room;
    bool trap = (request_.allow_traps || force_traps) && plan_trap(c);
    refuse(c, no_jump);
    if (trap) c.site->method = Method::trap;
  }
}

void Planner::refuse(Candidate& c, Refusal reason) {
  c.site->method = Method::refused;
  c.site->refusal = reason;
  c.site->refusal_offset = c.window.reason_offset;
}

bool Planner::plan_jump(Candidate& c) {
  const Window& w = c.window;
  if (!w.fits_jump || locked_.overlaps(w.patch, w.patch + kJumpBytes)) return false;
  bool nops =
      w.length >= kJumpBytes && std::all_of(w.insns.begin(), w.insns.end(), [](const Insn& i) { return i.nop; });
  if (!add_detour(c, nops ? all_nops(view_, targets_, w, c.function.end) : w.first(w.length))) return false;
  set_patch(c, nops ? Method::nops : Method::jump, jump_bytes(w.patch, c.site->detour.value));
  return true;
}

// eb rel8 at the site, e9 rel32 in padding within its reach.
bool Planner::plan_short_jump(Candidate& c) {
  const Window& w = c.window;
  Displaced displaced;
  for (size_t i = 0; i < w.insns.size() && displaced.length < kShortJumpBytes; i++)
    displaced.insns.push_back(w.insns[i]), displaced.length += w.insns[i].length;
  if (displaced.length < kShortJumpBytes || targets_.marked(w.patch + 1)) return false;
  if (locked_.overlaps(w.patch, w.patch + kShortJumpBytes)) return false;
  auto island = find_island(w.patch);
  if (!island || !add_detour(c, displaced)) return false;
  auto filler = view_.code_at(*island).first(kJumpBytes);
  c.site->island = Addr(*island);
  c.site->island_original.assign(filler.begin(), filler.end());
  c.site->island_bytes = jump_bytes(*island, c.site->detour.value);
  changed_.add(*island, *island + kJumpBytes);
  set_patch(c, Method::short_jump, {0xeb, static_cast<uint8_t>(*island - (w.patch + kShortJumpBytes))});
  return true;
}

// Five bytes between two functions that nothing runs into, nothing leads to and nobody uses.
std::optional<uint64_t> Planner::find_island(uint64_t patch) {
  uint64_t from = patch + kShortJumpBytes - 128, to = patch + kShortJumpBytes + 127;  // its start, `to` included
  for (size_t i = view_.function_from(from - 1); i < view_.functions.size(); i++) {
    CodeRange before = view_.functions[i];
    if (before.end > to) break;
    uint64_t end = i + 1 < view_.functions.size() ? view_.functions[i + 1].begin : before.end;
    if (end - before.end < kJumpBytes || end - before.end > 4096) continue;
    targets_.add_near(before.begin, end);
    if (!targets_.ends(before.begin) || !is_dead_padding(view_, targets_, before.end, end)) continue;
    for (uint64_t at = std::max(before.end, from); at + kJumpBytes <= end && at <= to; at++)
      if (!changed_.overlaps(at, at + kJumpBytes) && !locked_.overlaps(at, at + kJumpBytes)) return at;
  }
  return std::nullopt;
}

// e9 whose displacement ends in bytes of the following instructions, which stay as they are.
bool Planner::plan_punned_jump(Candidate& c) {
  const Window& w = c.window;
  for (size_t count = w.insns.size(); count > 0; count--) {
    Displaced displaced;
    for (size_t i = 0; i < count; i++) displaced.insns.push_back(w.insns[i]), displaced.length += w.insns[i].length;
    if (displaced.length >= kJumpBytes || targets_.any(w.patch + 1, w.patch + displaced.length)) continue;
    // Prefixes in front of e9 move the displacement onto other bytes.
    for (uint32_t prefixes = 0; prefixes < displaced.length; prefixes++)
      if (plan_pun(c, displaced, prefixes)) return true;
  }
  return false;
}

bool Planner::plan_pun(Candidate& c, const Displaced& displaced, uint32_t prefixes) {
  // patch: prefixes, e9, `open` displacement bytes of our choice, then bytes of the next instructions
  uint64_t patch = c.window.patch, jump = patch + prefixes, keep = patch + displaced.length, end = jump + kJumpBytes;
  if (locked_.overlaps(patch, keep) || changed_.overlaps(keep, end) || earlier_.overlaps(keep, end) ||
      wanted_.overlaps(keep, end))
    return false;
  auto code = view_.code_at(patch);
  if (code.size() < prefixes + kJumpBytes) return false;
  uint32_t open = displaced.length - prefixes - 1;
  uint32_t displacement = 0;
  for (uint32_t i = open; i < 4; i++) displacement |= uint32_t{code[prefixes + 1 + i]} << (8 * i);
  uint64_t low = end + static_cast<uint64_t>(int64_t{static_cast<int32_t>(displacement)});
  if (low >= kUserEnd || low < x86_64_detour::kHeader) return false;  // wrapped around
  auto at = place_punned(c, displaced, low, low + (uint64_t{1} << (8 * open)));
  if (!at) return false;
  std::vector<uint8_t> bytes(code.begin(), code.begin() + displaced.length);
  for (uint32_t i = 0; i < prefixes; i++) bytes[i] = kIgnoredPrefixes[prefixes - 1 - i];
  bytes[prefixes] = 0xe9;
  uint64_t rel = *at - end;
  for (uint32_t i = 0; i < open; i++) bytes[prefixes + 1 + i] = static_cast<uint8_t>(rel >> (8 * i));
  locked_.add(keep, end);
  c.relied = end - patch;
  set_patch(c, Method::punned_jump, std::move(bytes));
  return true;
}

// A detour that starts in [from, to): behind another punned one if possible, so that they share pages.
std::optional<uint64_t> Planner::place_punned(Candidate& c, const Displaced& displaced, uint64_t from, uint64_t to) {
  constexpr uint64_t kFront = x86_64_detour::kHeader;
  uint64_t size = detour_bound(displaced) + kPointerBytes;
  auto settle = [&](uint64_t at) {
    uint64_t begin = at - kFront;
    bool near = arena_ != 0 && fits32(static_cast<int64_t>(arena_ - begin)) &&
                fits32(static_cast<int64_t>(arena_ - (begin + size)));
    uint64_t own_pointer = begin + size - kPointerBytes;
    if (!place_detour(c, displaced, at, near ? arena_ : own_pointer)) return false;
    auto bytes = c.site->detour_bytes;
    if (!near) {
      bytes.resize(size - kPointerBytes, 0xcc);
      auto pointer = pointer_bytes(request_.entry_trampoline.value);
      bytes.insert(bytes.end(), pointer.begin(), pointer.end());
    }
    space_.take(begin, begin + bytes.size());
    writes_[begin] = std::move(bytes);
    return true;
  };
  int tries = 0;
  for (auto it = writes_.lower_bound(from - kFront); it != writes_.end() && tries < 8; ++it, tries++) {
    uint64_t at = it->first + it->second.size() + kFront;
    if (at >= to) break;
    if (space_.is_free(at - kFront, at - kFront + size) && settle(at)) return at;
  }
  auto begin = space_.first_fit(from - kFront, to - kFront, size);
  if (!begin || !settle(*begin + kFront)) return std::nullopt;
  return *begin + kFront;
}

bool Planner::plan_trap(Candidate& c) {
  const Window& w = c.window;
  if (w.insns.empty() || locked_.overlaps(w.patch, w.patch + 1)) return false;
  if (!add_detour(c, w.first(w.insns[0].length))) return false;
  set_patch(c, Method::trap, {0xcc});
  return true;
}

bool Planner::add_detour(Candidate& c, const Displaced& displaced) {
  uint64_t at = ((arena_at_ + x86_64_detour::kHeader) + 15) & ~uint64_t{15};
  if (arena_ == 0 || at + detour_bound(displaced) > arena_end_) return false;
  if (!place_detour(c, displaced, at, arena_)) return false;
  arena_at_ = at - x86_64_detour::kHeader + c.site->detour_bytes.size();
  arena_bytes_.resize(at - x86_64_detour::kHeader - arena_, 0xcc);
  arena_bytes_.insert(arena_bytes_.end(), c.site->detour_bytes.begin(), c.site->detour_bytes.end());
  return true;
}

bool Planner::place_detour(Candidate& c, const Displaced& displaced, uint64_t at, uint64_t pointer) {
  Detour detour;
  if (build_detour(at, pointer, c.number, c.window.patch, displaced, &detour) != Moved::yes) return false;
  c.site->detour = Addr(at);
  c.relied = displaced.length;
  arena_used_ |= pointer == arena_;
  c.site->resume = Addr(at + x86_64_detour::kResumeOffset);
  c.site->detour_bytes = std::move(detour.bytes);
  c.site->steps = std::move(detour.steps);
  return true;
}

void Planner::set_patch(Candidate& c, Method method, std::vector<uint8_t> bytes) {
  auto code = view_.code_at(c.window.patch);
  auto original = code.first(bytes.size()), relied = code.first(std::max<uint64_t>(bytes.size(), c.relied));
  c.site->method = method;
  c.site->original.assign(original.begin(), original.end());
  c.site->relied.assign(relied.begin(), relied.end());
  changed_.add(c.window.patch, c.window.patch + bytes.size());
  c.site->bytes = std::move(bytes);
}

void Planner::finish(ImagePlan& plan) const {
  IntervalSet kept = changed_;
  for (auto [begin, end] : locked_) kept.add(begin, end);
  for (auto [begin, end] : kept) plan.kept.push_back({Addr(begin), Addr(end)});
  if (arena_used_) {
    uint64_t end = (arena_ + arena_bytes_.size() + kPageBytes - 1) & ~(kPageBytes - 1);
    plan.arenas.push_back({Addr(arena_), Addr(end)});
    plan.writes.emplace_back(Addr(arena_), arena_bytes_);
  }
  // Detours elsewhere: whole pages, neighbours joined.
  for (const auto& [at, bytes] : writes_) {
    Addr begin(at & ~(kPageBytes - 1)), end((at + bytes.size() + kPageBytes - 1) & ~(kPageBytes - 1));
    if (!plan.arenas.empty() && plan.arenas.back().begin <= begin && begin <= plan.arenas.back().end)
      plan.arenas.back().end = std::max(plan.arenas.back().end, end);
    else plan.arenas.push_back({begin, end});
    plan.writes.emplace_back(Addr(at), bytes);
  }
}

}  // namespace sonde::host
