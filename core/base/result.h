// Errors in core/: eight bytes, no text, so that Result<Addr> returns in registers and nothing allocates. host/error.h
// has the form with text. Signal-safe, header only.
#pragma once

#include <cstdint>
#include <expected>
#include <utility>

namespace sonde {

enum class ErrorCode : uint32_t {
  truncated = 1,    // input ends before the structure does; detail: offset
  malformed,        // input contradicts itself; detail: offset
  unsupported,      // a valid form that is not handled; detail: which
  out_of_range,     // an index or address outside its container; detail: index
  unreadable,       // memory of the target cannot be read; detail: low 32 bits of the address
  exhausted,        // a fixed pool is empty; detail: its capacity
  not_found,
};

struct Error {
  ErrorCode code;
  uint32_t detail = 0;
  constexpr bool operator==(const Error&) const = default;
};

template <class T>
using Result = std::expected<T, Error>;

constexpr std::unexpected<Error> fail(ErrorCode code, uint64_t detail = 0) {
  return std::unexpected(Error{code, static_cast<uint32_t>(detail)});
}

}  // namespace sonde

// The value of a Result, or return its error from the enclosing function.
#define SONDE_TRY(...) \
  ({ \
    auto&& sonde_result_ = (__VA_ARGS__); \
    if (!sonde_result_) return std::unexpected(std::move(sonde_result_).error()); \
    *std::move(sonde_result_); \
  })
// The same for Result<void>.
#define SONDE_TRY_VOID(...) \
  do { \
    auto&& sonde_result_ = (__VA_ARGS__); \
    if (!sonde_result_) return std::unexpected(std::move(sonde_result_).error()); \
  } while (0)
