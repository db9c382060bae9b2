// What .eh_frame says about where code begins and ends, for files without symbols and as a check on symbols. Only the
// ranges and the state at their first instruction are read here; host/tables compiles the rows.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "core/base/addr.h"

namespace sonde::host {

struct FdeRange {
  ImageRange range;
  // At the first instruction the return address is where a call leaves it and nothing is saved yet: a call may enter
  // here. False for cold parts, signal return code and code whose return address is undefined.
  bool entry_state;
};

// Sorted, non-overlapping. Reading stops at the first malformed entry: what was read before it is kept.
// Format: LSB 5.0 Core, 10.6.1 "The .eh_frame section"; DWARF 5, 6.4.
std::vector<FdeRange> read_fde_ranges(std::span<const uint8_t> eh_frame, ImageAddr address, uint16_t machine);

}  // namespace sonde::host
