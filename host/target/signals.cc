// The signal handlers that a program had installed before it was attached to: each is given an entrance of the agent's, as
// those that it installs later (core/probe/handlers.h), once all its system calls about handlers come by the agent; and gets
// its place in the kernel's table back when the engine leaves. Only while every thread stands.
#include <fmt/format.h>
#include <signal.h>
#include <sys/syscall.h>

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <vector>

#include "core/probe/control.h"
#include "core/probe/handlers.h"
#include "host/target/target.h"

namespace sonde::host {

namespace {

constexpr int kSignals = 64;
constexpr uint64_t kAddressesEnd = kBlocksTrap;  // no handler lies above

std::vector<int> caught_signals(pid_t pid) {
  uint64_t caught = std::strtoull(status_field(pid, "SigCgt").c_str(), nullptr, 16);
  std::vector<int> signals;
  for (int signal = 1; signal <= kSignals; signal++)
    if (caught >> (signal - 1) & 1) signals.push_back(signal);
  return signals;
}

}  // namespace

Result<void> Target::set_flag(Tracee& tracee, uint32_t flag, bool on) {
  Addr at = agent_address(agent_.control) + offsetof(AgentControl, flags);
  uint32_t flags = SONDE_TRY(tracee.read_as<uint32_t>(at));
  return tracee.write_as(at, on ? flags | flag : flags & ~flag);
}

// The kernel's action for a signal: what stands there, and instead of it what `change` makes of that, if it says so.
static Result<void> change_action(Tracee& tracee, Addr syscall, Addr scratch, int signal,
                                  const std::function<bool(KernelSigaction*)>& change) {
  auto number = static_cast<uint64_t>(signal);
  auto make = [&](uint64_t action, uint64_t old) -> Result<void> {
    if (SONDE_TRY(tracee.system_call(syscall, SYS_rt_sigaction, {number, action, old, 8})) != 0)
      return fail(fmt::format("the program's handler for signal {} cannot be changed", signal));
    return {};
  };
  SONDE_TRY_VOID(make(0, scratch.value));
  auto action = SONDE_TRY(tracee.read_as<KernelSigaction>(scratch));
  if (!change(&action)) return {};
  SONDE_TRY_VOID(tracee.write_as(scratch, action));
  return make(scratch.value, 0);
}

Result<void> Target::wrap_handlers(Tracee& tracee) {
  Addr scratch = agent_address(agent_.control) + offsetof(AgentControl, host_actions);
  Addr at = agent_address(agent_.handler_table);
  std::vector<uint64_t> table(kHandlers);
  SONDE_TRY_VOID(tracee.read(at, {reinterpret_cast<uint8_t*>(table.data()), table.size() * sizeof table[0]}));
  for (int signal : caught_signals(pid_)) {
    SONDE_TRY_VOID(change_action(tracee, syscall_, scratch, signal, [&](KernelSigaction* action) {
      if (action->handler <= kIgnoreAction || action->handler >= kAddressesEnd) return false;
      auto entrance = std::ranges::find_if(table, [&](uint64_t there) { return !there || there == action->handler; });
      if (entrance == table.end()) return false;  // all are taken: as in the agent, the handler itself stays
      *entrance = action->handler;
      action->handler =
          agent_address(agent_.handlers).value + static_cast<uint64_t>(entrance - table.begin()) * kEntranceStride;
      return true;
    }));
    // Each before its signal can come: nothing runs yet.
    SONDE_TRY_VOID(tracee.write(at, {reinterpret_cast<uint8_t*>(table.data()), table.size() * sizeof table[0]}));
  }
  return set_flag(tracee, kControlBareHandlers, false);
}

Result<void> Target::unwrap_handlers(Tracee& tracee, pid_t pid) const {
  Addr scratch = agent_address(agent_.control) + offsetof(AgentControl, host_actions);
  uint64_t begin = agent_address(agent_.handlers).value;
  for (int signal : caught_signals(pid)) {
    Result<uint64_t> handler = 0;
    SONDE_TRY_VOID(change_action(tracee, syscall_, scratch, signal, [&](KernelSigaction* action) {
      uint64_t index = (action->handler - begin) / kEntranceStride;
      if (action->handler < begin || index >= kHandlers) return false;
      handler = tracee.read_as<uint64_t>(agent_address(agent_.handler_table) + static_cast<int64_t>(index * 8));
      if (!handler || !*handler) return false;
      action->handler = *handler & ~kBlocksTrap;
      if (*handler & kBlocksTrap) action->mask |= uint64_t{1} << (SIGTRAP - 1);
      return true;
    }));
    if (!handler) return std::unexpected(handler.error());
  }
  return {};
}

}  // namespace sonde::host
