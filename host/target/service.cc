#include "host/target/service.h"

#include <algorithm>
#include <chrono>

#include "host/target/threads.h"

namespace sonde::host {

namespace {
// Whoever debugs the target right now keeps it; the new libraries stay unprobed.
Result<void> stop_and_update(Target& target, const Selector& select) {
  StoppedProcess stopped = SONDE_TRY(StoppedProcess::stop(target.pid()));
  if (stopped.threads().empty()) return fail("the target has no thread left");
  Tracee tracee = SONDE_TRY(Tracee::borrow(stopped.threads().front().tid, target.pid()));
  return target.update(tracee, select);
}
}  // namespace

Result<bool> Service::poll() {
  uint32_t requested = __atomic_load_n(&session_->requested, __ATOMIC_ACQUIRE);
  uint32_t open = requested - __atomic_load_n(&session_->answered, __ATOMIC_RELAXED);
  if (open == 0) return false;
  if (uint32_t pid = __atomic_load_n(&session_->exiting_pid, __ATOMIC_ACQUIRE)) {
    on_exit_(static_cast<pid_t>(pid));
    __atomic_store_n(&session_->exiting_pid, 0, __ATOMIC_RELAXED);
    open--;  // the others, asked meanwhile, are about libraries
  }
  if (open == 0 || program_ended_) {
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
