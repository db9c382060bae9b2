// What a register or a slot of the stack holds, as far as it follows from a function's entry. The symbols:
//
//   CFA          the caller's stack pointer behind the call; at entry rsp = CFA - 8
//   entry(r)     what register r held at entry
//   return       the return address, at entry in [CFA - 8]
//   base(pc)     a stack address made at pc whose distance from the CFA is not known: rsp aligned or moved by a variable
//   constant     also an address of the image
//   tables       an entry of a jump table
#pragma once

#include <cstdint>

namespace sonde::host::check {

// Registers by their numbers in machine code.
enum : uint8_t { rax, rcx, rdx, rbx, rsp, rbp, rsi, rdi, r8, r9, r10, r11, r12, r13, r14, r15, kNone = 0xff };
constexpr unsigned kRegs = 16;
constexpr uint16_t kCalleeSaved = 1u << rbx | 1u << rbp | 1u << r12 | 1u << r13 | 1u << r14 | 1u << r15;
constexpr bool is_callee_saved(unsigned reg) { return kCalleeSaved >> reg & 1; }

enum Symbol : uint32_t {
  kCfa = 0,
  kEntry = 1,  // + register
  kReturn = kEntry + kRegs,
  kConstant,
  kOffsetTable,  // an entry of the table of 4-byte offsets at `plus`
  kPointerTable,  // of the table of addresses at `plus`
  kBase,  // + pc, from the start of the image
};

struct Value {
  enum Kind : uint8_t {
    exact,  // symbol `of` + plus
    target,  // address `of` + an entry of the table of 4-byte offsets at `plus`
    made,  // neither a callee-saved register's entry value, nor the return address, nor an address of this stack
    blur,  // the same, but it may be an address of this stack
    top,  // anything
  };
  Kind kind = top;
  uint32_t of = 0;
  int64_t plus = 0;

  bool operator==(const Value&) const = default;
  bool is(uint32_t symbol) const { return kind == exact && of == symbol; }
  bool is(uint32_t symbol, int64_t offset) const { return is(symbol) && plus == offset; }
  bool is_base() const { return kind == exact && of >= kBase; }
  bool is_frame() const { return is(kCfa) || is_base(); }  // a known place of this stack
  // Something of the caller's that has to be kept.
  bool is_kept() const {
    return kind == exact && (of == kReturn || (of >= kEntry && of < kEntry + kRegs && is_callee_saved(of - kEntry)));
  }
};

constexpr Value exactly(uint32_t symbol, int64_t plus = 0) { return {Value::exact, symbol, plus}; }
constexpr Value constant(int64_t n) { return exactly(kConstant, n); }
constexpr Value entry_of(unsigned reg) { return exactly(kEntry + reg); }
constexpr Value kMade{Value::made, 0, 0}, kBlur{Value::blur, 0, 0}, kTop{Value::top, 0, 0};

// The least that is true of both.
Value join(const Value& a, const Value& b);
// What an operation makes of two values when nothing more is known of it.
Value mix(const Value& a, const Value& b);
Value plus(const Value& value, int64_t distance);

}  // namespace sonde::host::check
