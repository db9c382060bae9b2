// See planner.h. Punned jumps: Chamith et al., "Instruction punning" (PLDI 2017); Duck et al., "Binary rewriting without
// control flow recovery" (PLDI 2020).
#include "host/plan/planner.h"

#include <algorithm>
#include <cstring>

#include "core/base/check.h"
#include "core/isa/x86_64_detour.h"

namespace sonde::host {
namespace {

constexpr uint64_t kPageBytes = 4096, kReach = uint64_t{1} << 31, kReachMargin = uint64_t{1} << 20;
constexpr size_t kSlotBound = 176;  // bytes of arena reserved per site: the longest detour of a 5-byte window, aligned
constexpr uint64_t kPointerBytes = 8;

bool overlaps(const std::map<uint64_t, uint64_t>& ranges, uint64_t begin, uint64_t end) {
  auto it = ranges.lower_bound(end);
  return it != ranges.begin() && std::prev(it)->second > begin;
}

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

// Extends nops by those that follow: the detour goes back behind all of them.
Displaced all_nops(const CodeView& view, const Window& w, uint64_t end) {
  Displaced d = w.first(w.length);
  d.copied = false;
  while (w.patch + d.length < end) {
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
  reserve_arena(request.functions.size());
}

void Planner::reserve_arena(size_t sites) {
  uint64_t size = (kPointerBytes + sites * kSlotBound + kPageBytes - 1) & ~(kPageBytes - 1);
  auto at = space_.closest(view_.begin, reach_begin_, reach_end_, size);
  if (!at) return;
  arena_ = *at, arena_at_ = *at + kPointerBytes, arena_end_ = *at + size;
  space_.take(arena_, arena_end_);
  arena_bytes_ = pointer_bytes(request_.entry_trampoline.value);
}

void Planner::plan(std::vector<SitePlan>& sites, const std::vector<CodeRange>& functions) {
  std::vector<Candidate> left;
  for (size_t i = 0; i < sites.size(); i++) {
    if (sites[i].refusal != Refusal::none) continue;
    targets_.add_near(functions[i].begin, functions[i].end);
  }
  for (size_t i = 0; i < sites.size(); i++) {
    if (sites[i].refusal != Refusal::none) continue;
    Candidate c{&sites[i], request_.first_site + static_cast<uint32_t>(i), functions[i], window_at(view_, targets_, functions[i])};
    c.site->patch = Addr(c.window.patch);
    if (request_.force_traps || !plan_jump(c)) left.push_back(std::move(c));
  }
  // A punned jump reads bytes above its own: from high addresses to low these are settled.
  std::sort(left.begin(), left.end(), [](const Candidate& a, const Candidate& b) { return a.window.patch > b.window.patch; });
  for (Candidate& c : left) {
    if (!request_.force_traps && (plan_short_jump(c) || plan_punned_jump(c))) continue;
    if ((request_.allow_traps || request_.force_traps) && plan_trap(c)) continue;
    c.site->method = Method::refused;
    c.site->refusal = c.window.reason != Refusal::none ? c.window.reason : Refusal::no_room;
    c.site->refusal_offset = c.window.reason_offset;
  }
}

bool Planner::plan_jump(Candidate& c) {
  const Window& w = c.window;
  if (!w.fits_jump || overlaps(changed_, w.patch, w.patch + kJumpBytes)) return false;
  bool nops = w.length >= kJumpBytes && std::all_of(w.insns.begin(), w.insns.end(), [](const Insn& i) { return i.nop; });
  if (!add_detour(c, nops ? all_nops(view_, w, c.function.end) : w.first(w.length))) return false;
  set_patch(c, nops ? Method::nops : Method::jump, jump_bytes(w.patch, c.site->detour.value));
  return true;
}

bool Planner::plan_short_jump(Candidate& c) { return false; }
bool Planner::plan_punned_jump(Candidate& c) { return false; }

bool Planner::plan_trap(Candidate& c) {
  const Window& w = c.window;
  if (w.insns.empty() || overlaps(locked_, w.patch, w.patch + 1)) return false;
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
  c.site->resume = Addr(at + x86_64_detour::kResumeOffset);
  c.site->detour_bytes = std::move(detour.bytes);
  c.site->steps = std::move(detour.steps);
  return true;
}

void Planner::set_patch(Candidate& c, Method method, std::vector<uint8_t> bytes) {
  auto code = view_.code_at(c.window.patch).first(bytes.size());
  c.site->method = method;
  c.site->original.assign(code.begin(), code.end());
  changed_[c.window.patch] = c.window.patch + bytes.size();
  c.site->bytes = std::move(bytes);
}

void Planner::finish(ImagePlan& plan) const {
  if (arena_bytes_.size() > kPointerBytes) {
    uint64_t end = (arena_ + arena_bytes_.size() + kPageBytes - 1) & ~(kPageBytes - 1);
    plan.arenas.push_back({Addr(arena_), Addr(end)});
    plan.writes.emplace_back(Addr(arena_), arena_bytes_);
  }
  // Detours elsewhere: whole pages, neighbours joined.
  for (const auto& [at, bytes] : writes_) {
    Addr begin(at & ~(kPageBytes - 1)), end((at + bytes.size() + kPageBytes - 1) & ~(kPageBytes - 1));
    if (!plan.arenas.empty() && plan.arenas.back().begin <= begin && begin <= plan.arenas.back().end)
      plan.arenas.back().end = std::max(plan.arenas.back().end, end);
    else
      plan.arenas.push_back({begin, end});
    plan.writes.emplace_back(Addr(at), bytes);
  }
}

}  // namespace sonde::host
