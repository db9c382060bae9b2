// The SFrame section, versions 1 (binutils 2.40) and 2 (The SFrame Format, Version 2): per function the CFA, the return
// address and the frame pointer at each place, nothing else: other registers are lost. Trusts nothing in the bytes: a header
// that contradicts itself or the section is refused with its reason, a function that does gives no rows.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/base/addr.h"
#include "core/unwind/row.h"
#include "host/error.h"

namespace sonde::host {

struct SFrameSection {
  std::span<const uint8_t> bytes;
  ImageAddr address;  // of the section's first byte
};

struct SFrameFunction {
  ImageRange range;
  uint32_t first_entry = 0, entries = 0;  // bytes from the first row entry; count
  uint8_t address_size = 1;  // of a row entry's place: 1, 2 or 4 bytes
  uint32_t repeat = 0;  // not 0: the code is blocks of so many bytes, rows are those of each block (linkage stubs)
};

struct SFrameRow {
  uint32_t offset;  // from the function's or the block's beginning
  bool expressible;  // false: the section says something that no row holds
  Row row;
};

class SFrame {
 public:
  // The reason why the section is not read, or its functions in their order.
  static Result<SFrame> open(const SFrameSection& section, uint32_t machine);

  std::span<const SFrameFunction> functions() const { return functions_; }
  // Rows in ascending order, the first at offset 0. False: they contradict themselves or lie outside.
  bool rows(const SFrameFunction& function, std::vector<SFrameRow>* out) const;

 private:
  Result<void> read_functions(std::span<const uint8_t> table, uint32_t count, uint32_t rows, ImageAddr table_address);
  SFrameRow make_row(uint8_t info, std::span<const int32_t> offsets) const;

  SFrameSection section_;
  uint32_t machine_ = 0;
  uint8_t version_ = 0, flags_ = 0;
  int8_t fixed_fp_ = 0, fixed_ra_ = 0;  // from the CFA; 0: not fixed
  std::span<const uint8_t> entries_;
  std::vector<SFrameFunction> functions_;
};

}  // namespace sonde::host
