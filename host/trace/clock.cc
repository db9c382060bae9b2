#include "host/trace/clock.h"

#include <time.h>

#include "core/native/ticks.h"

namespace sonde::host {
namespace {

int64_t now_ns(clockid_t clock) {
  struct timespec t;
  clock_gettime(clock, &t);
  return t.tv_sec * 1000000000L + t.tv_nsec;
}

}  // namespace

ClockSample sample_clock() {
  ClockSample best;
  uint64_t best_width = ~uint64_t{0};
  for (int i = 0; i < 8; i++) {
    uint64_t before = ticks();
    int64_t monotonic = now_ns(CLOCK_MONOTONIC);
    uint64_t width = ticks() - before;
    if (width >= best_width) continue;
    best_width = width;
    best = {before + width / 2, monotonic, 0};
  }
  best.wall_ns = now_ns(CLOCK_REALTIME) - (now_ns(CLOCK_MONOTONIC) - best.monotonic_ns);
  return best;
}

TickClock::TickClock(const ClockSample& first, const ClockSample& last) : start_(first.ticks) {
  double ticks = static_cast<double>(static_cast<int64_t>(last.ticks - first.ticks));
  double ns = static_cast<double>(last.monotonic_ns - first.monotonic_ns);
  if (ticks > 0 && ns > 0) ns_per_tick_ = ns / ticks;
}

}  // namespace sonde::host
