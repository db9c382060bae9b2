// SONDE_CHECK: an invariant, checked in every build. What happens on failure is decided by who links core/: the host
// prints and aborts (host/check.cc), the agent records the reason, disarms and lets the program live (agent/check.cc).
#pragma once

namespace sonde {
[[gnu::cold]] void check_failed(const char* file, int line, const char* condition);
}

#define SONDE_CHECK(condition) \
  (__builtin_expect(!!(condition), 1) ? (void)0 : ::sonde::check_failed(__FILE_NAME__, __LINE__, #condition))
