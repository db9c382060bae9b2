// AArch64 facts (Procedure Call Standard AAPCS64 section 6; DWARF for the Arm 64-bit Architecture table 1). Plain data,
// compiled on every machine.
#pragma once

#include <array>
#include <cstdint>

namespace sonde {

struct Aarch64 {
  // DWARF register numbers: x0..x30 = 0..30, sp = 31, pc = 32.
  enum Reg : uint8_t {
    x0 = 0,
    x7 = 7,
    x18 = 18,
    x19 = 19,
    x20,
    x21,
    x22,
    x23,
    x24,
    x25,
    x26,
    x27,
    x28,
    x29,
    x30,
    sp = 31,
    pc = 32
  };
  static constexpr unsigned kRegs = 33;
  static constexpr uint8_t kRaSignState = 34;
  static constexpr Reg kPc = pc, kSp = sp, kFp = x29;
  // Registers that an unwind row may recover, beside pc and sp.
  static constexpr std::array<uint8_t, 12> kSaved = {x29, x30, x19, x20, x21, x22, x23, x24, x25, x26, x27, x28};
  static constexpr bool kReturnInRegister = true;  // `bl` leaves it in x30
  static constexpr Reg kLastArgument = x7;
  static constexpr int kRedZone = 0;
};

}  // namespace sonde
