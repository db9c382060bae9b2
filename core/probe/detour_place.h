// A handler of the program that interrupts a displaced instruction is to see the original one: while it runs, pc, sp and a
// fault's address in its context are those of the instruction that the detour's stands for. Afterwards execution goes on in
// the detour. Places come from the arena that the host publishes (AgentControl::tables). Signal-safe.
#pragma once

#include "core/probe/signal_abi.h"

namespace sonde {

struct DetourPlace {
  uint64_t pc = 0;  // in the detour; 0: in none
  uint64_t shown = 0;  // what it stands for
  int64_t sp_adjust = 0;  // sp in the detour + sp_adjust = sp at `shown`
};

DetourPlace find_detour_place(uint64_t pc);
// Shows the original to the handler. info: what goes with the context, or null.
void show_original(const DetourPlace& place, SignalContext* context, SignalInfo* info);
// Puts execution back, wherever the handler has left it.
void back_to_detour(const DetourPlace& place, SignalContext* context);

}  // namespace sonde
