// One decoded x86-64 instruction, reduced to what planning asks: how long, where control goes next, and which of its
// bytes depend on where it stands. Decoding is Zydis's; nothing else in host/plan knows Zydis, save hijack.cc, which
// looks at operands.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>

namespace sonde::host {

enum class Flow : uint8_t {
  next,           // the following instruction
  jump,           // direct jmp
  branch,         // direct jcc
  counted,        // loop, loope, loopne, jrcxz, jecxz: rel8 only
  transaction,    // xbegin: goes on, or comes out at its target
  call,           // direct call
  jump_indirect,
  call_indirect,
  ret,
  stop,           // ud0 ud1 ud2 hlt: not expected to go on
  trap,           // int3, int1, into
  strange,        // far transfers, iret, sysenter, sysret: never moved
};

struct Insn {
  uint64_t pc = 0;
  uint64_t target = 0;   // of direct transfers; address of a pc-relative memory operand
  std::array<uint8_t, 15> bytes{};
  uint8_t length = 0;
  Flow flow = Flow::next;
  bool pc_relative_memory = false;
  bool nop = false;      // does nothing but take time (pause and endbr64 are none)
  bool landing_pad = false;  // endbr64
  bool address32 = false;    // 67 prefix
  uint8_t condition = 0;     // low four bits of a jcc opcode
  uint8_t disp_offset = 0, disp_size = 0;  // of the memory operand, in bytes
  uint8_t modrm_offset = 0;                // 0: none
  uint8_t imm_offset = 0, imm_size = 0;    // of the first immediate, in bytes
  uint16_t pops = 0;                       // ret imm16

  uint64_t next() const { return pc + length; }
  std::span<const uint8_t> code() const { return {bytes.data(), length}; }
};

// Control never goes on to the following instruction.
constexpr bool ends_flow(Flow flow) {
  return flow == Flow::jump || flow == Flow::jump_indirect || flow == Flow::ret || flow == Flow::stop;
}
constexpr bool is_direct(Flow flow) {
  return flow == Flow::jump || flow == Flow::branch || flow == Flow::counted || flow == Flow::transaction ||
         flow == Flow::call;
}

// The instruction at the start of `bytes`, which stand at pc; nothing if they are none.
std::optional<Insn> decode(std::span<const uint8_t> bytes, uint64_t pc);

// A filler as compilers and linkers put between functions: nop forms and int3.
inline bool is_padding(const Insn& insn) { return insn.nop || insn.bytes[0] == 0xcc; }

}  // namespace sonde::host
