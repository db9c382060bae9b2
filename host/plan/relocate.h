// Moving an instruction: a copy elsewhere that does what the original does where it stands. A moved call leaves the
// original return address, so that no address of a detour is ever on a stack; the callee returns to the original code.
#pragma once

#include <cstdint>
#include <vector>

#include "host/plan/insn.h"

namespace sonde::host {

// Machine code that will stand at `base`.
class CodeBuffer {
 public:
  explicit CodeBuffer(uint64_t base) : base_(base) {}
  uint64_t here() const { return base_ + bytes_.size(); }
  size_t size() const { return bytes_.size(); }
  std::vector<uint8_t>& bytes() { return bytes_; }

  void append(std::initializer_list<uint8_t> bytes) { bytes_.insert(bytes_.end(), bytes); }
  void append(std::span<const uint8_t> bytes) { bytes_.insert(bytes_.end(), bytes.begin(), bytes.end()); }
  void append32(uint64_t value) {
    for (int i = 0; i < 4; i++) bytes_.push_back(static_cast<uint8_t>(value >> (8 * i)));
  }
  void append64(uint64_t value) { append32(value), append32(value >> 32); }
  // jmp to any address: e9 rel32 where it reaches, else ff 25 with the address behind it.
  void jump(uint64_t target);

 private:
  uint64_t base_;
  std::vector<uint8_t> bytes_;
};

inline bool fits32(int64_t value) { return value == static_cast<int32_t>(value); }

// An instruction boundary inside a copy that takes several instructions: bytes from the copy's start, and what to add to
// sp there to get the sp that the original instruction would see.
struct InnerStep {
  uint8_t offset;
  int8_t sp_adjust;
};

enum class Moved : uint8_t { yes, cannot, out_of_reach };

// Whether some copy exists. Says nothing about reach.
bool can_move(const Insn& insn);
// Appends the copy. On failure `out` may hold part of it.
Moved move_insn(const Insn& insn, CodeBuffer& out, std::vector<InnerStep>* inner);

}  // namespace sonde::host
