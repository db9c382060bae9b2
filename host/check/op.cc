// See op.h. Operands, also the hidden ones, and what is done with them come from Zydis.
#include "host/check/op.h"

#include <algorithm>

#include "host/plan/decoder.h"

namespace sonde::host::check {
namespace {

uint8_t number(ZydisRegister reg) {
  ZydisRegister whole = ZydisRegisterGetLargestEnclosing(ZYDIS_MACHINE_MODE_LONG_64, reg);
  bool general = whole >= ZYDIS_REGISTER_RAX && whole <= ZYDIS_REGISTER_R15;
  return general ? static_cast<uint8_t>(whole - ZYDIS_REGISTER_RAX) : uint8_t{kNone};
}

bool is_register(const ZydisDecodedOperand& op) { return op.type == ZYDIS_OPERAND_TYPE_REGISTER; }
bool is_memory(const ZydisDecodedOperand& op) { return op.type == ZYDIS_OPERAND_TYPE_MEMORY; }
bool is_immediate(const ZydisDecodedOperand& op) { return op.type == ZYDIS_OPERAND_TYPE_IMMEDIATE; }
// A general register of 64 bits.
bool is_whole(const ZydisDecodedOperand& op) {
  return is_register(op) && op.size == 64 && number(op.reg.value) != kNone;
}
bool is_word(const ZydisDecodedOperand& op) { return is_memory(op) && op.size == 64; }

Memory memory_of(const ZydisDecodedOperand& op, uint64_t next) {
  Memory m;
  m.elsewhere = op.mem.segment == ZYDIS_REGISTER_FS || op.mem.segment == ZYDIS_REGISTER_GS;
  m.disp = op.mem.disp.has_displacement ? op.mem.disp.value : 0;
  if (op.mem.base == ZYDIS_REGISTER_RIP) m.disp += static_cast<int64_t>(next);
  else m.base = number(op.mem.base);
  m.index = number(op.mem.index);
  m.scale = op.mem.scale;
  // Addresses of 32 bits and gathers by vector: no place of the stack.
  bool odd = (op.mem.base != ZYDIS_REGISTER_NONE && op.mem.base != ZYDIS_REGISTER_RIP && m.base == kNone) ||
             (op.mem.index != ZYDIS_REGISTER_NONE && m.index == kNone);
  m.elsewhere |= odd;
  return m;
}

class Decoder {
 public:
  Decoder(const ZydisDecodedInstruction& z, const ZydisDecodedOperand* ops, Op& out) : z_(z), ops_(ops), out_(out) {}

  void run() {
    if (out_.flow == Flow::call || out_.flow == Flow::call_indirect) {
      out_.act = Act::call;
      return;
    }
    if (out_.flow == Flow::jump_indirect) {
      out_.indirect_memory = is_memory(ops_[0]);
      if (out_.indirect_memory) out_.memory = memory_of(ops_[0], out_.next());
      else out_.from = number(ops_[0].reg.value);
      return;
    }
    for (int i = 0; i < z_.operand_count; i++) note(ops_[i]);
    if (out_.writes == Content::unknown && out_.size == 8 && !has_vector()) out_.writes = Content::made;
    act();
    if (out_.act == Act::none) return;
    // What the act says is not said twice.
    uint16_t done = 0;
    if (out_.to != kNone) done |= static_cast<uint16_t>(1u << out_.to);
    if (out_.act == Act::exchange) done |= static_cast<uint16_t>(1u << out_.from);
    if (out_.act >= Act::push && out_.act <= Act::leave) done |= 1u << rsp;
    if (out_.act == Act::leave) done |= 1u << rbp;
    out_.mixed &= static_cast<uint16_t>(~done), out_.narrow &= static_cast<uint16_t>(~done);
  }

 private:
  void note(const ZydisDecodedOperand& op) {
    bool writes = op.actions & ZYDIS_OPERAND_ACTION_MASK_WRITE, reads = op.actions & ZYDIS_OPERAND_ACTION_MASK_READ;
    if (is_register(op)) {
      uint8_t n = number(op.reg.value);
      if (n == kNone) return;
      uint16_t bit = static_cast<uint16_t>(1u << n);
      bool partial = op.size < 32 || op.actions & ZYDIS_OPERAND_ACTION_CONDWRITE;
      if (reads || (writes && partial)) out_.read |= bit;
      if (writes) (op.size == 32 && !partial ? out_.narrow : out_.mixed) |= bit;
    } else if (is_memory(op)) {
      if (op.mem.type == ZYDIS_MEMOP_TYPE_AGEN) {
        if (uint8_t base = number(op.mem.base); base != kNone) out_.read |= static_cast<uint16_t>(1u << base);
        if (uint8_t index = number(op.mem.index); index != kNone) out_.read |= static_cast<uint16_t>(1u << index);
      } else if (writes && op.visibility != ZYDIS_OPERAND_VISIBILITY_HIDDEN) {
        out_.memory = memory_of(op, out_.next());
        out_.size = static_cast<uint8_t>(std::min<unsigned>(op.size / 8, 64));
        out_.writes = op.size < 64 ? Content::made : Content::unknown;
      } else if (reads && op.visibility != ZYDIS_OPERAND_VISIBILITY_HIDDEN && op.size >= 64) {
        reads_memory_ = true;
      }
    }
  }

