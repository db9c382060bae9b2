// One-byte traps in the target. They need SIGTRAP to be deliverable in every thread at every moment: the agent sees to
// that, if all system calls that could change it come by it (host/plan/trap_safety.h). So they are begun before the
// program's first instruction, or never, and taken out again when an image appears that does not play along.
//
//   system call sites armed -> trap table -> SIGTRAP's action -> kControlTraps -> trap bytes
#include <fmt/format.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <utility>

#include "core/probe/control.h"
#include "host/plan/trap_safety.h"
#include "host/target/target.h"
#include "host/target/threads.h"

namespace sonde::host {

namespace {

constexpr uint64_t kTrapBit = uint64_t{1} << (SIGTRAP - 1);

bool needs_trap(const ImagePlan& plan) {
  return std::ranges::any_of(plan.sites, [](const SitePlan& s) { return s.method == Method::trap; });
}

void refuse_traps(ImagePlan& plan) {
  for (SitePlan& site : plan.sites)
    if (site.method == Method::trap) refuse_trap(site);
  for (SystemCallPlan& call : plan.system_calls)
    if (call.site.method == Method::trap) refuse_trap(call.site);
}

}  // namespace

// What of the process itself, as it stands before its first instruction, forbids traps.
Result<std::string> Target::process_obstacle(Tracee& tracee) const {
  if (status_field(pid_, "Seccomp") != "0") return "the program was started under a seccomp filter";
  if (SONDE_TRY(tracee.signal_mask()) & kTrapBit) return "the program was started with SIGTRAP blocked";
  return "";
}

// Turns planned traps into refusals where the process cannot have them.
Result<void> Target::decide_traps(Tracee& tracee, std::span<Planned> planned) {
  bool first = sites_.empty(), needed = std::ranges::any_of(planned, [](auto& p) { return needs_trap(p.plan); });
  std::string obstacle;
  if (!problems_.empty()) obstacle = "an image cannot be read: " + problems_.front();
  if (first && obstacle.empty())
    obstacle = options_.launched ? SONDE_TRY(process_obstacle(tracee)) : "the program ran already when it was probed";
  for (const Planned& p : planned)
    if (obstacle.empty()) obstacle = trap_obstacle(images_[p.image].loaded, p.plan);
  bool allowed = options_.allow_traps || options_.force_traps;
  if (first) has_traps_ = allowed && needed && obstacle.empty();
  Addr flags = agent_address(agent_.control) + offsetof(AgentControl, flags);
  bool disarmed = SONDE_TRY(tracee.read_as<uint32_t>(flags)) & kControlDisarmed;
  if (has_traps_ && disarmed) has_traps_ = false, no_traps_ = "the program forbade them while it ran";
  if (has_traps_ && obstacle.empty()) return {};
  if (first && options_.force_traps && !obstacle.empty())
    return fail("--force-trap: no traps are possible here: " + obstacle);
  if (has_traps_) {
    SONDE_TRY_VOID(disarm_traps(tracee));
    no_traps_ = "taken out while the program ran: " + obstacle;
  }
  if (needed && allowed && no_traps_.empty())
    no_traps_ = obstacle.empty() ? "nothing needed them when the program started" : obstacle;
  for (Planned& p : planned) refuse_traps(p.plan);
  return {};
}

// Those of the sites that are new. A new table replaces the old one, which stays mapped: a handler may be reading it.
Result<void> Target::arm_traps(Tracee& tracee) {
  std::vector<TrapSite> table;
  size_t added = 0;
  for (uint32_t i = 0; i < sites_.size(); i++) {
    const TargetSite& site = sites_[i];
    if (site.gone || site.plan.method != Method::trap) continue;
    table.push_back({site.plan.patch.value, i, site.plan.original[0]});
    added += i >= traps_seen_;
  }
  uint32_t first = std::exchange(traps_seen_, static_cast<uint32_t>(sites_.size()));
  if (!has_traps_ || (added == 0 && traps_begun_)) return {};
  std::ranges::sort(table, {}, &TrapSite::pc);
  std::vector<uint8_t> block(sizeof(TrapTable) + table.size() * sizeof(TrapSite));
  uint64_t count = table.size();
  std::memcpy(block.data() + offsetof(TrapTable, count), &count, sizeof count);
  std::memcpy(block.data() + offsetof(TrapTable, sites), table.data(), table.size() * sizeof(TrapSite));
  Addr at = SONDE_TRY(map(tracee, Addr(), block.size(), PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1));
  SONDE_TRY_VOID(tracee.write(at, block));
  SONDE_TRY_VOID(tracee.write_as(agent_address(agent_.control) + offsetof(AgentControl, traps), at.value));
  if (!traps_begun_) SONDE_TRY_VOID(begin_traps(tracee));
  for (uint32_t i = first; i < sites_.size(); i++)
    if (sites_[i].plan.method == Method::trap) SONDE_TRY_VOID(tracee.write(sites_[i].plan.patch, sites_[i].plan.bytes));
  return {};
}

// SIGTRAP becomes the agent's; what the program wanted done with it is kept for it.
Result<void> Target::begin_traps(Tracee& tracee) {
  Addr control = agent_address(agent_.control);
  int64_t done = SONDE_TRY(tracee.system_call(
      syscall_, SYS_rt_sigaction,
      {SIGTRAP, agent_address(agent_.trap_action).value, (control + offsetof(AgentControl, program_trap)).value, 8}));
  if (done != 0) return fail("the target's SIGTRAP cannot be handled");
  Addr flags = control + offsetof(AgentControl, flags);
  traps_begun_ = true;
  return tracee.write_as(flags, SONDE_TRY(tracee.read_as<uint32_t>(flags)) | kControlTraps);
}

// Whoever has run into one already finds it in the table, and its detour in place. Masks are the kernel's again (trap_mask.h).
Result<void> Target::disarm_traps(Tracee& tracee) {
  has_traps_ = false;
  for (const TargetSite& site : sites_)
    if (!site.gone && site.plan.method == Method::trap)
      SONDE_TRY_VOID(tracee.write(site.plan.patch, site.plan.original));
  Addr flags = agent_address(agent_.control) + offsetof(AgentControl, flags);
  return tracee.write_as(flags, SONDE_TRY(tracee.read_as<uint32_t>(flags)) | kControlDisarmed | kControlTrapsGone);
}

}  // namespace sonde::host
