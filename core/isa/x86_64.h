// x86-64 facts (System V psABI 1.0, sections 3.2 and 3.6; Intel SDM volume 2). Plain data, compiled on every machine.
#pragma once

#include <array>
#include <cstdint>

namespace sonde {

struct X86_64 {
  // DWARF register numbers (psABI figure 3.36).
  enum Reg : uint8_t { rax, rdx, rcx, rbx, rsi, rdi, rbp, rsp, r8, r9, r10, r11, r12, r13, r14, r15, rip };
  static constexpr unsigned kRegs = 17;
  static constexpr Reg kPc = rip, kSp = rsp, kFp = rbp;
  // Registers that a function preserves and an unwind row may recover, beside pc and sp.
  static constexpr std::array<uint8_t, 6> kSaved = {rbp, rbx, r12, r13, r14, r15};
  static constexpr bool kReturnInRegister = false;  // `call` pushes the return address
  static constexpr int kRedZone = 128;
};

}  // namespace sonde
