// Events of the target for which a thread waits until the host has acted: the engine's own sites (SiteFlags).
// Waiting spins, without system calls in the loader; it ends after kHostWaitBeats heartbeat timeouts, or when the recorder is gone.
// Signal-safe.
#pragma once

#include "core/event/session.h"

namespace sonde {

constexpr unsigned kHostWaitBeats = 4;
constexpr unsigned kTurnBeats = 32;  // behind other processes that end just now

// The function that r_debug->r_brk names was called: the loader calls it when it starts and when it has finished changing
// its list of libraries. When the list is consistent again the host plans and arms what is new, so that a new library's
// constructors run probed.
void loader_event(SessionHeader* session);

// The process is about to end by itself: the host reads which calls are still in flight.
void exit_event(SessionHeader* session, uint32_t pid);

}  // namespace sonde
