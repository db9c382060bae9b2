// What the walker in the target needs (core/unwind/arena.h): one read-only block, written while the target is stopped,
// and published by one pointer. An older block stays mapped: a handler may be reading it. Where no stacks are taken in the
// target the block has no images: its detours are for those who look at the target from outside (agent_view.h).
#include <sys/mman.h>
#include <sys/syscall.h>

#include <cstddef>
#include <optional>

#include "core/isa/x86_64_detour.h"
#include "core/probe/control.h"
#include "host/tables/arena.h"
#include "host/target/agent_view.h"
#include "host/target/target.h"

namespace sonde::host {

namespace {

ArenaDetour detour_of(const TargetSite& site, uint32_t number) {
  ArenaDetour detour;
  uint64_t header = site.plan.detour_bytes.empty() ? 0 : x86_64_detour::kHeader;
  detour.range = {site.plan.detour, site.plan.detour + static_cast<int64_t>(site.plan.detour_bytes.size() - header)};
  detour.patch = site.plan.patch;
  detour.site = number;
  for (const DetourStep& step : site.plan.steps)
    detour.steps.push_back({step.offset, step.original, step.sp_adjust, 0});
  return detour;
}

// The long jump of a short one, in padding nearby: there nothing has been done yet either.
ArenaDetour island_of(const TargetSite& site, uint32_t number) {
  auto size = static_cast<int64_t>(site.plan.island_bytes.size());
  return {{site.plan.island, site.plan.island + size}, site.plan.patch, number, {{0, -1, 0, 0}}};
}

}  // namespace

// Once for each image: with many libraries this is most of the work.
void Target::find_tables(TargetImage& image) const {
  if (auto agent = view_agent(image.loaded)) image.specials = agent->specials;  // first: the earlier range holds
  if (!options_.stacks) return;
  std::optional<Table> view;
  if (auto table = load_table(*image.loaded.image)) {  // without a table its frames are marked, not guessed
    image.table = *table;
    if (image.table) view = image.table->table();
  }
  auto found = find_specials(image.loaded, view ? &*view : nullptr);
  image.specials.insert(image.specials.end(), found.begin(), found.end());
}

ArenaInput Target::arena_input() const {
  ArenaInput input;
  for (const TargetImage& image : images_) {
    if (image.gone) continue;
    input.specials.insert(input.specials.end(), image.specials.begin(), image.specials.end());
    if (options_.stacks) input.images.push_back({image.loaded, image.table});
  }
  for (uint32_t i = 0; i < sites_.size(); i++)
    if (!sites_[i].gone && sites_[i].plan.method != Method::refused && !sites_[i].plan.steps.empty()) {
      input.detours.push_back(detour_of(sites_[i], i));
      if (!sites_[i].plan.island_bytes.empty()) input.detours.push_back(island_of(sites_[i], i));
    }
  input.trampolines = agent_address(agent_.trampolines);
  input.entries = agent_address(agent_.entries);
  return input;
}

Result<void> Target::publish_tables(Tracee& tracee) {
  std::vector<uint8_t> arena = SONDE_TRY(build_arena(arena_input()));
  Addr block = SONDE_TRY(map(tracee, Addr(), arena.size(), PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1));
  SONDE_TRY_VOID(tracee.write(block, arena));
  return tracee.write_as(agent_address(agent_.control) + offsetof(AgentControl, tables), block.value);
}

}  // namespace sonde::host
