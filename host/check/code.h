// An image's code, decoded: one part per function, cold part or label, and where its jump tables begin.
#pragma once

#include <optional>
#include <vector>

#include "host/check/op.h"
#include "host/image/image.h"

namespace sonde::host::check {

struct Part {
  uint32_t function;  // of Image::functions()
  uint64_t begin, end;
  bool entry;         // calls enter at `begin`; of unnamed code only if something calls it or holds its address
  std::vector<Op> ops;  // ascending; ends early where the bytes are no instructions

  Op* find(uint64_t pc);
};

class Code {
 public:
  explicit Code(const Image& image);

  std::vector<Part>& parts() { return parts_; }
  // Instructions inside parts that direct calls enter, ascending: as in an interpreter that is one function for its table.
  const std::vector<uint64_t>& inner_entries() const { return inner_entries_; }
  // The part that holds pc, or null.
  Part* part_at(uint64_t pc);
  std::span<const uint8_t> bytes(uint64_t from) const;  // to the end of its segment; empty outside

  enum class Table : uint8_t { offsets, addresses };
  // Where the entries of the table at `at` lead, offsets being from `base`, for a jump in `within`: it ends where an entry
  // leads to no instruction of this function, or where another table begins.
  std::vector<uint64_t> table_targets(uint64_t at, Table kind, uint64_t base, const Part& within);

 private:
  void decode_part(Part& part);
  void find_entries();

  const Image& image_;
  std::vector<Part> parts_;  // sorted
  std::vector<uint64_t> inner_entries_;
  std::vector<uint64_t> referred_;  // addresses of data that the code names; sorted
};

}  // namespace sonde::host::check