  // Vector registers may carry words that general ones have held.
  bool has_vector() const {
    for (int i = 0; i < z_.operand_count; i++) {
      if (!is_register(ops_[i])) continue;
      ZydisRegisterClass group = ZydisRegisterGetClass(ops_[i].reg.value);
      if (group == ZYDIS_REGCLASS_XMM || group == ZYDIS_REGCLASS_YMM || group == ZYDIS_REGCLASS_ZMM ||
          group == ZYDIS_REGCLASS_MMX || group == ZYDIS_REGCLASS_MASK)
        return true;
    }
    return false;
  }

  void set_to(const ZydisDecodedOperand& op) { out_.to = number(op.reg.value); }
  void add_immediate(int64_t sign) {
    out_.act = Act::move, out_.from = out_.to;
    out_.value = sign * ops_[1].imm.value.s;
  }

  void act() {
    switch (z_.mnemonic) {
      case ZYDIS_MNEMONIC_PUSH: return push();
      case ZYDIS_MNEMONIC_PUSHFQ: out_.act = Act::push, out_.writes = Content::none; return;
      case ZYDIS_MNEMONIC_POP: return pop();
      case ZYDIS_MNEMONIC_POPFQ: out_.act = Act::pop; return;
      case ZYDIS_MNEMONIC_PUSHF:
      case ZYDIS_MNEMONIC_POPF:
      case ZYDIS_MNEMONIC_ENTER: out_.act = Act::lose_stack; return;
      case ZYDIS_MNEMONIC_LEAVE: out_.act = Act::leave; return;
      case ZYDIS_MNEMONIC_MOV: return move();
      case ZYDIS_MNEMONIC_MOVSXD:
        if (is_whole(ops_[0]) && is_memory(ops_[1])) {
          out_.act = Act::load_offset, set_to(ops_[0]);
          out_.memory = memory_of(ops_[1], out_.next());
        }
        return;
      case ZYDIS_MNEMONIC_LEA: return lea();
      case ZYDIS_MNEMONIC_ADD:
      case ZYDIS_MNEMONIC_SUB: return add(z_.mnemonic == ZYDIS_MNEMONIC_ADD ? 1 : -1);
      case ZYDIS_MNEMONIC_INC:
      case ZYDIS_MNEMONIC_DEC:
        if (!is_whole(ops_[0])) return;
        set_to(ops_[0]);
        out_.act = Act::move, out_.from = out_.to, out_.value = z_.mnemonic == ZYDIS_MNEMONIC_INC ? 1 : -1;
        return;
      case ZYDIS_MNEMONIC_AND:
        if (is_whole(ops_[0]) && is_immediate(ops_[1])) {
          set_to(ops_[0]);
          out_.act = Act::align, out_.from = out_.to, out_.value = ops_[1].imm.value.s;
        }
        return;
      case ZYDIS_MNEMONIC_XOR: return zero();
      case ZYDIS_MNEMONIC_OR:
        // or $0: a barrier or a stack probe, nothing changes.
        if (is_memory(ops_[0]) && is_immediate(ops_[1]) && ops_[1].imm.value.u == 0) out_.writes = Content::none;
        return;
      case ZYDIS_MNEMONIC_XCHG: return exchange();
      case ZYDIS_MNEMONIC_SYSCALL: out_.narrow |= 1u << rax; return;
      default: break;
    }
    if (z_.meta.category != ZYDIS_CATEGORY_CMOV) return odd();
    if (!is_whole(ops_[0])) return;
    out_.act = Act::choose, set_to(ops_[0]);
    if (is_whole(ops_[1])) out_.from = number(ops_[1].reg.value);
  }

  // An operation that is not followed. A word of memory in it may be an address of the stack.
  void odd() {
    if (reads_memory_ && out_.mixed) out_.read |= 1u << rsp;
  }

  void exchange() {
    if (is_whole(ops_[0]) && is_whole(ops_[1])) {
      out_.act = Act::exchange, set_to(ops_[0]), out_.from = number(ops_[1].reg.value);
    } else if (is_word(ops_[0]) || is_word(ops_[1])) {
      out_.act = Act::choose, set_to(is_memory(ops_[0]) ? ops_[1] : ops_[0]);
      out_.writes = Content::unknown;
    }
  }

  void push() {
    if (z_.operand_width != 64) return void(out_.act = Act::lose_stack);
    out_.act = Act::push, out_.writes = Content::none;
    if (is_memory(ops_[0])) out_.act = Act::push_memory, out_.memory = memory_of(ops_[0], out_.next());
    if (is_register(ops_[0])) out_.from = number(ops_[0].reg.value);
  }

