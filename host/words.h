// Words of messages.
#pragma once

#include <cstdint>
#include <string>

namespace sonde::host {

// The noun behind a number: "call", "calls". `many` only where it is not one + "s".
inline std::string plural(uint64_t n, const std::string& one, const std::string& many = "") {
  return n == 1 ? one : many.empty() ? one + "s" : many;
}

// "1 call", "3 calls".
inline std::string counted(uint64_t n, const std::string& one, const std::string& many = "") {
  return std::to_string(n) + " " + plural(n, one, many);
}

}  // namespace sonde::host
