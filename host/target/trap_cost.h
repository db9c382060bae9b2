// What a trap costs on this machine: the kernel's way into a signal handler and back, measured in this process.
#pragma once

namespace sonde::host {

// Nanoseconds, the median of a few hundred. Takes a millisecond. For the thread that has no signals of its own to mind.
double measure_trap_ns();

}  // namespace sonde::host
