// One case per instruction. Operation numbers: DWARF 5 table 7.29, GNU and AArch64 extensions behind it.
#include "host/tables/cfi_program.h"

namespace sonde::host {
namespace {

enum Op : uint8_t {
  cfa_nop = 0x00, cfa_set_loc, cfa_advance_loc1, cfa_advance_loc2, cfa_advance_loc4, cfa_offset_extended,
  cfa_restore_extended, cfa_undefined, cfa_same_value, cfa_register, cfa_remember_state, cfa_restore_state, cfa_def_cfa,
  cfa_def_cfa_register, cfa_def_cfa_offset, cfa_def_cfa_expression, cfa_expression, cfa_offset_extended_sf, cfa_def_cfa_sf,
  cfa_def_cfa_offset_sf, cfa_val_offset, cfa_val_offset_sf, cfa_val_expression,
  cfa_aarch64_negate_ra_state = 0x2d, cfa_gnu_args_size = 0x2e, cfa_gnu_negative_offset_extended = 0x2f,
  // The upper two bits select these, the lower six are an operand.
  cfa_advance_loc = 0x40, cfa_offset = 0x80, cfa_restore = 0xc0,
};

constexpr uint32_t kMachineAarch64 = 183;
constexpr size_t kMaxKept = 64;

int64_t scaled(uint64_t n, const Cie& cie) { return static_cast<int64_t>(n * static_cast<uint64_t>(cie.data_align)); }
int64_t scaled(int64_t n, const Cie& cie) { return scaled(static_cast<uint64_t>(n), cie); }

}  // namespace

Block CfiProgram::read_block(Cursor& at) {
  uint64_t size = at.uleb();
  if (size > at.left()) return at.fail(), Block{};
  Block block{static_cast<uint32_t>(at.at()), static_cast<uint32_t>(size)};
  at.skip(size);
  return block;
}

CfiProgram::Did CfiProgram::advance(uint64_t by, const Cie& cie) {
  uint64_t distance;
  if (__builtin_mul_overflow(by, cie.code_align, &distance) || __builtin_add_overflow(location_, distance, &location_))
    return Did::failed_malformed;
  return Did::advance;
}

ProgramError CfiProgram::run_initial(const Cie& cie) {
  state_ = FrameState{};
  initial_ = FrameState{};
  kept_.clear();
  Cursor at = section_.cursor(cie.instructions);
  while (at.left()) {
    Did did = execute(at, cie);
    if (did == Did::advance) return ProgramError::malformed;
    if (did != Did::rule) return error_of(did);
  }
  initial_ = state_;
  return ProgramError::none;
}

// The instructions that define the CFA.
CfiProgram::Did CfiProgram::execute_cfa(uint8_t op, Cursor& at, const Cie& cie) {
  CfaRule& cfa = state_.cfa;
  switch (op) {
    case cfa_def_cfa:
      cfa.reg = at.uleb();
      cfa.offset = static_cast<int64_t>(at.uleb());
      cfa.kind = CfaRule::reg_offset;
      break;
    case cfa_def_cfa_sf:
      cfa.reg = at.uleb();
      cfa.offset = scaled(at.sleb(), cie);
      cfa.kind = CfaRule::reg_offset;
      break;
    case cfa_def_cfa_register:
      if (cfa.kind != CfaRule::reg_offset) return Did::failed_malformed;
      cfa.reg = at.uleb();
      break;
    case cfa_def_cfa_offset:
      if (cfa.kind != CfaRule::reg_offset) return Did::failed_malformed;
      cfa.offset = static_cast<int64_t>(at.uleb());
      break;
    case cfa_def_cfa_offset_sf:
      if (cfa.kind != CfaRule::reg_offset) return Did::failed_malformed;
      cfa.offset = scaled(at.sleb(), cie);
      break;
    case cfa_def_cfa_expression:
      cfa.block = read_block(at);
      cfa.kind = CfaRule::expression;
      break;
    default: return Did::failed_unknown;
  }
  return at.ok() ? Did::rule : Did::failed_malformed;
}

CfiProgram::Did CfiProgram::execute(Cursor& at, const Cie& cie) {
  using Rule = RegisterRule;
  uint8_t op = at.read<uint8_t>(), operand = op & 0x3f;
  uint64_t reg = 0, value = 0;
  switch (op & 0xc0) {
    case cfa_advance_loc: return advance(operand, cie);
    case cfa_offset:
      set_rule(operand, {Rule::offset, 0, scaled(at.uleb(), cie)});
      return at.ok() ? Did::rule : Did::failed_malformed;
    case cfa_restore: return restore_rule(operand), Did::rule;
  }
  switch (op) {
    case cfa_nop: return Did::rule;
    case cfa_set_loc: {
      auto to = read_encoded(at, cie.fde_encoding, section_, function_);
      if (!to) return Did::failed_malformed;
      location_ = *to;
      return Did::advance;
    }
    case cfa_advance_loc1: value = at.read<uint8_t>(); return at.ok() ? advance(value, cie) : Did::failed_malformed;
    case cfa_advance_loc2: value = at.read<uint16_t>(); return at.ok() ? advance(value, cie) : Did::failed_malformed;
    case cfa_advance_loc4: value = at.read<uint32_t>(); return at.ok() ? advance(value, cie) : Did::failed_malformed;
    case cfa_offset_extended: reg = at.uleb(), set_rule(reg, {Rule::offset, 0, scaled(at.uleb(), cie)}); break;
    case cfa_offset_extended_sf: reg = at.uleb(), set_rule(reg, {Rule::offset, 0, scaled(at.sleb(), cie)}); break;
    case cfa_gnu_negative_offset_extended:
      reg = at.uleb();
      value = static_cast<uint64_t>(scaled(at.uleb(), cie));
      set_rule(reg, {Rule::offset, 0, static_cast<int64_t>(0 - value)});
      break;
    case cfa_val_offset: reg = at.uleb(), set_rule(reg, {Rule::val_offset, 0, scaled(at.uleb(), cie)}); break;
    case cfa_val_offset_sf: reg = at.uleb(), set_rule(reg, {Rule::val_offset, 0, scaled(at.sleb(), cie)}); break;
    case cfa_restore_extended: restore_rule(at.uleb()); break;
    case cfa_undefined: set_rule(at.uleb(), {Rule::undefined}); break;
    case cfa_same_value: set_rule(at.uleb(), {Rule::same_value}); break;
    case cfa_register: reg = at.uleb(), set_rule(reg, {Rule::in_register, 0, static_cast<int64_t>(at.uleb())}); break;
    case cfa_expression:
    case cfa_val_expression: {
      reg = at.uleb();
      Block block = read_block(at);
      set_rule(reg, {op == cfa_expression ? Rule::expression : Rule::val_expression, block.size, block.begin});
      break;
    }
    case cfa_remember_state:
      if (kept_.size() == kMaxKept) return Did::failed_malformed;
      kept_.push_back(state_);
      break;
    case cfa_restore_state:
      if (kept_.empty()) return Did::failed_malformed;
      state_ = kept_.back();
      kept_.pop_back();
      break;
    case cfa_gnu_args_size: at.uleb(); break;  // only landing pads care
    case cfa_aarch64_negate_ra_state:
      if (machine_ != kMachineAarch64) return Did::failed_unknown;
      state_.ra_signed = !state_.ra_signed;
      break;
    default: return execute_cfa(op, at, cie);
  }
  return at.ok() ? Did::rule : Did::failed_malformed;
}

}  // namespace sonde::host
