// DWARF expressions as far as call frame information may hold them (DWARF 5 sections 2.5 and 6.4.2), evaluated within
// fixed bounds: no loop runs on, no stack grows, nothing outside of the bytes is read. Signal-safe.
#pragma once

#include <cstdint>
#include <span>

#include "core/base/addr.h"
#include "core/base/result.h"

namespace sonde {

constexpr unsigned kMaxExpressionStack = 32, kMaxExpressionSteps = 512;

// The frame an expression is about: its registers and a way to its memory.
struct ExpressionFrame {
  const uint64_t* registers;  // by DWARF number
  uint64_t valid;             // bit per register
  unsigned register_count;
  void* memory;
  bool (*read)(void* memory, Addr address, uint64_t* value);
};

// The value on top of the stack at the end. `initial`, where not null, is pushed first (DWARF: the CFA, for all rules but
// the CFA's own). Errors: not_found: a register is not known; unreadable; malformed: detail = offset of the operation;
// exhausted: a bound was reached.
Result<uint64_t> evaluate(std::span<const uint8_t> expression, const ExpressionFrame& frame, const uint64_t* initial);

// Whether evaluate() knows every operation and register in it, and no jump leads outside.
bool expression_is_known(std::span<const uint8_t> expression, unsigned register_count);

}  // namespace sonde
