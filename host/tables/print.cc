#include "host/tables/print.h"

#include <fmt/format.h>

#include "core/base/cursor.h"
#include "core/isa/aarch64.h"
#include "core/isa/x86_64.h"

namespace sonde::host {
namespace {

constexpr uint32_t kMachineAarch64 = 183;

// One operation, its operand in the form that DWARF 5 table 7.9 gives it.
std::string format_operation(Cursor& at) {
  static constexpr const char* kStack[] = {"dup", "drop", "over", "pick", "swap", "rot"};  // 0x12..
  static constexpr const char* kMath[] = {
      "abs",  "and",         "div", "minus", "mod",  "mul", "neg", "not", "or",  // 0x19..
      "plus", "plus_uconst", "shl", "shr",   "shra", "xor", "bra", "eq",  "ge", "gt", "le", "lt", "ne", "skip"};
  uint8_t op = at.read<uint8_t>();
  if (op >= 0x30 && op <= 0x4f) return fmt::format("lit{}", op - 0x30);
  if (op >= 0x70 && op <= 0x8f) return fmt::format("breg{} {}", op - 0x70, at.sleb());
  if (op == 0x15) return fmt::format("pick {}", at.read<uint8_t>());
  if (op >= 0x12 && op <= 0x17) return kStack[op - 0x12];
  if (op == 0x23) return fmt::format("plus_uconst {}", at.uleb());
  if (op == 0x28 || op == 0x2f) return fmt::format("{} {}", kMath[op - 0x19], at.read<int16_t>());
  if (op >= 0x19 && op <= 0x2e) return kMath[op - 0x19];
  switch (op) {
    case 0x06: return "deref";
    case 0x08: return fmt::format("const {}", at.read<uint8_t>());
    case 0x09: return fmt::format("const {}", at.read<int8_t>());
    case 0x0a: return fmt::format("const {}", at.read<uint16_t>());
    case 0x0b: return fmt::format("const {}", at.read<int16_t>());
    case 0x0c: return fmt::format("const {}", at.read<uint32_t>());
    case 0x0d: return fmt::format("const {}", at.read<int32_t>());
    case 0x0e: return fmt::format("const {}", at.read<uint64_t>());
    case 0x0f: return fmt::format("const {}", at.read<int64_t>());
    case 0x10: return fmt::format("const {}", at.uleb());
    case 0x11: return fmt::format("const {}", at.sleb());
    case 0x92: {
      uint64_t reg = at.uleb();
      return fmt::format("breg{} {}", reg, at.sleb());
    }
    case 0x94: return fmt::format("deref_size {}", at.read<uint8_t>());
    case 0x96: return "nop";
  }
  at.skip(at.left());
  return fmt::format("op {:#x} ...", op);
}

std::string format_value(const Table& table, ValueKind kind, int32_t offset) {
  switch (kind) {
    case ValueKind::same: return "same";
    case ValueKind::at_cfa: return fmt::format("[cfa{:+}]", offset);
    case ValueKind::cfa_plus: return fmt::format("cfa{:+}", offset);
    case ValueKind::in_register: return register_name(table.header().machine, static_cast<unsigned>(offset));
    case ValueKind::at_expression:
      return fmt::format("[({})]", format_expression(table.expression(static_cast<uint32_t>(offset))));
    case ValueKind::is_expression:
      return fmt::format("({})", format_expression(table.expression(static_cast<uint32_t>(offset))));
    case ValueKind::undefined: return "lost";
  }
  return "?";
}

}  // namespace

std::string register_name(uint32_t machine, unsigned number) {
  static constexpr const char* kX86[] = {"rax", "rdx", "rcx", "rbx", "rsi", "rdi", "rbp", "rsp", "r8",
                                         "r9",  "r10", "r11", "r12", "r13", "r14", "r15", "rip"};
  if (machine != kMachineAarch64) return number < X86_64::kRegs ? kX86[number] : fmt::format("r{}", number);
  if (number == Aarch64::sp) return "sp";
  if (number == Aarch64::pc) return "pc";
  return fmt::format("{}{}", number < 31 ? "x" : "r", number);
}

std::string format_expression(std::span<const uint8_t> expression) {
  std::string out;
  for (Cursor at(expression); at.left();) {
    if (!out.empty()) out += "; ";
    out += format_operation(at);
  }
  return out;
}

std::string format_row(const Table& table, const Row* row) {
  if (!row) return "gap";
  std::string flags;
  if (row->flags & kRowSignalFrame) flags += " signal-frame";
  if (row->flags & kRowRaSigned) flags += " ra-signed";
  if (row->flags & kRowRefuted) flags += " refuted";
  if (row->flags & kRowInexpressible) return "inexpressible" + flags;
  if (row->ra_kind == ValueKind::undefined) return "outermost" + flags;
  uint32_t machine = table.header().machine;
  std::string cfa;
  if (row->cfa_kind == CfaKind::expression) {
    cfa = fmt::format("({})", format_expression(table.expression(static_cast<uint32_t>(row->cfa_offset))));
  } else {
    cfa = fmt::format("{}{:+}", register_name(machine, row->cfa_reg), row->cfa_offset);
    if (row->cfa_kind == CfaKind::deref_reg_offset) cfa = "[" + cfa + "]";
  }
  std::string out = fmt::format(
      "cfa={} ra={}", cfa, row->ra_kind == ValueKind::same ? "x30" : format_value(table, row->ra_kind, row->ra_offset));
  std::span<const uint8_t> saved =
      machine == kMachineAarch64 ? std::span<const uint8_t>(Aarch64::kSaved) : std::span<const uint8_t>(X86_64::kSaved);
  for (size_t i = 0; i < saved.size(); i++)
    if (row->saved[i].kind != ValueKind::same)
      out += fmt::format(" {}={}", register_name(machine, saved[i]),
                         format_value(table, row->saved[i].kind, row->saved[i].offset));
  return out + flags;
}

}  // namespace sonde::host
