// Zydis in, Insn out. Intel SDM volume 2, chapter 2 for the fields; appendix A for which opcodes transfer control.
#include "host/plan/insn.h"

#include "host/plan/decoder.h"

#include <cstring>

namespace sonde::host {
namespace {

Flow flow_of(const ZydisDecodedInstruction& z) {
  bool far = z.meta.branch_type == ZYDIS_BRANCH_TYPE_FAR;
  bool relative = z.raw.imm[0].is_relative;
  switch (z.mnemonic) {
    case ZYDIS_MNEMONIC_JMP: return far ? Flow::strange : relative ? Flow::jump : Flow::jump_indirect;
    case ZYDIS_MNEMONIC_CALL: return far ? Flow::strange : relative ? Flow::call : Flow::call_indirect;
    case ZYDIS_MNEMONIC_RET: return far ? Flow::strange : Flow::ret;
    case ZYDIS_MNEMONIC_LOOP:
    case ZYDIS_MNEMONIC_LOOPE:
    case ZYDIS_MNEMONIC_LOOPNE:
    case ZYDIS_MNEMONIC_JRCXZ:
    case ZYDIS_MNEMONIC_JECXZ: return Flow::counted;
    case ZYDIS_MNEMONIC_UD0:
    case ZYDIS_MNEMONIC_UD1:
    case ZYDIS_MNEMONIC_UD2:
    case ZYDIS_MNEMONIC_HLT: return Flow::stop;
    case ZYDIS_MNEMONIC_INT3:
    case ZYDIS_MNEMONIC_INT1:
    case ZYDIS_MNEMONIC_INTO: return Flow::trap;
    case ZYDIS_MNEMONIC_IRET:
    case ZYDIS_MNEMONIC_IRETD:
    case ZYDIS_MNEMONIC_IRETQ:
    case ZYDIS_MNEMONIC_SYSENTER:
    case ZYDIS_MNEMONIC_SYSEXIT:
    case ZYDIS_MNEMONIC_SYSRET:
    case ZYDIS_MNEMONIC_RSM: return Flow::strange;
    case ZYDIS_MNEMONIC_XBEGIN: return Flow::transaction;
    // Zydis counts these among the branches, for they may end a transaction.
    case ZYDIS_MNEMONIC_XEND:
    case ZYDIS_MNEMONIC_XABORT: return Flow::next;
    default: break;
  }
  if (z.meta.category == ZYDIS_CATEGORY_COND_BR) return relative ? Flow::branch : Flow::strange;
  return relative ? Flow::strange : Flow::next;
}

}  // namespace

std::optional<Insn> decode(std::span<const uint8_t> bytes, uint64_t pc) {
  ZydisDecodedInstruction z;
  if (bytes.empty() ||
      !ZYAN_SUCCESS(ZydisDecoderDecodeInstruction(&decoder(), nullptr, bytes.data(), bytes.size(), &z)))
    return std::nullopt;
  Insn insn;
  insn.pc = pc;
  insn.length = z.length;
  std::memcpy(insn.bytes.data(), bytes.data(), z.length);
  insn.flow = flow_of(z);
  insn.nop = z.mnemonic == ZYDIS_MNEMONIC_NOP;
  insn.landing_pad = z.mnemonic == ZYDIS_MNEMONIC_ENDBR64;
  insn.address32 = z.address_width == 32;
  if (z.attributes & ZYDIS_ATTRIB_HAS_MODRM) {
    insn.modrm_offset = z.raw.modrm.offset;
    insn.pc_relative_memory = z.raw.modrm.mod == 0 && z.raw.modrm.rm == 5;
    insn.disp_offset = z.raw.disp.offset;
    insn.disp_size = z.raw.disp.size / 8;
  }
  insn.imm_offset = z.raw.imm[0].offset;
  insn.imm_size = z.raw.imm[0].size / 8;
  if (insn.flow == Flow::branch) insn.condition = z.opcode & 15;
  if (insn.flow == Flow::ret) insn.pops = insn.imm_size ? static_cast<uint16_t>(z.raw.imm[0].value.u) : 0;
  if (is_direct(insn.flow)) insn.target = insn.next() + static_cast<uint64_t>(z.raw.imm[0].value.s);
  else if (insn.pc_relative_memory) insn.target = insn.next() + static_cast<uint64_t>(z.raw.disp.value);
  return insn;
}

}  // namespace sonde::host
