// The instructions at a function's entry, or from a place inside it on, that a patch could displace, and how far.
#pragma once

#include <optional>

#include "host/plan/detour.h"
#include "host/plan/plan.h"
#include "host/plan/targets.h"

namespace sonde::host {

constexpr uint32_t kJumpBytes = 5;

struct Window {
  uint64_t patch = 0;
  // Whole instructions from `patch` on, each movable, none but the first a target; at most until kJumpBytes are covered.
  std::vector<Insn> insns;
  uint32_t length = 0;  // bytes of insns
  bool fits_jump = false;  // a 5-byte jump may stand at `patch`: the rest of its bytes, if any, is proven padding
  Refusal reason = Refusal::none;  // why it does not fit
  uint32_t reason_offset = 0;  // bytes from the function's entry

  // The first instructions as long as they end within `bytes`.
  Displaced first(uint32_t bytes) const;
};

// At the function's entry, behind a landing pad. Near targets must have been added around the function.
Window window_at(const CodeView& view, const Targets& targets, CodeRange function);
// At the instruction that begins at `patch` inside the function.
Window window_inside(const CodeView& view, const Targets& targets, CodeRange function, uint64_t patch);

// Proven filler: decodes as padding, nothing leads there. Does not look at what runs into `from`.
bool is_dead_padding(const CodeView& view, const Targets& targets, uint64_t from, uint64_t to);

}  // namespace sonde::host
