#include "tests/probe/programs.h"

namespace sonde::test {

Harness& the_harness() {
  static Harness harness;
  return harness;
}

SONDE_HOOKABLE int stop_inside(int x) {
  if (x > 0) the_harness().set_state(SessionState::stopped);
  return x + 1;
}

}  // namespace sonde::test
