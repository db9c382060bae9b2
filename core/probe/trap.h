// Sites patched with a one-byte trap: the SIGTRAP handler is the hit path's way in, and every other SIGTRAP goes to where
// the program wants it.
//
//   trap at the patch address -> kernel -> sonde_trap(context) -> hit -> pc := the site's resume address -> sonde_restorer
//
// Arming (host): sonde_agent_control.traps, then rt_sigaction(SIGTRAP, &sonde_trap_action,
// &sonde_agent_control.program_trap) and kControlTraps in the same stop, then the trap bytes. The handler runs on the stack of the interrupted function, with no signal
// blocked: the hit path may be interrupted anywhere, and a handler that interrupts it may itself run into a trap.
#pragma once

#include <cstdint>

#include "core/probe/control.h"
#include "core/probe/signal_abi.h"

namespace sonde {

// The site whose trap stands at pc; null: not ours.
const TrapSite* find_trap(const TrapTable* table, uint64_t pc);

extern "C" {
extern const KernelSigaction sonde_trap_action __attribute__((visibility("hidden")));
__attribute__((visibility("hidden"))) void sonde_trap(int signal, SignalInfo* info, SignalContext* context);
}

}  // namespace sonde