  void pop() {
    if (z_.operand_width != 64) return void(out_.act = Act::lose_stack);
    out_.act = Act::pop, out_.writes = Content::none;
    if (is_memory(ops_[0])) out_.act = Act::pop_memory, out_.memory = memory_of(ops_[0], out_.next());
    if (is_register(ops_[0])) out_.to = number(ops_[0].reg.value);
  }

  void move() {
    if (is_whole(ops_[0])) {
      set_to(ops_[0]);
      if (is_memory(ops_[1])) {
        out_.act = Act::load, out_.memory = memory_of(ops_[1], out_.next());
      } else if (is_immediate(ops_[1])) {
        out_.act = Act::set, out_.value = ops_[1].imm.value.s;
      } else if (is_whole(ops_[1])) {
        out_.act = Act::move, out_.from = number(ops_[1].reg.value);
      } else {
        out_.to = kNone;
      }
    } else if (is_register(ops_[0]) && ops_[0].size == 32 && number(ops_[0].reg.value) != kNone &&
               is_immediate(ops_[1])) {
      out_.act = Act::set, set_to(ops_[0]), out_.value = static_cast<uint32_t>(ops_[1].imm.value.u);
    } else if (is_word(ops_[0]) && is_whole(ops_[1])) {
      out_.writes = Content::from, out_.from = number(ops_[1].reg.value);
    }
  }

  void lea() {
    if (ops_[0].size != 64) return;
    set_to(ops_[0]);
    Memory m = memory_of(ops_[1], out_.next());
    out_.value = m.disp;
    if (m.elsewhere) {
      out_.to = kNone;
    } else if (m.base == kNone && m.index == kNone) {
      out_.act = Act::set;
    } else if (m.index == kNone) {
      out_.act = Act::move, out_.from = m.base;
    } else {
      out_.act = Act::scaled, out_.from = m.base, out_.other = m.index, out_.scale = static_cast<int8_t>(m.scale);
    }
  }

  void add(int8_t sign) {
    if (is_memory(ops_[0]) && is_immediate(ops_[1]) && ops_[1].imm.value.u == 0)
      return void(out_.writes = Content::none);
    if (!is_whole(ops_[0])) return sign < 0 ? zero() : odd();
    if (is_immediate(ops_[1])) {
      set_to(ops_[0]);
      return add_immediate(sign);
    }
    if (!is_whole(ops_[1])) return odd();
    if (sign < 0 && ops_[0].reg.value == ops_[1].reg.value) return zero();
    set_to(ops_[0]);
    out_.act = Act::scaled, out_.from = out_.to, out_.other = number(ops_[1].reg.value), out_.scale = sign;
  }

  // A register less itself.
  void zero() {
    if (!is_register(ops_[0]) || !is_register(ops_[1]) || ops_[0].reg.value != ops_[1].reg.value || ops_[0].size < 32)
      return;
    if (number(ops_[0].reg.value) == kNone) return;
    out_.act = Act::set, set_to(ops_[0]), out_.value = 0;
  }

  const ZydisDecodedInstruction& z_;
  const ZydisDecodedOperand* ops_;
  Op& out_;
  bool reads_memory_ = false;
};

}  // namespace

std::optional<Op> decode_op(std::span<const uint8_t> bytes, uint64_t pc) {
  auto insn = decode(bytes, pc);
  if (!insn) return std::nullopt;
  Op out;
  out.pc = pc, out.length = insn->length, out.flow = insn->flow;
  if (is_direct(insn->flow)) out.target = insn->target;
  if (insn->flow == Flow::call) out.act = Act::call;
  if (insn->flow == Flow::counted)
    out.narrow = 0, out.mixed = insn->bytes[0] == 0xe3 ? 0 : 1u << rcx, out.read = 1u << rcx;
  // Control comes back to the target with all else as it is here.
  if (insn->flow == Flow::transaction) out.narrow = 1u << rax;
  if (insn->nop || is_direct(insn->flow) || insn->flow == Flow::ret || insn->flow == Flow::stop) return out;
  ZydisDecodedInstruction z;
  ZydisDecodedOperand ops[ZYDIS_MAX_OPERAND_COUNT];
  if (!ZYAN_SUCCESS(ZydisDecoderDecodeFull(&decoder(), bytes.data(), bytes.size(), &z, ops))) return std::nullopt;
  Decoder(z, ops, out).run();
  return out;
}

std::string format_insn(std::span<const uint8_t> bytes, uint64_t pc) {
  static const ZydisFormatter formatter = [] {
    ZydisFormatter made;
    ZydisFormatterInit(&made, ZYDIS_FORMATTER_STYLE_ATT);
    return made;
  }();
  ZydisDecodedInstruction z;
  ZydisDecodedOperand ops[ZYDIS_MAX_OPERAND_COUNT];
  char text[128];
  if (!ZYAN_SUCCESS(ZydisDecoderDecodeFull(&decoder(), bytes.data(), bytes.size(), &z, ops)) ||
      !ZYAN_SUCCESS(ZydisFormatterFormatInstruction(&formatter, &z, ops, z.operand_count_visible, text, sizeof text, pc,
                                                    nullptr)))
    return "(bad)";
  return text;
}

}  // namespace sonde::host::check
