// The forms of a moved instruction (T = target, R = original return address):
//
//   jmp T           e9 T                         or  ff 25 0 T:64
//   jcc T           0f 8c T                      or  7(c^1) +14; ff 25 0 T:64
//   loop/jrcxz T    e2 +2; eb +5; e9 T           (the jump form above, skipped when not taken)
//   xbegin T        c7 f8 T
//   call T          68 R.lo; c7 44 24 04 R.hi; e9 T      push sign-extends, the second store sets the upper half
//   call *m         68 R.lo; c7 44 24 04 R.hi; jmp *m    m's displacement + 8 where it is based on rsp
//   ... d(%rip)     same bytes, d adjusted
//   all others      same bytes
// Neither push nor mov touches flags; nothing below the new sp is written.
#include "host/plan/relocate.h"

#include <algorithm>

namespace sonde::host {
namespace {

constexpr int kAbsoluteJump = 14;  // ff 25 disp32 addr64

struct Operand {  // what a moved indirect call needs to know of its r/m
  bool memory, rsp_based, rsp_indexed_base;
};

uint8_t modrm(const Insn& insn) { return insn.bytes[insn.modrm_offset]; }

Operand operand_of(const Insn& insn) {
  uint8_t m = modrm(insn);
  Operand op{.memory = (m >> 6) != 3, .rsp_based = false, .rsp_indexed_base = false};
  if (op.memory && (m & 7) == 4) {
    uint8_t sib = insn.bytes[insn.modrm_offset + 1];
    bool rex_b = insn.modrm_offset >= 2 && (insn.bytes[insn.modrm_offset - 2] & 0xf1) == 0x41;
    op.rsp_based = (sib & 7) == 4 && !rex_b;
    op.rsp_indexed_base = op.rsp_based && ((sib >> 3 & 7) != 4);
  }
  return op;
}

int32_t displacement(const Insn& insn) {
  if (insn.disp_size == 1) return static_cast<int8_t>(insn.bytes[insn.disp_offset]);
  int32_t d = 0;
  for (int i = 0; i < insn.disp_size; i++)
    d |= static_cast<int32_t>(uint32_t{insn.bytes[insn.disp_offset + i]} << (8 * i));
  return d;
}

bool has_operand_size_prefix(const Insn& insn) {
  for (int i = 0; i + 1 < insn.modrm_offset; i++)
    if (insn.bytes[i] == 0x66) return true;
  return false;
}

// call *%rsp and operands that the pushed return address could overwrite have no copy.
bool can_move_indirect_call(const Insn& insn) {
  if (insn.address32 || insn.modrm_offset == 0 || has_operand_size_prefix(insn)) return false;
  Operand op = operand_of(insn);
  uint8_t m = modrm(insn);
  if (!op.memory) {
    bool rex_b = insn.modrm_offset >= 2 && (insn.bytes[insn.modrm_offset - 2] & 0xf1) == 0x41;
    return rex_b || (m & 7) != 4;
  }
  return !op.rsp_based || (!op.rsp_indexed_base && displacement(insn) >= 0);
}

void push_return_address(const Insn& insn, CodeBuffer& out, std::vector<InnerStep>* inner) {
  uint64_t ra = insn.next();
  out.append({0x68});
  out.append32(ra);
  if (inner) inner->push_back({5, 8});
  out.append({0xc7, 0x44, 0x24, 0x04});
  out.append32(ra >> 32);
  if (inner) inner->push_back({13, 8});
}

// `bytes`: the copy, whose distance to the target stands at `offset`.
Moved move_pc_relative(const Insn& insn, CodeBuffer& out, std::array<uint8_t, 15> bytes, uint8_t offset) {
  int64_t disp = static_cast<int64_t>(insn.target - (out.here() + insn.length));
  if (!fits32(disp)) return Moved::out_of_reach;
  for (int i = 0; i < 4; i++) bytes[offset + i] = static_cast<uint8_t>(static_cast<uint64_t>(disp) >> (8 * i));
  out.append({bytes.data(), insn.length});
  return Moved::yes;
}

Moved move_indirect_call(const Insn& insn, CodeBuffer& out, std::vector<InnerStep>* inner) {
  push_return_address(insn, out, inner);
  auto bytes = insn.bytes;
  bytes[insn.modrm_offset] = static_cast<uint8_t>((modrm(insn) & 0xc7) | 4 << 3);  // ff /2 -> ff /4
  if (insn.pc_relative_memory) return move_pc_relative(insn, out, bytes, insn.disp_offset);
  if (!operand_of(insn).rsp_based) return out.append({bytes.data(), insn.length}), Moved::yes;
  bytes[insn.modrm_offset] = static_cast<uint8_t>((bytes[insn.modrm_offset] & 0x3f) | 0x80);  // disp32
  out.append({bytes.data(), static_cast<size_t>(insn.modrm_offset) + 2});
  out.append32(static_cast<uint32_t>(displacement(insn) + 8));
  return Moved::yes;
}

void move_branch(const Insn& insn, CodeBuffer& out, std::vector<InnerStep>* inner) {
  int64_t rel = static_cast<int64_t>(insn.target - (out.here() + 6));
  if (fits32(rel)) {
    out.append({0x0f, static_cast<uint8_t>(0x80 | insn.condition)});
    return out.append32(static_cast<uint64_t>(rel));
  }
  out.append({static_cast<uint8_t>(0x70 | (insn.condition ^ 1)), kAbsoluteJump, 0xff, 0x25});
  out.append32(0);
  out.append64(insn.target);
  if (inner) inner->push_back({2, 0});
}

void move_counted(const Insn& insn, CodeBuffer& out, std::vector<InnerStep>* inner) {
  auto bytes = insn.bytes;
  bytes[insn.length - 1] = 2;
  out.append({bytes.data(), insn.length});
  size_t skip = out.size();
  out.append({0xeb, 0});
  if (inner) inner->push_back({insn.length, 0}), inner->push_back({static_cast<uint8_t>(insn.length + 2), 0});
  out.jump(insn.target);
  out.bytes()[skip + 1] = static_cast<uint8_t>(out.size() - skip - 2);
}

}  // namespace

void CodeBuffer::jump(uint64_t target) {
  int64_t rel = static_cast<int64_t>(target - (here() + 5));
  if (fits32(rel)) {
    append({0xe9});
    append32(static_cast<uint64_t>(rel));
  } else {
    append({0xff, 0x25});
    append32(0);
    append64(target);
  }
}

bool can_move(const Insn& insn) {
  switch (insn.flow) {
    case Flow::trap:
    case Flow::strange: return false;
    case Flow::call_indirect: return can_move_indirect_call(insn);
    case Flow::transaction: return insn.imm_size == 4;
    case Flow::jump:
    case Flow::branch:
    case Flow::call: {
      // A 66 prefix makes processors disagree about the operand size of a near branch.
      uint8_t opcode_bytes = insn.flow == Flow::branch && insn.imm_size == 4 ? 2 : 1;
      return std::find(insn.bytes.begin(), insn.bytes.begin() + insn.imm_offset - opcode_bytes, 0x66) ==
             insn.bytes.begin() + insn.imm_offset - opcode_bytes;
    }
    default: return !(insn.pc_relative_memory && insn.address32);
  }
}

Moved move_insn(const Insn& insn, CodeBuffer& out, std::vector<InnerStep>* inner) {
  if (!can_move(insn)) return Moved::cannot;
  switch (insn.flow) {
    case Flow::jump: return out.jump(insn.target), Moved::yes;
    case Flow::branch: return move_branch(insn, out, inner), Moved::yes;
    case Flow::transaction: return move_pc_relative(insn, out, insn.bytes, insn.imm_offset);
    case Flow::counted: return move_counted(insn, out, inner), Moved::yes;
    case Flow::call: return push_return_address(insn, out, inner), out.jump(insn.target), Moved::yes;
    case Flow::call_indirect: return move_indirect_call(insn, out, inner);
    default: break;
  }
  if (insn.pc_relative_memory) return move_pc_relative(insn, out, insn.bytes, insn.disp_offset);
  out.append(insn.code());
  return Moved::yes;
}

}  // namespace sonde::host
