// Packs rows into the bytes of core/unwind/table.h. Sources of rows (eh_frame.h) intern their rows and expressions here and
// give the list of changes at the end.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/unwind/table.h"
#include "host/error.h"

namespace sonde::host {

// From `address` on this row (or kGapRow) is in force, until the next change. Addresses are canonical: bits from 47 on are
// equal.
struct RowChange {
  RowChange(uint64_t address, uint16_t row) : address_(static_cast<int64_t>(address)), row(row) {}
  uint64_t address() const { return static_cast<uint64_t>(int64_t{address_}); }
  static bool holds(uint64_t address) { return RowChange(address, 0).address() == address; }

 private:
  int64_t address_ : 48;

 public:
  uint64_t row : 16;
};
static_assert(sizeof(RowChange) == 8);

class TableBuilder {
 public:
  explicit TableBuilder(uint32_t machine);

  // Number of a row, equal rows once. Without value when 65,535 distinct rows are there.
  std::optional<uint16_t> row(const Row& row);
  const Row& row(uint16_t number) const { return rows_[number]; }
  size_t row_count() const { return rows_.size(); }
  // Number of an expression, equal ones once. Without value when the numbers of SavedReg::offset are used up.
  std::optional<int16_t> expression(std::span<const uint8_t> bytes);
  std::span<const uint8_t> expression(int32_t number) const;

  // The table for changes sorted by address; changes at one address: the last one counts. Nothing is covered before the
  // first change or from `end` on. Rows that no change leads to are left out. An error says what does not fit.
  Result<std::vector<uint8_t>> finish(std::span<const RowChange> changes, uint64_t end);
  // How many of the changes given to finish() lead to each row, by its number; behind the last one: to gaps.
  std::span<const uint32_t> uses() const { return uses_; }

 private:
  uint32_t machine_;
  std::vector<Row> rows_;
  std::vector<uint16_t> buckets_;  // open addressing by hash, kGapRow: free
  std::map<std::string, int16_t, std::less<>> expression_numbers_;
  std::vector<std::string> expressions_;
  std::vector<uint32_t> uses_;
};

}  // namespace sonde::host
