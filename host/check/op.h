// One instruction as the checker executes it: what it does to the general registers and to eight-byte words of memory.
// Decoding is Zydis's; only op.cc knows it.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "host/check/value.h"
#include "host/plan/insn.h"

namespace sonde::host::check {

enum class Act : uint8_t {
  none,
  set,       // to = value
  move,      // to = from + value
  scaled,    // to = from + other * scale + value
  align,     // to = from & value
  load,      // to = *memory
  load_offset,  // to = sign-extended four bytes at memory
  push,      // rsp -= 8, *rsp = from; of kNone: something made here
  push_memory,
  pop,       // to = *rsp, rsp += 8
  pop_memory,
  leave,     // rsp = rbp, pop rbp
  exchange,  // to and from
  choose,    // to = to or from; or anything where from is kNone
  call,      // of the function; also an indirect one
  lose_stack,  // rsp becomes what cannot be followed
};

struct Memory {
  int64_t disp = 0;     // absolute where neither base nor index are there
  uint8_t base = kNone, index = kNone, scale = 1;
  bool elsewhere = false;  // by a segment register
};

enum class Content : uint8_t { none, made, unknown, from };  // what is written to `memory`; from: register `from`

struct Op {
  uint64_t pc = 0, target = 0;  // target: of direct transfers
  int64_t value = 0;
  Memory memory;
  Flow flow = Flow::next;
  Act act = Act::none;
  uint8_t length = 0;
  uint8_t to = kNone, from = kNone, other = kNone;
  int8_t scale = 1;
  Content writes = Content::none;
  uint8_t size = 0;  // bytes written
  bool indirect_memory = false;  // an indirect jump through `memory`; otherwise through `from`
  bool leader = false;           // something jumps here
  // Registers that get other values than `act` says: whole ones made of what is in `read`, or four bytes or less of data.
  uint16_t read = 0, mixed = 0, narrow = 0;

  uint64_t next() const { return pc + length; }
};

std::optional<Op> decode_op(std::span<const uint8_t> bytes, uint64_t pc);
// "push %rbx"
std::string format_insn(std::span<const uint8_t> bytes, uint64_t pc);

}  // namespace sonde::host::check
