// Rules that have a plain form get it (base register and offset, one load); other known expressions go to the dictionary.
#include "host/tables/row_from_cfi.h"

#include <algorithm>
#include <cstdint>
#include <limits>

#include "core/isa/aarch64.h"
#include "core/isa/x86_64.h"
#include "core/unwind/expression.h"

namespace sonde::host {
namespace {

constexpr uint32_t kMachineAarch64 = 183;
constexpr uint8_t kDeref = 0x06, kConsts = 0x11, kPlus = 0x22, kBreg0 = 0x70, kBreg31 = 0x8f, kBregx = 0x92;

// `breg REG OFFSET` at the cursor.
bool read_breg(Cursor& at, uint64_t* reg, int64_t* offset) {
  uint8_t op = at.read<uint8_t>();
  if (op >= kBreg0 && op <= kBreg31) *reg = op - kBreg0;
  else if (op == kBregx) *reg = at.uleb();
  else return false;
  *offset = at.sleb();
  return at.ok();
}

// breg rsp K; breg rip 0; lit15; and; litN; ge; lit3; shl; plus: as ld, gold, lld and mold write it for x86-64.
std::optional<PltRule> match_plt(std::span<const uint8_t> expression) {
  Cursor at(expression);
  uint64_t base, pc;
  int64_t offset, zero;
  if (!read_breg(at, &base, &offset) || !read_breg(at, &pc, &zero)) return std::nullopt;
  if (base >= X86_64::kRegs || pc != X86_64::rip || zero != 0 || at.left() != 7) return std::nullopt;
  constexpr uint8_t kLit0 = 0x30, kAnd = 0x1a, kGe = 0x2a, kShl = 0x24;
  if (at.read<uint8_t>() != kLit0 + 15 || at.read<uint8_t>() != kAnd) return std::nullopt;
  unsigned threshold = at.read<uint8_t>() - kLit0;
  if (threshold > 15 || at.read<uint8_t>() != kGe || at.read<uint8_t>() != kLit0 + 3 || at.read<uint8_t>() != kShl ||
      at.read<uint8_t>() != kPlus)
    return std::nullopt;
  return PltRule{static_cast<uint8_t>(base), offset, threshold};
}

void append_sleb(std::vector<uint8_t>* code, int64_t n) {
  for (bool more = true; more;) {
    uint8_t low = n & 0x7f;
    n >>= 7;
    more = !((n == 0 && !(low & 0x40)) || (n == -1 && (low & 0x40)));
    code->push_back(low | (more ? 0x80 : 0));
  }
}

void append_addition(std::vector<uint8_t>* code, int64_t n) {
  code->push_back(kConsts);
  append_sleb(code, n);
  code->push_back(kPlus);
}

template <class T>
bool fits(int64_t n) {
  return n >= std::numeric_limits<T>::min() && n <= std::numeric_limits<T>::max();
}

}  // namespace

RowMaker::RowMaker(const CfiSection& section, uint32_t machine, TableBuilder& builder)
    : section_(section), machine_(machine), builder_(builder) {
  if (machine == kMachineAarch64) {
    regs_ = Aarch64::kRegs, stack_pointer_ = Aarch64::sp, default_return_ = Aarch64::x30, saved_ = Aarch64::kSaved;
  } else {
    regs_ = X86_64::kRegs, stack_pointer_ = X86_64::rsp, default_return_ = X86_64::rip, saved_ = X86_64::kSaved;
  }
}

bool RowMaker::set_cfa(const CfaRule& cfa, RowResult* result) {
  if (cfa.kind == CfaRule::expression) {
    auto expression = bytes(cfa.block);
    if (machine_ != kMachineAarch64) result->plt = match_plt(expression);
    return set_cfa_expression(expression, result);
  }
  if (cfa.kind == CfaRule::none || cfa.reg >= regs_ || !fits<int32_t>(cfa.offset))
    return result->reason = Inexpressible::no_cfa, false;
  result->row.cfa_reg = static_cast<uint8_t>(cfa.reg);
  result->row.cfa_offset = static_cast<int32_t>(cfa.offset);
  return true;
}

bool RowMaker::set_cfa_expression(std::span<const uint8_t> expression, RowResult* result) {
  Row& row = result->row;
  uint64_t reg;
  int64_t offset;
  Cursor at(expression);
  bool plain = read_breg(at, &reg, &offset) && reg < regs_ && fits<int32_t>(offset);
  bool load = at.left() == 1 && at.read<uint8_t>() == kDeref;
  if (plain && at.ok() && at.left() == 0) {
    row.cfa_kind = load ? CfaKind::deref_reg_offset : CfaKind::reg_offset;
    row.cfa_reg = static_cast<uint8_t>(reg);
    row.cfa_offset = static_cast<int32_t>(offset);
    return true;
  }
  auto number = expression_is_known(expression, regs_) ? builder_.expression(expression) : std::nullopt;
  if (!number) return result->reason = Inexpressible::cfa_expression, false;
  row.cfa_kind = CfaKind::expression;
  row.cfa_offset = *number;
  return true;
}

// An expression for the source's CFA + offset that needs nothing on its stack; empty if there is none.
RowMaker::Code RowMaker::cfa_plus(const CfaRule& cfa, int64_t offset) const {
  Code code;
  if (cfa.kind == CfaRule::reg_offset && cfa.reg < 32) {
    code.push_back(static_cast<uint8_t>(kBreg0 + cfa.reg));
    append_sleb(&code, static_cast<int64_t>(static_cast<uint64_t>(cfa.offset) + static_cast<uint64_t>(offset)));
  } else if (cfa.kind == CfaRule::expression) {
    auto expression = bytes(cfa.block);
    code.assign(expression.begin(), expression.end());
    if (offset) append_addition(&code, offset);
  }
  return code;
}

bool RowMaker::set_cfa_from_stack_pointer(const FrameState& state, RowResult* result) {
  const RegisterRule& rule = state.regs[saved_.size()];
  Code code;
  switch (rule.kind) {
    case RegisterRule::in_register:
      if (static_cast<uint64_t>(rule.value) >= 32) break;
      code = {static_cast<uint8_t>(kBreg0 + rule.value), 0};
      break;
    case RegisterRule::offset:
    case RegisterRule::val_offset: code = cfa_plus(state.cfa, rule.value); break;
    default: {
      code = cfa_plus(state.cfa, 0);
      auto expression = bytes(rule.block());
      code.insert(code.end(), expression.begin(), expression.end());
    }
  }
  if (rule.kind == RegisterRule::offset || rule.kind == RegisterRule::expression) code.push_back(kDeref);
  moved_ = &state.cfa;
  return cfa_plus(state.cfa, 0).size() && set_cfa_expression(code, result);
}

std::optional<RowMaker::Value> RowMaker::by_expression(bool load, const Code& code) {
  if (!expression_is_known(code, regs_)) return std::nullopt;
  auto number = builder_.expression(code);
  if (!number) return std::nullopt;
  return Value{load ? ValueKind::at_expression : ValueKind::is_expression, *number};
}

std::optional<RowMaker::Value> RowMaker::value_of(const RegisterRule& rule, unsigned self, int64_t limit) {
  switch (rule.kind) {
    case RegisterRule::unspecified:
    case RegisterRule::same_value: return Value{ValueKind::same};
    case RegisterRule::undefined: return Value{ValueKind::undefined};
    case RegisterRule::offset:
    case RegisterRule::val_offset: {
      bool load = rule.kind == RegisterRule::offset;
      if (moved_) return by_expression(load, cfa_plus(*moved_, rule.value));
      if (rule.value > limit || rule.value < -limit - 1) {
        Code code;  // starts with the CFA on its stack
        append_addition(&code, rule.value);
        return by_expression(load, code);
      }
      return Value{load ? ValueKind::at_cfa : ValueKind::cfa_plus, static_cast<int32_t>(rule.value)};
    }
    case RegisterRule::in_register:
      if (static_cast<uint64_t>(rule.value) >= regs_) return std::nullopt;
      if (static_cast<uint64_t>(rule.value) == self) return Value{ValueKind::same};
      return Value{ValueKind::in_register, static_cast<int32_t>(rule.value)};
    case RegisterRule::expression:
    case RegisterRule::val_expression: {
      // The CFA is on the stack at the start.
      bool load = rule.kind == RegisterRule::expression;
      Code code = moved_ ? cfa_plus(*moved_, 0) : Code{};
      auto expression = bytes(rule.block());
      if (!moved_ && expression.empty()) return Value{load ? ValueKind::at_cfa : ValueKind::cfa_plus, 0};
      code.insert(code.end(), expression.begin(), expression.end());
      return by_expression(load, code);
    }
  }
  return std::nullopt;
}

bool RowMaker::set_return(const FrameState& state, const Slots& slots, const Cie& cie, Row* row) {
  uint64_t reg = cie.return_register;
  if (reg >= regs_) return false;
  auto value = value_of(state.regs[slots.of(reg)], static_cast<unsigned>(reg), INT32_MAX);
  if (!value) return false;
  if (value->kind == ValueKind::same) {
    if (reg != default_return_) value = Value{ValueKind::in_register, static_cast<int32_t>(reg)};
    // x86-64: "unchanged" would be the pc itself.
    else if (machine_ != kMachineAarch64) return false;
  }
  row->ra_kind = value->kind;
  row->ra_offset = value->offset;
  return true;
}

// Signal frames give the stack pointer a rule of its own, which loads what the CFA's expression loads.
bool RowMaker::stack_pointer_is_cfa(const FrameState& state) const {
  const RegisterRule& rule = state.regs[saved_.size()];
  auto same = [&](std::span<const uint8_t> tail_of_cfa) {
    if (state.cfa.kind != CfaRule::expression) return false;
    auto cfa = bytes(state.cfa.block), sp = bytes(rule.block());
    return cfa.size() == sp.size() + tail_of_cfa.size() && std::equal(sp.begin(), sp.end(), cfa.begin()) &&
           std::equal(tail_of_cfa.begin(), tail_of_cfa.end(), cfa.end() - static_cast<long>(tail_of_cfa.size()));
  };
  switch (rule.kind) {
    case RegisterRule::unspecified:
    case RegisterRule::same_value:
    case RegisterRule::undefined: return true;  // runtime unwinders take the CFA then
    case RegisterRule::val_offset: return rule.value == 0;
    case RegisterRule::val_expression: return same({});
    case RegisterRule::expression: return same(std::span(&kDeref, 1));
    default: return false;
  }
}

RowResult RowMaker::make(const FrameState& state, const Slots& slots, const Cie& cie) {
  RowResult result;
  Row& row = result.row;
  if (cie.signal_frame) row.flags |= kRowSignalFrame;
  if (state.ra_signed) row.flags |= kRowRaSigned;
  if (cie.return_register < regs_ && state.regs[slots.of(cie.return_register)].kind == RegisterRule::undefined) {
    Row outermost;  // one row for all: nothing else of it is used
    outermost.flags = row.flags & kRowSignalFrame;
    outermost.cfa_reg = static_cast<uint8_t>(stack_pointer_);
    result.row = outermost;
    return result;
  }
  moved_ = nullptr;
  if (stack_pointer_is_cfa(state)) {
    if (!set_cfa(state.cfa, &result)) return result;
  } else if (!set_cfa_from_stack_pointer(state, &result)) {
    return result.reason = Inexpressible::stack_pointer_rule, result;
  }
  if (!set_return(state, slots, cie, &row)) return result.reason = Inexpressible::no_return_rule, result;
  for (size_t i = 0; i < saved_.size(); i++) {
    auto value = value_of(state.regs[i], saved_[i], INT16_MAX);
    if (!value) result.lost_register = true, value = Value{ValueKind::undefined};
    row.saved[i] = {static_cast<int16_t>(value->offset), value->kind};
  }
  return result;
}

}  // namespace sonde::host
