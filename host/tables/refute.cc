// The rows in their old order with marked copies behind them, and the changes that lead to them.
#include "host/tables/refute.h"

#include <algorithm>

#include "core/base/check.h"
#include "host/tables/builder.h"

namespace sonde::host {

Result<std::vector<uint8_t>> mark_refuted(const Table& table, std::span<const ImageRange> refuted) {
  const TableHeader& header = table.header();
  TableBuilder builder(header.machine);
  // In their old order, so that the numbers in rows stay true.
  for (uint32_t i = 0; i < header.expression_count; i++) {
    auto number = builder.expression(table.expression(i));
    if (!number || *number != static_cast<int16_t>(i)) return fail("unwind table: an expression stands there twice");
  }
  for (const Row& row : table.rows())
    if (!builder.row(row)) return fail("unwind table: too many distinct rows");

  std::vector<RowChange> changes;
  bool full = false;
  auto number_of = [&](const Row* row, bool wrong) {
    if (!row) return kGapRow;
    Row marked = *row;
    if (wrong) marked.flags |= kRowRefuted;
    auto number = builder.row(marked);
    full |= !number;
    return number.value_or(kGapRow);
  };
  size_t next = 0;
  table.for_each([&](ImageAddr begin, ImageAddr end, const Row* row) {
    changes.push_back({begin.value, number_of(row, false)});
    for (; next < refuted.size() && refuted[next].begin < end; next++) {
      ImageRange part{std::max(refuted[next].begin, begin), std::min(refuted[next].end, end)};
      if (part.begin < part.end) {
        changes.push_back({part.begin.value, number_of(row, true)});
        if (part.end < end) changes.push_back({part.end.value, number_of(row, false)});
      }
      if (refuted[next].end > end) break;  // goes on behind this run
    }
  });
  if (full) return fail("unwind table: too many distinct rows");
  return builder.finish(changes, header.base + header.span);
}

}  // namespace sonde::host
