// Errors in host/: a sentence that says what was wrong, where, and what to do. Context is put in front once on the way
// up; only cli/main.cc prints.
#pragma once

#include <expected>
#include <string>
#include <utility>

#include "core/base/result.h"

namespace sonde::host {

struct Error {
  std::string message;
  int exit_status = 1;  // 1: failed, 2: the command was wrong, 3: a stack is not reliable
};

template <class T>
using Result = std::expected<T, Error>;

inline std::unexpected<Error> fail(std::string message, int exit_status = 1) {
  return std::unexpected(Error{std::move(message), exit_status});
}
// "open /x: No such file or directory" from errno.
std::unexpected<Error> fail_errno(std::string what);
// A core error in words: "malformed at 0x12".
std::string describe(const sonde::Error& error);

// expression's value; on error returns it with "context: " in front.
#define SONDE_TRY_CONTEXT(expression, context) \
  ({ \
    auto&& sonde_result_ = (expression); \
    if (!sonde_result_) { \
      auto sonde_error_ = std::move(sonde_result_).error(); \
      sonde_error_.message = std::string(context) + ": " + sonde_error_.message; \
      return std::unexpected(std::move(sonde_error_)); \
    } \
    *std::move(sonde_result_); \
  })

}  // namespace sonde::host
