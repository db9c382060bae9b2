// The table of an image as walks use it. Where a file shows by a few bytes that its rows cannot be right, as interpreters written
// in assembly do that describe all of their functions by one row, it is checked once, and the rows that are refuted are marked.
#pragma once

#include "host/tables/cache.h"

namespace sonde::host {

// Whether somewhere a prologue, pushes and then `sub $n,%rsp`, makes just the frame that the row in force claims from its first
// instruction to its last: there the stack pointer cannot be where the row says. x86-64 only. Linear in the code, no decoding.
bool contradicts_a_prologue(const Image& image, const Table& table);

// As load_table(), and kept in the same cache.
Result<SharedTable> load_proven_table(const Image& image, const std::string& folder = table_cache_folder());

}  // namespace sonde::host
