// The registers of one frame, by DWARF number, with a bit for each that is known. A register whose bit is clear has no
// meaning and is never read. Signal-safe, header only.
#pragma once

#include <cstdint>

#include "core/base/addr.h"
#include "core/isa/aarch64.h"
#include "core/isa/x86_64.h"

namespace sonde {

template <class Isa>
struct RegSet {
  uint64_t valid = 0;
  uint64_t value[Isa::kRegs];

  bool has(unsigned reg) const { return reg < Isa::kRegs && (valid >> reg & 1); }
  uint64_t get(unsigned reg) const { return value[reg]; }
  void set(unsigned reg, uint64_t v) { value[reg] = v, valid |= uint64_t{1} << reg; }
  void forget(unsigned reg) { valid &= ~(uint64_t{1} << reg); }
  Addr pc() const { return Addr(value[Isa::kPc]); }
  Addr sp() const { return Addr(value[Isa::kSp]); }
};

}  // namespace sonde
