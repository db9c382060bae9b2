// One instruction reduced to what it does to the stack pointer, to copies of it and to the memory they lead to: what
// hijack.cc asks about the return slot.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "host/plan/insn.h"

namespace sonde::host {

constexpr uint8_t kNoRegister = 0xff, kRsp = 4, kRbp = 5;  // registers by their numbers in machine code

enum class Effect : uint8_t {
  none,
  push,      // sp -= value
  pop,       // to = *sp, sp += value
  copy,      // to = from
  add,       // to = from + value
  mix,       // to = something near `from`: alignment, variable offsets
  load,      // to = *access
  leave,     // sp = bp, pop bp
};

struct StackOp {
  uint64_t target = 0;     // of direct transfers
  int64_t value = 0;
  int64_t disp = 0;        // of the memory access
  Flow flow = Flow::next;
  Effect effect = Effect::none;
  uint8_t length = 0;
  uint8_t to = kNoRegister, from = kNoRegister;
  uint8_t base = kNoRegister;  // of an explicit memory access without index register; kNoRegister: none such
  uint8_t size = 0;            // bytes accessed
  bool reads = false, writes = false;
  uint16_t pops = 0;           // ret imm16
  uint16_t written = 0;        // registers that get other values, bit per register
};

std::optional<StackOp> stack_op(std::span<const uint8_t> bytes, uint64_t pc);

}  // namespace sonde::host
