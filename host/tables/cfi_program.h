// Call frame instructions (DWARF 5 section 6.4.2) executed: where they leave each register of a frame. Registers that no
// row recovers are followed only as far as to read over them.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "host/tables/cfi.h"

namespace sonde::host {

struct RegisterRule {
  enum Kind : uint8_t { unspecified, undefined, same_value, offset, val_offset, in_register, expression, val_expression };
  Kind kind = unspecified;
  uint32_t size = 0;   // of the expression
  int64_t value = 0;   // bytes from the CFA, a register, or the expression's place in the section

  Block block() const { return {static_cast<uint32_t>(value), size}; }
};

struct CfaRule {
  enum Kind : uint8_t { none, reg_offset, expression };
  Kind kind = none;
  uint64_t reg = 0;
  int64_t offset = 0;
  Block block;
};

// By DWARF number; 34 is AArch64's RA_SIGN_STATE, the highest one that matters here.
constexpr unsigned kFollowedRegisters = 35;

struct FrameState {
  CfaRule cfa;
  bool ra_signed = false;  // AArch64
  std::array<RegisterRule, kFollowedRegisters> regs{};
};

enum class ProgramError : uint8_t {
  none,
  malformed,          // operands missing, locations going backwards, a state restored that was not kept
  unknown_operation,
};

class CfiProgram {
 public:
  CfiProgram(const CfiSection& section, uint32_t machine) : section_(section), machine_(machine) {}

  // Calls row(address, state) for each place where the state may change, in ascending order, the first at the start of fde's
  // range. On an error the rows given before are not to be trusted either.
  template <class RowAt>
  ProgramError run(const Fde& fde, RowAt&& row);

 private:
  enum class Did : uint8_t { rule, advance, failed_malformed, failed_unknown };
  // Executes one instruction. For `advance` the new place is in location_.
  Did execute(Cursor& at, const Cie& cie);
  Did execute_cfa(uint8_t op, Cursor& at, const Cie& cie);
  Did advance(uint64_t by, const Cie& cie);
  void set_rule(uint64_t reg, RegisterRule rule) {
    if (reg < kFollowedRegisters) state_.regs[reg] = rule;
  }
  void restore_rule(uint64_t reg) {
    if (reg < kFollowedRegisters) state_.regs[reg] = initial_.regs[reg];
  }
  Block read_block(Cursor& at);
  static ProgramError error_of(Did did) {
    return did == Did::failed_unknown ? ProgramError::unknown_operation : ProgramError::malformed;
  }

  const CfiSection& section_;
  uint32_t machine_;
  const Cie* initial_of_ = nullptr;  // whose instructions gave initial_
  ProgramError initial_error_ = ProgramError::none;
  FrameState initial_, state_;
  std::vector<FrameState> kept_;
  uint64_t location_ = 0, function_ = 0;

  ProgramError run_initial(const Cie& cie);
};

template <class RowAt>
ProgramError CfiProgram::run(const Fde& fde, RowAt&& row) {
  function_ = fde.range.begin.value;
  if (initial_of_ != fde.cie) initial_error_ = run_initial(*fde.cie), initial_of_ = fde.cie;
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
