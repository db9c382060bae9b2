// The engine's own site, on the loader's debug hook (the function that r_debug->r_brk names; the loader calls it when it
// starts and when it has finished changing its list of libraries).
#pragma once

#include "core/event/session.h"

namespace sonde {

// When the list is consistent again: asks the host to look at it and waits until it has planned and armed what is new,
// so that the new library's constructors run probed. Spins without system calls; gives up after kLoaderWaitBeats
// heartbeat timeouts, or when the recorder is gone. Signal-safe.
void loader_event(SessionHeader* session);

constexpr unsigned kLoaderWaitBeats = 4;

}  // namespace sonde
