// For test programs that link core/ alone: a failed invariant ends the test.
#include <cstdio>
#include <cstdlib>

#include "core/base/check.h"

namespace sonde {
void check_failed(const char* file, int line, const char* condition) {
  std::fprintf(stderr, "%s:%d: %s does not hold\n", file, line, condition);
  std::abort();
}
}  // namespace sonde
