// See stack_op.h. Operands and their actions come from Zydis.
#include "host/plan/stack_op.h"

#include "host/plan/decoder.h"

#include <algorithm>

namespace sonde::host {
namespace {

uint8_t number(ZydisRegister reg) {
  ZydisRegister whole = ZydisRegisterGetLargestEnclosing(ZYDIS_MACHINE_MODE_LONG_64, reg);
  bool general = whole >= ZYDIS_REGISTER_RAX && whole <= ZYDIS_REGISTER_R15;
  return general ? static_cast<uint8_t>(whole - ZYDIS_REGISTER_RAX) : kNoRegister;
}

bool is_register(const ZydisDecodedOperand& op) { return op.type == ZYDIS_OPERAND_TYPE_REGISTER; }
bool is_whole_register(const ZydisDecodedOperand& op) {
  return is_register(op) && op.size == 64 && number(op.reg.value) != kNoRegister;
}
bool is_immediate(const ZydisDecodedOperand& op) { return op.type == ZYDIS_OPERAND_TYPE_IMMEDIATE; }
bool is_memory(const ZydisDecodedOperand& op) { return op.type == ZYDIS_OPERAND_TYPE_MEMORY; }

void note_operand(const ZydisDecodedOperand& op, StackOp& out) {
  bool writes = op.actions & ZYDIS_OPERAND_ACTION_MASK_WRITE, reads = op.actions & ZYDIS_OPERAND_ACTION_MASK_READ;
  if (is_register(op) && writes) {
    if (uint8_t n = number(op.reg.value); n != kNoRegister) out.written |= static_cast<uint16_t>(1u << n);
  } else if (is_memory(op) && op.mem.type == ZYDIS_MEMOP_TYPE_MEM && op.visibility != ZYDIS_OPERAND_VISIBILITY_HIDDEN &&
             op.mem.index == ZYDIS_REGISTER_NONE && op.mem.segment != ZYDIS_REGISTER_FS &&
             op.mem.segment != ZYDIS_REGISTER_GS) {
    out.base = number(op.mem.base);
    out.disp = op.mem.disp.has_displacement ? op.mem.disp.value : 0;
    out.size = static_cast<uint8_t>(std::min<unsigned>(op.size / 8, 255));
    out.reads |= reads, out.writes |= writes;
  }
}

void note_lea(const ZydisDecodedOperand* ops, StackOp& out) {
  out.to = number(ops[0].reg.value);
  uint8_t base = number(ops[1].mem.base), index = number(ops[1].mem.index);
  out.from = base != kNoRegister ? base : index;
  bool exact = ops[0].size == 64 && base != kNoRegister && index == kNoRegister;
  out.effect = out.from == kNoRegister ? Effect::none : exact ? Effect::add : Effect::mix;
  out.value = ops[1].mem.disp.has_displacement ? ops[1].mem.disp.value : 0;
}

void note_effect(const ZydisDecodedInstruction& z, const ZydisDecodedOperand* ops, StackOp& out) {
  auto two_registers = [&] { return is_whole_register(ops[0]) && is_whole_register(ops[1]); };
  switch (z.mnemonic) {
    case ZYDIS_MNEMONIC_PUSH:
    case ZYDIS_MNEMONIC_PUSHF:
    case ZYDIS_MNEMONIC_PUSHFQ: out.effect = Effect::push, out.value = z.operand_width / 8; return;
    case ZYDIS_MNEMONIC_POP:
    case ZYDIS_MNEMONIC_POPF:
    case ZYDIS_MNEMONIC_POPFQ:
      out.effect = Effect::pop, out.value = z.operand_width / 8;
      if (z.operand_count_visible > 0 && is_whole_register(ops[0])) out.to = number(ops[0].reg.value);
      return;
    case ZYDIS_MNEMONIC_LEAVE: out.effect = Effect::leave; return;
    case ZYDIS_MNEMONIC_LEA: return note_lea(ops, out);
    case ZYDIS_MNEMONIC_MOV:
      if (!is_whole_register(ops[0])) return;
      out.to = number(ops[0].reg.value);
      if (is_memory(ops[1])) out.effect = Effect::load;
      else if (two_registers()) out.effect = Effect::copy, out.from = number(ops[1].reg.value);
      return;
    case ZYDIS_MNEMONIC_ADD:
    case ZYDIS_MNEMONIC_SUB:
    case ZYDIS_MNEMONIC_AND:
      if (!is_whole_register(ops[0])) return;
      out.to = out.from = number(ops[0].reg.value);
      out.effect = Effect::mix;
      if (is_immediate(ops[1]) && z.mnemonic != ZYDIS_MNEMONIC_AND) {
        out.effect = Effect::add;
        out.value = z.mnemonic == ZYDIS_MNEMONIC_ADD ? ops[1].imm.value.s : -ops[1].imm.value.s;
      }
      return;
    case ZYDIS_MNEMONIC_OR:
      // or $0: a barrier or a stack probe, nothing is read or changed.
      if (is_memory(ops[0]) && is_immediate(ops[1]) && ops[1].imm.value.u == 0) out.base = kNoRegister;
      return;
    default: return;
  }
}

}  // namespace

std::optional<StackOp> stack_op(std::span<const uint8_t> bytes, uint64_t pc) {
  auto insn = decode(bytes, pc);
  if (!insn) return std::nullopt;
  StackOp out;
  out.length = insn->length, out.flow = insn->flow, out.pops = insn->pops;
  if (is_direct(insn->flow)) {
    out.target = insn->target;
    return out;  // conditions and calls change no register that is followed here (calls: see hijack.cc)
  }
  if (insn->nop || insn->flow == Flow::ret) return out;
  ZydisDecodedInstruction z;
  ZydisDecodedOperand ops[ZYDIS_MAX_OPERAND_COUNT];
  if (!ZYAN_SUCCESS(ZydisDecoderDecodeFull(&decoder(), bytes.data(), bytes.size(), &z, ops))) return std::nullopt;
  for (int i = 0; i < z.operand_count; i++) note_operand(ops[i], out);
  note_effect(z, ops, out);
  if (out.flow != Flow::next) out.written = 0;  // the push and what a callee changes: see hijack.cc
  return out;
}

}  // namespace sonde::host
