// See window.h.
#include "host/plan/window.h"

#include <algorithm>

namespace sonde::host {
namespace {

std::optional<Insn> decode_at(const CodeView& view, uint64_t pc) {
  auto code = view.code_at(pc);
  return decode(code.first(std::min<size_t>(code.size(), 15)), pc);
}

}  // namespace

Displaced Window::first(uint32_t bytes) const {
  Displaced d;
  for (const Insn& insn : insns) {
    if (d.length + insn.length > bytes) break;
    d.insns.push_back(insn), d.length += insn.length;
  }
  return d;
}

bool is_dead_padding(const CodeView& view, const Targets& targets, uint64_t from, uint64_t to) {
  if (targets.any(from, to)) return false;
  while (from < to) {
    auto insn = decode_at(view, from);
    if (!insn || !is_padding(*insn)) return false;
    from = insn->next();
  }
  return true;
}

Window window_at(const CodeView& view, const Targets& targets, CodeRange function) {
  auto first = decode_at(view, function.begin);
  bool pad = first && first->landing_pad;
  return window_inside(view, targets, function, pad ? first->next() : function.begin);
}

Window window_inside(const CodeView& view, const Targets& targets, CodeRange function, uint64_t patch) {
  Window w;
  w.patch = patch;
  auto stop = [&](Refusal reason, uint64_t at) {
    if (reason == Refusal::jumped_into && view.has_unknown_pads(at)) reason = Refusal::unknown_pads;
    w.reason = reason, w.reason_offset = static_cast<uint32_t>(at - function.begin);
    return w;
  };
  while (w.length < kJumpBytes) {
    uint64_t at = w.patch + w.length;
    bool ended = !w.insns.empty() && ends_flow(w.insns.back().flow);
    if (ended || at >= function.end) {
      // What follows is reached by some branch, as landing pad or through a table, seen or not; or it is filler.
      if (w.insns.empty()) return stop(Refusal::not_code, at);
      if (!ended || !is_dead_padding(view, targets, at, w.patch + kJumpBytes)) return stop(Refusal::too_small, at);
      break;
    }
    auto insn = decode_at(view, at);
    if (!insn || insn->next() > function.end)
      return stop(w.insns.empty() ? Refusal::not_code : Refusal::data_in_text, at);
    if (!w.insns.empty() && targets.marked(at)) return stop(Refusal::jumped_into, at);
    if (!can_move(*insn)) return stop(Refusal::not_relocatable, at);
    w.insns.push_back(*insn), w.length += insn->length;
    // The callee comes back to the byte behind a call: it must keep what stands there.
    bool call = insn->flow == Flow::call || insn->flow == Flow::call_indirect;
    if (call && w.length < kJumpBytes) return stop(Refusal::too_small, insn->next());
  }
  for (uint64_t a = w.patch + 1; a < w.patch + kJumpBytes; a++)
    if (targets.marked(a)) return stop(Refusal::jumped_into, a);
  w.fits_jump = true;
  return w;
}

}  // namespace sonde::host
