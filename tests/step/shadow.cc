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
  limbo_ = 0, lost_ = switched_ = false;
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
  switched_ = true;
}

// How many of the innermost calls lie below sp now.
size_t Shadow::dead(const Insn& insn, uint64_t sp, uint64_t new_sp) const {
  const auto& calls = current_.calls;
  const uint64_t live_from = insn.effect == Effect::call ? sp : new_sp;
  size_t dead = 0;
  while (dead < calls.size() && calls[calls.size() - 1 - dead].slot < live_from) dead++;
  // No function ends so: what its callers have made lies below their sp. So sp is not the one of a function that has given up
  // its frame, but of one that goes on and had made calls.
  if (!pushes_ && dead)
    while (dead < calls.size() && calls[calls.size() - 1 - dead].slot == live_from) dead++;
  return dead;
}

// Where calls push nothing: how many of those that were made with this sp a jump has left.
size_t Shadow::left_at(const Insn& insn, uint64_t new_pc, uint64_t new_sp) {
  const auto& calls = current_.calls;
  auto at = [&](size_t i) -> const Call& { return calls[calls.size() - 1 - i]; };
  if (insn.effect == Effect::call || calls.empty() || at(0).slot != new_sp || at(0).interrupted) return 0;
  if (at(0).pc == new_pc) return returned_to_.insert(new_pc), 1;
  if (switched_ && insn.effect == Effect::jump_indirect) return 1;
  if (!returned_to_.contains(new_pc)) return 0;
  size_t left = 0;
  while (left < calls.size() && at(left).slot == new_sp && !at(left).interrupted) left++;
  return left;
}

void Shadow::stepped(const Insn& insn, uint64_t pc, uint64_t sp, uint64_t new_pc, uint64_t new_sp) {
  if (insn.effect == Effect::sets_sp) switches(sp, new_sp);
  auto& calls = current_.calls;
  size_t gone = dead(insn, sp, new_sp);
  bool leaves = insn.effect == Effect::call || insn.effect == Effect::ret || insn.effect == Effect::jump_indirect;
  if (!leaves) return void(limbo_ = gone);
  if (insn.effect == Effect::ret && gone == 1 && calls.back().adopted && calls.back().slot == sp)
    (new_pc == calls.back().pc ? adopted_returned : adopted_false)++;
  if (!pushes_ && !gone) gone = left_at(insn, new_pc, new_sp);
  if (gone > 1) abandoned += gone - 1;
  calls.resize(calls.size() - gone);
  limbo_ = 0, switched_ = false;
  if (insn.effect == Effect::call && new_sp == (pushes_ ? sp - 8 : sp))
    calls.push_back({.slot = new_sp, .pc = pc + insn.length, .caller_sp = sp});
}

void Shadow::interrupted(uint64_t pc, uint64_t sp, uint64_t new_sp, uint64_t restorer) {
  const uint64_t frame = pushes_ ? new_sp + 8 : new_sp;
  current_.calls.push_back({.slot = frame, .pc = pc, .caller_sp = sp, .interrupted = true});
  current_.calls.push_back({.slot = new_sp, .pc = restorer, .caller_sp = frame});
}

void Shadow::signal_returned(uint64_t new_sp) {
  auto& calls = current_.calls;
  if (calls.empty() || !calls.back().interrupted) return void(lost_ = true);
  lost_ |= calls.back().caller_sp != new_sp;
  calls.pop_back();
}

}  // namespace sonde::stepping
