// What the tests of this folder share.
#pragma once

#include "core/native/ticks.h"
#include "tests/probe/harness.h"

namespace sonde::test {

// One engine for all tests of a process: an agent cannot be unloaded from under returns that still lead through it.
Harness& the_harness();

// Stops the recording if x > 0; x + 1.
int stop_inside(int x);

}  // namespace sonde::test
