// The program's signal handlers. The kernel is given an entrance of the agent's in each handler's place, one per handler:
// which one it is told tells the handler, so nothing has to be kept in step with the kernel's table, however the program
// changes it, in whatever thread or child that shares the memory.
//
//   kernel -> sonde_handlers + 16 i -> sonde_on_signal(i, ...) -> jump to the handler, everything as the kernel left it
//
// Only where something is to be put right after the handler its return is hooked, like a call's, by an entry of site kNoSite:
// the interrupted pc lay in a detour (detour_place.h), or traps are in use (trap_mask.h). Signal-safe.
#pragma once

#include "core/probe/control.h"
#include "core/probe/entries.h"
#include "core/probe/signal_abi.h"

namespace sonde {

constexpr uint32_t kHandlers = 1024;  // = ENTRANCES in signal.S
constexpr uint32_t kEntranceStride = 16;
constexpr uint64_t kBlocksTrap = uint64_t{1} << 63;  // no address has it

// Makes the kernel's action of the program's: the entrance for its handler, no SIGTRAP in the mask while traps are in use.
// Where there are too many handlers, the handler itself stays.
void wrap_action(KernelSigaction* action);
// And the program's of the kernel's.
void unwrap_action(KernelSigaction* action);

// A handler whose return was hooked has returned.
void handler_returned(uint32_t entry);

extern "C" {
extern const char sonde_handlers[] __attribute__((visibility("hidden")));
// For each entrance its handler's address, with kBlocksTrap if its action's mask had SIGTRAP; 0: free. Never changed once set.
// The host takes entrances too, while every thread stands (host/target/signals.cc).
extern uint64_t sonde_handler_table[kHandlers] __attribute__((visibility("hidden")));
// The handler to jump to. slot: the word that holds the return address, in front of the context.
__attribute__((visibility("hidden"))) uint64_t sonde_on_signal(uint64_t handler, SignalInfo* info,
                                                               SignalContext* context, uint64_t* slot);
}

}  // namespace sonde
