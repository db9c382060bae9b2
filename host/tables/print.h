// Rows and expressions as people read them: "cfa=rbp+16 ra=[cfa-8] rbp=[cfa-16]".
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "core/unwind/table.h"

namespace sonde::host {

// "rsp", "x29"; "r99" for a number that has no name.
std::string register_name(uint32_t machine, unsigned number);
// "breg6 -8; deref"
std::string format_expression(std::span<const uint8_t> expression);
// "gap" for null. Registers that keep their value are left out.
std::string format_row(const Table& table, const Row* row);

}  // namespace sonde::host
