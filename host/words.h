// Words of messages.
#pragma once

#include <cstdint>
#include <string>

namespace sonde::host {

// The noun behind a number: "call", "calls". `many` only where it is not one + "s".
inline std::string plural(uint64_t n, const std::string& one, const std::string& many = "") {
  return n == 1 ? one : many.empty() ? one + "s" : many;
}

}  // namespace sonde::host
