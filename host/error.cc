#include "host/error.h"

#include <fmt/format.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "core/base/check.h"

namespace sonde {
// In the host an invariant that does not hold ends the process: nothing it would print afterwards could be believed.
void check_failed(const char* file, int line, const char* condition) {
  std::fprintf(stderr, "sonde: internal error: %s:%d: %s does not hold\n", file, line, condition);
  std::abort();
}
}  // namespace sonde

namespace sonde::host {

std::unexpected<Error> fail_errno(std::string what) {
  int saved = errno;
  return fail(fmt::format("{}: {}", what, std::strerror(saved)));
}

std::string describe(const sonde::Error& error) {
  switch (error.code) {
    case ErrorCode::truncated: return fmt::format("truncated at offset {:#x}", error.detail);
    case ErrorCode::malformed: return fmt::format("malformed at offset {:#x}", error.detail);
    case ErrorCode::unsupported: return fmt::format("unsupported form {:#x}", error.detail);
    case ErrorCode::out_of_range: return fmt::format("{} is out of range", error.detail);
    case ErrorCode::unreadable: return fmt::format("memory at ...{:08x} cannot be read", error.detail);
    case ErrorCode::exhausted: return fmt::format("all {} in use", error.detail);
    case ErrorCode::not_found: return "not found";
  }
  return fmt::format("error {}", static_cast<unsigned>(error.code));
}

}  // namespace sonde::host
