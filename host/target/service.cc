#include "host/target/service.h"

#include <sched.h>

#include <algorithm>
#include <chrono>

#include "host/target/threads.h"

namespace sonde::host {

namespace {

constexpr int kExitsPerLook = 256;

// Whoever debugs the target right now keeps it; the new libraries stay unprobed.
Result<void> stop_and_update(Target& target, const Selector& select) {
  StoppedProcess stopped = SONDE_TRY(StoppedProcess::stop(target.pid()));
  if (stopped.threads().empty()) return fail("the target has no thread left");
  Tracee tracee = SONDE_TRY(Tracee::borrow(stopped.threads().front().tid, target.pid()));
  return target.update(tracee, select);
}
}  // namespace

Result<bool> Service::poll() {
  // When many end at once each waits for its turn, and spins.
  for (int ended = 0; ended < kExitsPerLook; ended++) {
    uint32_t pid = __atomic_load_n(&session_->exiting_pid, __ATOMIC_ACQUIRE);
    if (!pid) break;
    on_exit_(static_cast<pid_t>(pid));
    __atomic_store_n(&session_->exiting_pid, 0, __ATOMIC_RELEASE);
    sched_yield();
  }
  uint32_t requested = __atomic_load_n(&session_->requested, __ATOMIC_ACQUIRE);
  if (requested == __atomic_load_n(&session_->answered, __ATOMIC_RELAXED)) return false;
  if (program_ended_) {
    __atomic_store_n(&session_->answered, requested, __ATOMIC_RELEASE);
    return false;
  }
  auto begin = std::chrono::steady_clock::now();
  auto done = stop_and_update(target_, select_);
  auto took = std::chrono::steady_clock::now() - begin;
  longest_pause_ns_ = std::max<int64_t>(longest_pause_ns_, std::chrono::nanoseconds(took).count());
  __atomic_store_n(&session_->answered, requested, __ATOMIC_RELEASE);
  if (!done) return std::unexpected(done.error());
  return true;
}

}  // namespace sonde::host
