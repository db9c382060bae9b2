#include "tests/step/shadow.h"

#include <algorithm>

namespace sonde::stepping {
namespace {

// Frames are smaller than this; an instruction that sets sp further below goes to another stack.
constexpr uint64_t kFarBelow = 64 << 10;
// swapcontext saves the sp that its caller will have.
constexpr uint64_t kNearResumed = 16;

}  // namespace

void Shadow::begin(uint64_t stack_end) { begin(stack_end, {}); }

void Shadow::begin(uint64_t stack_end, std::vector<Call> calls) {
  current_ = {.calls = std::move(calls), .end = stack_end, .bottom_known = true};
  waiting_.clear();
  limbo_ = 0, lost_ = false;
}

// sp was set to a value that is not of this stack: the other one becomes current.
void Shadow::switches(uint64_t sp, uint64_t new_sp) {
  auto back = std::ranges::find_if(waiting_, [&](const Strand& s) { return new_sp - s.sp <= kNearResumed; });
  bool far = new_sp + kFarBelow < sp || new_sp > current_.end;
  if (back == waiting_.end() && !far) return;
  Strand next{.calls = {}, .end = new_sp + kFarBelow};
  if (back != waiting_.end()) next = std::move(*back), waiting_.erase(back);
  current_.sp = sp;
  waiting_.push_back(std::move(current_));
  current_ = std::move(next);
  stack_switches++;
}

void Shadow::stepped(const Insn& insn, uint64_t pc, uint64_t sp, uint64_t new_pc, uint64_t new_sp) {
  if (insn.effect == Effect::sets_sp) switches(sp, new_sp);
  auto& calls = current_.calls;
  size_t dead = 0;
  const uint64_t live_from = insn.effect == Effect::call ? sp : new_sp;
  while (dead < calls.size() && calls[calls.size() - 1 - dead].slot < live_from) dead++;
  bool leaves = insn.effect == Effect::call || insn.effect == Effect::ret || insn.effect == Effect::jump_indirect;
  if (!leaves) return void(limbo_ = dead);
  if (insn.effect == Effect::ret && dead == 1 && calls.back().adopted && calls.back().slot == sp)
    (new_pc == calls.back().pc ? adopted_returned : adopted_false)++;
  if (dead > 1) abandoned += dead - 1;
  calls.resize(calls.size() - dead);
  limbo_ = 0;
  if (insn.effect == Effect::call && new_sp == sp - 8)
    calls.push_back({.slot = new_sp, .pc = pc + insn.length, .caller_sp = sp});
}

void Shadow::interrupted(uint64_t pc, uint64_t sp, uint64_t new_sp, uint64_t restorer) {
  current_.calls.push_back({.slot = new_sp + 8, .pc = pc, .caller_sp = sp, .interrupted = true});
  current_.calls.push_back({.slot = new_sp, .pc = restorer, .caller_sp = new_sp + 8});
}

void Shadow::signal_returned(uint64_t new_sp) {
  auto& calls = current_.calls;
  if (calls.empty() || !calls.back().interrupted) return void(lost_ = true);
  lost_ |= calls.back().caller_sp != new_sp;
  calls.pop_back();
}

}  // namespace sonde::stepping
