// For tests: hand-written functions with everything that is hard to patch, and a way to run one on chosen registers.
// The code is position-independent and lies in one block that tests copy to where they patch it.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace sonde::host::test {

struct TestFunction {
  const char* name;
  uint64_t begin, end;  // bytes from the block's start
};

std::span<const uint8_t> code_block();
std::vector<TestFunction> test_functions();  // sorted
// Fills in the pointers that the block's data holds, for a block that stands at `base`.
void bind_pointers(uint8_t* block, uint64_t base);

struct MachineState {
  uint64_t reg[16];  // rax rcx rdx rbx rsp rbp rsi rdi r8..r15; rsp out only
  uint64_t flags;
  bool operator==(const MachineState&) const = default;
};
// Calls `function` on the given stack top with these registers and flags; gives back what it leaves.
MachineState run(uint64_t function, const MachineState& in, uint64_t stack_top);

// An entry trampoline that only counts: its address, and hits by site number.
uint64_t counting_entry();
extern "C" uint64_t plan_test_hits[65536];

}  // namespace sonde::host::test
