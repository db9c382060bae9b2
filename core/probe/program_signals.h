// What the program itself wants done with SIGTRAP, while the engine's handler stands in the kernel's table: kept in
// AgentControl::program_trap and carried out here as the kernel would (signal(7), kernel/signal.c). Signal-safe.
#pragma once

#include "core/probe/signal_abi.h"

namespace sonde {

// A SIGTRAP that is not the engine's: held while the program blocks it, else its handler, default action or ignoring. Called
// within the engine's handler.
void forward_trap(SignalInfo* info, SignalContext* context);

}  // namespace sonde
