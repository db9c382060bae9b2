// What is known at one place of a function: sixteen registers and the words of this stack that hold more than data. The
// checker's rules about memory stand here:
//
//   - A word of this frame that nothing was stored to holds nothing of the caller's.
//   - A store through an address that is not known changes no word that is followed: arrays do not overlap saved registers.
//   - A call destroys what lies below its stack pointer, keeps the callee-saved registers, and may change all others.
//   - Where something of the caller's was stored outside of this stack, a load from there may bring it back.
#pragma once

#include <array>
#include <vector>

#include "host/check/op.h"
#include "host/check/value.h"

namespace sonde::host::check {

struct Slot {  // eight bytes at symbol `of` + at
  uint32_t of;
  int32_t at;
  Value value;
  bool operator==(const Slot&) const = default;
};

class State {
 public:
  std::array<Value, kRegs> reg{};

  static State at_entry();
  // Entered by a return: its slot has been taken off the stack already. Who may have come by which address is not known.
  static State at_return();

  void apply(const Op& op);
  // A called function has returned; op is the call.
  void return_from_call();
  // The word that a call pushes is on the stack.
  void push_return_address();

  Value address(const Memory& memory) const;
  Value load(const Value& address) const;
  Value load(const Memory& memory) const;

  void join(const State& other);
  bool operator==(const State&) const = default;

  std::span<const Slot> slots() const { return slots_; }
  // The value is an address below CFA + n.
  bool is_below_cfa(const Value& value, int64_t n) const;

 private:
  Value read_slot(uint32_t of, int64_t at) const;
  void write_slot(uint32_t of, int64_t at, const Value& value);
  Value untouched(uint32_t of, int64_t at) const;
  void store(const Value& address, unsigned size, const Value& value);
  void set(uint8_t reg, const Value& value);
  void push(const Value& value);
  Value pop();
  Value scaled(const Op& op);
  // A base for what comes of `from`, which is at most that, or of unknown order.
  Value new_base(uint64_t pc, const Value& from, bool at_most);

  std::vector<Slot> slots_;  // sorted; only those that differ from untouched()
  int64_t called_at_ = INT64_MIN;  // words below CFA + this may have been written by callees
  struct Limit {
    uint32_t of;  // a base
    int64_t at_most;  // from the CFA
    bool operator==(const Limit&) const = default;
  };
  std::vector<Limit> limits_;  // sorted
  uint32_t leaked_ = 0;  // bit r: a caller's value was stored where entry(r) leads; kLeakedAnywhere
};

}  // namespace sonde::host::check
