// Which unwinder is at work: its functions, by the image that its code lies in. Several may be in one process (libgcc_s,
// one linked statically, LLVM's, another in a plug-in opened RTLD_LOCAL), and each understands only its own contexts.
#pragma once

#include <cstdint>

#include "core/probe/control.h"

namespace sonde {

// The functions of the unwinder whose code holds `address`: those that the host resolved (AgentControl::unwinders), else
// looked up once by name in that image's dynamic symbols through the loader's list. Null: not found. Takes no lock.
const UnwinderFunctions* find_unwinder(uint64_t address);

}  // namespace sonde
