// Ticks (core/native/ticks.h) and nanoseconds: pairs of both, measured at the start and at the end of a recording; the
// longer the recording, the more exact the conversion.
#pragma once

#include <cstdint>

namespace sonde::host {

struct ClockSample {
  uint64_t ticks = 0;
  int64_t monotonic_ns = 0;  // CLOCK_MONOTONIC
  int64_t wall_ns = 0;       // CLOCK_REALTIME, since 1970
};

// The tightest of a few tries.
ClockSample sample_clock();

// Converts by the line through two samples.
class TickClock {
 public:
  TickClock() = default;
  TickClock(const ClockSample& first, const ClockSample& last);

  double ticks_per_ns() const { return 1 / ns_per_tick_; }
  // A duration; negative stays negative.
  int64_t ns(int64_t ticks) const { return static_cast<int64_t>(static_cast<double>(ticks) * ns_per_tick_); }
  // Nanoseconds since the first sample.
  int64_t since_start(uint64_t ticks) const { return ns(static_cast<int64_t>(ticks - start_)); }
  uint64_t ticks_of(int64_t ns) const { return static_cast<uint64_t>(static_cast<double>(ns) / ns_per_tick_); }

 private:
  uint64_t start_ = 0;
  double ns_per_tick_ = 1;
};

}  // namespace sonde::host
