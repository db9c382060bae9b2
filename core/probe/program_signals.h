// What the program itself wants done with SIGTRAP, while the engine's handler stands in the kernel's table: kept in
// AgentControl::program_trap and carried out here as the kernel would (signal(7), kernel/signal.c). Signal-safe.
#pragma once

namespace sonde {

// A SIGTRAP that is not the engine's: the program's handler, default action or ignoring. Called within the handler.
void forward_trap(int signal, void* info, void* context);

}  // namespace sonde
