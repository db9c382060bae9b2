// One case per instruction. Operation numbers: DWARF 5 table 7.29, GNU and AArch64 extensions behind it.
#include "host/tables/cfi_program.h"

#include "core/isa/aarch64.h"
#include "core/isa/x86_64.h"

namespace sonde::host {
namespace {

enum Op : uint8_t {
  cfa_nop = 0x00,
  cfa_set_loc,
  cfa_advance_loc1,
  cfa_advance_loc2,
  cfa_advance_loc4,
  cfa_offset_extended,
  cfa_restore_extended,
  cfa_undefined,
  cfa_same_value,
  cfa_register,
  cfa_remember_state,
  cfa_restore_state,
  cfa_def_cfa,
  cfa_def_cfa_register,
  cfa_def_cfa_offset,
  cfa_def_cfa_expression,
  cfa_expression,
  cfa_offset_extended_sf,
  cfa_def_cfa_sf,
  cfa_def_cfa_offset_sf,
  cfa_val_offset,
  cfa_val_offset_sf,
  cfa_val_expression,
  cfa_aarch64_negate_ra_state_with_pc = 0x2c,
  cfa_aarch64_negate_ra_state = 0x2d,
  cfa_gnu_args_size = 0x2e,
  cfa_gnu_negative_offset_extended = 0x2f,
  // The upper two bits select these, the lower six are an operand.
  cfa_advance_loc = 0x40,
  cfa_offset = 0x80,
  cfa_restore = 0xc0,
};

constexpr uint32_t kMachineAarch64 = 183;
constexpr uint64_t kRaSignState = 34;  // AArch64: a made-up register, 1 where the return address is signed
constexpr size_t kMaxKept = 64;

int64_t scaled(uint64_t n, const Cie& cie) { return static_cast<int64_t>(n * static_cast<uint64_t>(cie.data_align)); }
int64_t scaled(int64_t n, const Cie& cie) { return scaled(static_cast<uint64_t>(n), cie); }

}  // namespace

Slots::Slots(uint32_t machine) {
  slots_.fill(kNone);
  auto add = [&](std::span<const uint8_t> saved, unsigned sp) {
    for (size_t i = 0; i < saved.size(); i++) slots_[saved[i]] = static_cast<uint8_t>(i);
    stack_pointer_ = static_cast<unsigned>(saved.size());
    slots_[sp] = static_cast<uint8_t>(stack_pointer_);
  };
  machine == kMachineAarch64 ? add(Aarch64::kSaved, Aarch64::sp) : add(X86_64::kSaved, X86_64::rsp);
}

void Slots::set_return_register(uint64_t reg) {
  if (added_ < slots_.size()) slots_[added_] = kNone;
  added_ = kNone;
  if (reg >= slots_.size() || slots_[reg] != kNone) return;
  slots_[reg] = static_cast<uint8_t>(stack_pointer_ + 1);
  added_ = reg;
}

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

void CfiProgram::use_initial(const Cie& cie) {
  slots_.set_return_register(cie.return_register);
  auto known = initials_.find(&cie);
  if (known == initials_.end()) {
    ProgramError error = run_initial(cie);
    known = initials_.emplace(&cie, Initial{error, initial_}).first;
  }
  initial_error_ = known->second.error, initial_ = known->second.state, initial_of_ = &cie;
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

// DWARF for the Arm 64-bit Architecture, section 4.4.1: an expression may give the state too; a constant is all it needs.
CfiProgram::Did CfiProgram::set_sign_state(Block block) {
  constexpr uint8_t kLit0 = 0x30, kLit1 = 0x31;
  uint8_t op = block.size == 1 ? section_.bytes[block.begin] : 0;
  if (op != kLit0 && op != kLit1) return Did::failed_unknown;
  state_.set_signed(op == kLit1);
  return Did::rule;
}

// The instructions that define the CFA.
CfiProgram::Did CfiProgram::execute_cfa(uint8_t op, Cursor& at, const Cie& cie) {
  CfaRule cfa = state_.cfa;
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
  state_.set_cfa(cfa);
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
      if (machine_ == kMachineAarch64 && reg == kRaSignState && at.ok())
        return set_sign_state(op == cfa_val_expression ? block : Block{});
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
    case cfa_aarch64_negate_ra_state_with_pc:  // what else was signed does not matter for stripping
      if (machine_ != kMachineAarch64) return Did::failed_unknown;
      state_.set_signed(!state_.ra_signed);
      break;
    default: return execute_cfa(op, at, cie);
  }
  return at.ok() ? Did::rule : Did::failed_malformed;
}

}  // namespace sonde::host
