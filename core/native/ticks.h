// The processor's time stamp: cheap, monotonic per machine, converted to nanoseconds by the host (host/trace).
// Signal-safe, header only.
#pragma once

#include <cstdint>

namespace sonde {

inline uint64_t ticks() {
#if defined(__x86_64__)
  uint32_t low, high;
  asm volatile("rdtsc" : "=a"(low), "=d"(high));
  return (static_cast<uint64_t>(high) << 32) | low;
#else
  uint64_t value;
  asm volatile("mrs %0, cntvct_el0" : "=r"(value));
  return value;
#endif
}

inline void pause_hint() {
#if defined(__x86_64__)
  asm volatile("pause");
#else
  asm volatile("yield");
#endif
}

}  // namespace sonde
