#include "host/target/agent_view.h"

#include <fmt/format.h>

#include <cstddef>

#include "core/probe/control.h"

namespace sonde::host {
namespace {

constexpr uint32_t kMaxDetours = 1u << 22, kMaxSteps = 1u << 26;
constexpr uint64_t kMaxArena = uint64_t{1} << 40;

// `count` items at offset bytes into the arena.
template <class T>
Result<std::vector<T>> read_items(TargetMemory& memory, Addr arena, uint64_t offset, uint32_t count, const char* what) {
  std::vector<T> items(count);
  if (count &&
      !memory.read(arena + static_cast<int64_t>(offset), {reinterpret_cast<uint8_t*>(items.data()), count * sizeof(T)}))
    return fail(fmt::format("sonde's agent: its list of {} cannot be read at {:#x}", what, arena.value + offset));
  return items;
}

}  // namespace

std::optional<AgentView> view_agent(const LoadedImage& loaded) {
  const Image& image = *loaded.image;
  std::string_view path = image.path();
  if (!path.substr(path.rfind('/') + 1).starts_with("libsonde-agent")) return std::nullopt;
  auto address = [&](std::string_view name) -> Addr {
    auto found = image.symbol(name);
    return found ? loaded.to_target(*found) : Addr();
  };
  AgentView view{address("sonde_agent_control"), address("sonde_trampolines"), address("sonde_entries"), {}};
  if (!view.control || !view.trampolines || !view.entries) return std::nullopt;
  auto add = [&](std::string_view name, SpecialKind kind) {
    auto found = image.symbol(name);
    auto hit = found ? image.find(*found) : std::nullopt;
    if (hit && hit->offset == 0)
      view.specials.push_back(
          {{loaded.to_target(hit->function->range.begin), loaded.to_target(hit->function->range.end)}, kind});
  };
  add("sonde_entry", SpecialKind::entry_trampoline);
  add("sonde_entry_full", SpecialKind::entry_trampoline);
  add("sonde_through", SpecialKind::return_common);
  add("sonde_leave_system_call", SpecialKind::entry_trampoline);
  add("sonde_trap", SpecialKind::trap_handler);
  add("sonde_return_common", SpecialKind::return_common);
  add("sonde_return_handled", SpecialKind::return_common);
  view.specials.push_back(
      {{view.trampolines - int64_t{kTrampolineCall}, view.trampolines + int64_t{kTrampolines} * kTrampolineStride},
       SpecialKind::return_trampoline});
  return view;
}

Addr published_arena(const AgentView& agent, TargetMemory& memory) {
  uint64_t tables;
  uint32_t version;
  if (!memory.read_as(agent.control + offsetof(AgentControl, version), &version) || version != kAgentVersion)
    return Addr();
  if (!memory.read_as(agent.control + offsetof(AgentControl, tables), &tables)) return Addr();
  return Addr(tables);
}

Result<std::vector<ArenaDetour>> published_detours(Addr at, TargetMemory& memory) {
  TableArena arena;
  if (!memory.read_as(at, &arena))
    return fail(fmt::format("sonde's agent: its tables at {:#x} cannot be read", at.value));
  if (arena.size > kMaxArena || arena.detours_offset > arena.size || arena.steps_offset > arena.size ||
      arena.detour_count > kMaxDetours || arena.step_count > kMaxSteps)
    return fail(fmt::format("sonde's agent: its tables at {:#x} contradict themselves", at.value));
  auto detours = SONDE_TRY(read_items<DetourEntry>(memory, at, arena.detours_offset, arena.detour_count, "detours"));
  auto steps = SONDE_TRY(read_items<DetourStepEntry>(memory, at, arena.steps_offset, arena.step_count, "steps"));
  std::vector<ArenaDetour> result;
  for (const DetourEntry& d : detours) {
    if (d.begin >= d.end || d.first_step > steps.size() || d.step_count > steps.size() - d.first_step)
      return fail(fmt::format("sonde's agent: the detour at {:#x} contradicts itself", d.begin));
    auto first = steps.begin() + d.first_step;
    result.push_back({{Addr(d.begin), Addr(d.end)}, Addr(d.patch), d.site, {first, first + d.step_count}});
  }
  return result;
}

}  // namespace sonde::host
