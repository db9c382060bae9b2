// The system call instructions of an image, and which of them the agent has to see: those that change or report how
// signals are handled, and those that may forbid system calls. Linear decoding of the functions that hold the bytes of the
// instruction; a number is known if a constant goes into eax in the same straight line.
//
// Only what control can arrive at counts as one, by what is known to lead somewhere (targets.h): data among the code must
// not be patched. Where that cannot be decided, in code without a function or behind bytes that do not decode, it is
// doubtful.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "host/plan/code_view.h"
#include "host/plan/targets.h"

namespace sonde::host {

struct SystemCall {
  uint64_t at;  // of the instruction, in the target
  CodeRange code;  // the function that holds it, or the gap between two
  std::optional<uint32_t> number;  // none: anything
};

struct SystemCalls {
  std::vector<SystemCall> found;  // by address
  std::vector<uint64_t> doubtful;
};

// Adds to `targets` what the functions with system calls in them reach. Without targets, which are dear for a large image,
// no number is known, and all such are doubtful.
SystemCalls find_system_calls(const CodeView& view, Targets* targets);

// Whether the agent must see it. Without a number: yes.
bool is_minded(std::optional<uint32_t> number);

}  // namespace sonde::host
