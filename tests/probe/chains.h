// Six functions that call each other, and a recursive one, all hookable; at the innermost a callback looks at the stack.
#pragma once

#include "tests/probe/programs.h"

namespace sonde::test {

constexpr unsigned kChain = 6;
extern void (*at_the_leaf)();

// Hooks the six and the recursive one (disabled); site numbers: 0..5 the six, 6 the recursive one.
const uint32_t* hook_chain();
// Enables exactly the sites of the set bits.
void enable_subset(unsigned mask);

// Calls the first of the six; its result tells that all six ran and returned in order.
int run_chain();
constexpr int kChainResult = 0x654321;
// Recursion to that depth.
int run_deep(int depth);

}  // namespace sonde::test
