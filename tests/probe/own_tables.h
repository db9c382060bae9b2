// The tables of the test program's own images, as the host makes them for a target. For programs that link the host.
#pragma once

#include "core/unwind/arena.h"

namespace sonde::test {

// Made at the first call, when all images are loaded, the agent among them.
const TableArena* own_arena();

}  // namespace sonde::test
