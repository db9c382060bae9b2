// One row, executed: from the registers of a frame to those of its caller. No policy: whether the result is believed is
// decided by core/walk. Signal-safe.
//
//   caller's sp = CFA, caller's pc = RA, kSaved registers by their rules; every other register is lost, as a call may
//   change it. A register whose rule cannot be carried out (slot unreadable, another register not known) is lost too.
#pragma once

#include <concepts>
#include <cstdint>

#include "core/isa/regset.h"
#include "core/unwind/expression.h"
#include "core/unwind/row.h"
#include "core/unwind/table.h"

namespace sonde {

// Reads eight bytes at an address of the target; false if they cannot be read.
template <class M>
concept MemoryReader = requires(M& memory, Addr address, uint64_t* value) {
  { memory.read(address, value) } -> std::same_as<bool>;
};

enum class StepStatus : uint8_t {
  ok,
  outermost,  // the row says that nobody called this code
  inexpressible,  // kRowInexpressible
  register_unknown,  // CFA or RA needs a register without a value
  unreadable,  // CFA or RA needs memory that cannot be read
  bad_expression,  // CFA or RA needs an expression that fails
};

namespace step_detail {

template <class Memory>
bool read_through(void* memory, Addr address, uint64_t* value) {
  return static_cast<Memory*>(memory)->read(address, value);
}

constexpr StepStatus status_of(ErrorCode code) {
  return code == ErrorCode::not_found    ? StepStatus::register_unknown
         : code == ErrorCode::unreadable ? StepStatus::unreadable
                                         : StepStatus::bad_expression;
}

// Rules of one frame carried out over one reader.
template <class Isa, MemoryReader Memory>
struct Rules {
  const Table& table;
  const RegSet<Isa>& regs;
  Memory& memory;

  [[gnu::noinline]] StepStatus expression(uint32_t number, const uint64_t* cfa, uint64_t* value) const {
    ExpressionFrame frame{regs.value, regs.valid, Isa::kRegs, &memory, read_through<Memory>};
    auto result = evaluate(table.expression(number), frame, cfa);
    if (!result) return status_of(result.error().code);
    *value = *result;
    return StepStatus::ok;
  }

  StepStatus load(uint64_t address, uint64_t* value) const {
    return memory.read(Addr(address), value) ? StepStatus::ok : StepStatus::unreadable;
  }

  StepStatus cfa(const Row& row, uint64_t* value) const {
    if (row.cfa_kind == CfaKind::expression) return expression(static_cast<uint32_t>(row.cfa_offset), nullptr, value);
    if (!regs.has(row.cfa_reg)) return StepStatus::register_unknown;
    uint64_t sum = regs.get(row.cfa_reg) + static_cast<uint64_t>(int64_t{row.cfa_offset});
    if (row.cfa_kind == CfaKind::deref_reg_offset) return load(sum, value);
    *value = sum;
    return StepStatus::ok;
  }

  // `same` stands for register `self`.
  StepStatus value(ValueKind kind, int64_t offset, uint64_t cfa, unsigned self, uint64_t* out) const {
    switch (kind) {
      case ValueKind::at_cfa: return load(cfa + static_cast<uint64_t>(offset), out);
      case ValueKind::same:
      case ValueKind::in_register: {
        unsigned reg = kind == ValueKind::same ? self : static_cast<unsigned>(offset);
        if (!regs.has(reg)) return StepStatus::register_unknown;
        *out = regs.get(reg);
        return StepStatus::ok;
      }
      case ValueKind::cfa_plus: *out = cfa + static_cast<uint64_t>(offset); return StepStatus::ok;
      case ValueKind::is_expression: return expression(static_cast<uint32_t>(offset), &cfa, out);
      case ValueKind::at_expression: {
        uint64_t address;
        StepStatus status = expression(static_cast<uint32_t>(offset), &cfa, &address);
        return status == StepStatus::ok ? load(address, out) : status;
      }
      case ValueKind::undefined: break;
    }
    return StepStatus::register_unknown;
  }
};

// The register that holds the return address where a row says `same`.
template <class Isa>
constexpr unsigned return_register() {
  if constexpr (Isa::kReturnInRegister) return Isa::x30;
  else return Isa::kPc;
}

}  // namespace step_detail

// `row` must be a row of `table` in force at the frame's pc. `signature` are the bits of a return address that a
// pointer-authentication code may fill (AArch64; 0 elsewhere): cleared where the row says the address is signed.
// On `ok` *caller is complete; otherwise it is unspecified. caller may not be &regs.
template <class Isa, MemoryReader Memory>
StepStatus step(const Table& table, const Row& row, const RegSet<Isa>& regs, Memory& memory, uint64_t signature,
                RegSet<Isa>* caller) {
  if (row.flags & kRowInexpressible) return StepStatus::inexpressible;
  if (row.ra_kind == ValueKind::undefined) return StepStatus::outermost;
  step_detail::Rules<Isa, Memory> rules{table, regs, memory};
  uint64_t cfa, ra, value;
  if (StepStatus status = rules.cfa(row, &cfa); status != StepStatus::ok) return status;
  constexpr unsigned kReturn = step_detail::return_register<Isa>();
  if (StepStatus status = rules.value(row.ra_kind, row.ra_offset, cfa, kReturn, &ra); status != StepStatus::ok)
    return status;
  if (row.flags & kRowRaSigned) ra &= ~signature;

  caller->valid = 0;
  for (unsigned i = 0; i < Isa::kSaved.size(); i++) {
    const SavedReg& saved = row.saved[i];
    const unsigned reg = Isa::kSaved[i];
    if (rules.value(saved.kind, saved.offset, cfa, reg, &value) == StepStatus::ok) caller->set(reg, value);
  }
  caller->set(Isa::kSp, cfa);
  caller->set(Isa::kPc, ra);
  return StepStatus::ok;
}

}  // namespace sonde
