// A table with the rows that the checker refuted marked as such (kRowRefuted): the same answers everywhere, and walks
// that use a marked one are unreliable.
#pragma once

#include <span>
#include <vector>

#include "core/unwind/table.h"
#include "host/error.h"

namespace sonde::host {

// `refuted`: sorted by begin. Gaps stay gaps. An error if the marked rows are too many for one table.
Result<std::vector<uint8_t>> mark_refuted(const Table& table, std::span<const ImageRange> refuted);

}  // namespace sonde::host
