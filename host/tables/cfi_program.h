// Call frame instructions (DWARF 5 section 6.4.2) executed: where they leave each register of a frame. Registers that no
// row recovers are followed only as far as to read over them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <unordered_map>
#include <vector>

#include "core/unwind/row.h"
#include "host/tables/cfi.h"

namespace sonde::host {

struct RegisterRule {
  enum Kind : uint32_t {
    unspecified,
    undefined,
    same_value,
    offset,
    val_offset,
    in_register,
    expression,
    val_expression
  };
  Kind kind = unspecified;
  uint32_t size = 0;  // of the expression
  int64_t value = 0;  // bytes from the CFA, a register, or the expression's place in the section

  Block block() const { return {static_cast<uint32_t>(value), size}; }
};

struct CfaRule {
  enum Kind : uint64_t { none, reg_offset, expression };
  Kind kind = none;
  uint64_t reg = 0;
  int64_t offset = 0;
  Block block;
};

// Which registers are followed, and where in FrameState: those that rows have, in their order, then the stack pointer, then
// the return address's register if it is none of them.
class Slots {
 public:
  static constexpr unsigned kMax = kMaxSavedRegs + 2, kNone = 0xff;
  explicit Slots(uint32_t machine);
  void set_return_register(uint64_t reg);
  unsigned of(uint64_t reg) const { return reg < slots_.size() ? slots_[reg] : kNone; }
  unsigned stack_pointer() const { return stack_pointer_; }
  unsigned count() const { return stack_pointer_ + 2; }

 private:
  std::array<uint8_t, 35> slots_;
  unsigned stack_pointer_ = 0;
  uint64_t added_ = kNone;
};

// No padding, so that equal states are equal bytes; of regs the first Slots::count() are used. `hash` goes along with each
// change: the sum of the parts', so that it depends on the state and not on the way to it.
struct FrameState {
  uint64_t hash = 0;
  CfaRule cfa;
  uint64_t ra_signed = 0;  // AArch64: whether it is
  std::array<RegisterRule, Slots::kMax> regs{};

  void set(unsigned slot, const RegisterRule& rule) {
    hash += hash_of(slot, rule) - hash_of(slot, regs[slot]);
    regs[slot] = rule;
  }
  void set_cfa(const CfaRule& rule) {
    hash += hash_of(rule) - hash_of(cfa);
    cfa = rule;
  }
  void set_signed(bool is_signed) {
    hash += (is_signed - ra_signed) * 0xbf58476d1ce4e5b9;
    ra_signed = is_signed;
  }
  size_t used(const Slots& slots) const { return offsetof(FrameState, regs) + slots.count() * sizeof(RegisterRule); }

 private:
  static uint64_t mixed(uint64_t word) { return (word ^ word >> 29) * 0x94d049bb133111eb; }
  static uint64_t hash_of(unsigned slot, const RegisterRule& rule) {
    uint64_t kind = rule.kind | static_cast<uint64_t>(rule.size) << 32;
    return mixed((kind * 0x9e3779b97f4a7c15 + static_cast<uint64_t>(rule.value)) * (2 * slot + 3));
  }
  static uint64_t hash_of(const CfaRule& rule) {
    uint64_t block = rule.block.begin | static_cast<uint64_t>(rule.block.size) << 32;
    return mixed((rule.kind << 56 ^ rule.reg << 48 ^ block) * 0x9e3779b97f4a7c15 + static_cast<uint64_t>(rule.offset));
  }
};
static_assert(std::has_unique_object_representations_v<FrameState>);

enum class ProgramError : uint8_t {
  none,
  malformed,  // operands missing, locations going backwards, a state restored that was not kept
  unknown_operation,
};

class CfiProgram {
 public:
  CfiProgram(const CfiSection& section, uint32_t machine) : section_(section), machine_(machine), slots_(machine) {}

  // Calls row(address, state) for each place where the state may change, in ascending order, the first at the start of fde's
  // range. On an error the rows given before are not to be trusted either.
  template <class RowAt>
  ProgramError run(const Fde& fde, RowAt&& row);
  // Where the states of the entry last run have their registers.
  const Slots& slots() const { return slots_; }

 private:
  enum class Did : uint8_t { rule, advance, failed_malformed, failed_unknown };
  // Executes one instruction. For `advance` the new place is in location_.
  Did execute(Cursor& at, const Cie& cie);
  Did execute_cfa(uint8_t op, Cursor& at, const Cie& cie);
  Did advance(uint64_t by, const Cie& cie);
  void set_rule(uint64_t reg, RegisterRule rule) {
    if (unsigned slot = slots_.of(reg); slot != Slots::kNone) state_.set(slot, rule);
  }
  void restore_rule(uint64_t reg) {
    if (unsigned slot = slots_.of(reg); slot != Slots::kNone) state_.set(slot, initial_.regs[slot]);
  }
  Did set_sign_state(Block block);
  Block read_block(Cursor& at);
  static ProgramError error_of(Did did) {
    return did == Did::failed_unknown ? ProgramError::unknown_operation : ProgramError::malformed;
  }

  const CfiSection& section_;
  uint32_t machine_;
  Slots slots_;
  // What a common entry's instructions leave; each is executed once, however many entries take turns with it.
  struct Initial {
    ProgramError error;
    FrameState state;
  };
  std::unordered_map<const Cie*, Initial> initials_;
  const Cie* initial_of_ = nullptr;
  ProgramError initial_error_ = ProgramError::none;
  FrameState initial_, state_;
  std::vector<FrameState> kept_;
  uint64_t location_ = 0, function_ = 0;

  void use_initial(const Cie& cie);
  ProgramError run_initial(const Cie& cie);
};

template <class RowAt>
ProgramError CfiProgram::run(const Fde& fde, RowAt&& row) {
  function_ = fde.range.begin.value;
  if (initial_of_ != fde.cie) use_initial(*fde.cie);
  if (initial_error_ != ProgramError::none) return initial_error_;
  state_ = initial_;
  kept_.clear();
  location_ = function_;
  uint64_t since = location_;
  Cursor at = section_.cursor(fde.instructions);
  while (at.left()) {
    Did did = execute(at, *fde.cie);
    if (did == Did::rule) continue;
    if (did != Did::advance) return error_of(did);
    if (location_ < since) return ProgramError::malformed;
    if (location_ == since) continue;
    if (ImageAddr(since) < fde.range.end) row(since, state_);
    since = location_;
  }
  if (ImageAddr(since) < fde.range.end) row(since, state_);
  return ProgramError::none;
}

}  // namespace sonde::host
