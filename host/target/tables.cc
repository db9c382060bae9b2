// What the walker in the target needs (core/unwind/arena.h): one read-only block, written while the target is stopped,
// and published by one pointer. An older block stays mapped: a handler may be reading it. Where no stacks are taken in the
// target the block has no images: its detours are for those who look at the target from outside (agent_view.h).
#include <sys/mman.h>
#include <sys/syscall.h>

#include <cstddef>
#include <optional>

#include "core/isa/x86_64_detour.h"
#include "core/probe/control.h"
#include "core/walk/row_cache.h"
#include "host/check/proven_table.h"
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
  if (auto table = load_proven_table(*image.loaded.image)) {  // without a table its frames are marked, not guessed
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
    if (options_.stacks) input.images.push_back({image.loaded, image.table, image.stays});
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

// Large ones in large pages, if the kernel gives any: a first walk looks here and there in all of it.
Result<Addr> Target::map_block(Tracee& tracee, uint64_t size) {
  constexpr uint64_t kHuge = uint64_t{2} << 20, kWorthIt = kHuge / 2;
  bool large = size >= kWorthIt;
  if (large) size = (size + 2 * kHuge - 1) & ~(kHuge - 1);
  Addr at = SONDE_TRY(map(tracee, Addr(), size, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1));
  if (!large) return at;
  Addr block((at.value + kHuge - 1) & ~(kHuge - 1));
  SONDE_TRY(tracee.system_call(syscall_, SYS_madvise, {block.value, (size - kHuge) & ~(kHuge - 1), MADV_HUGEPAGE}));
  return block;
}

// Each block has memory of its own for what walks find out by it. That of the block before is given back: a handler that
// is still reading there finds nothing, as in the beginning.
Result<void> Target::publish_tables(Tracee& tracee) {
  ArenaInput input = arena_input();
  if (auto maps = read_maps(tracee.thread())) {
    auto mapped = mapped_specials(*maps);
    input.specials.insert(input.specials.end(), mapped.begin(), mapped.end());
  }
  const Addr old_cache = row_cache_;
  if (options_.stacks) {
    input.row_cache = row_cache_ = SONDE_TRY(
        map(tracee, Addr(), sizeof(RowCache), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1));
    SONDE_TRY(tracee.system_call(syscall_, SYS_madvise, {row_cache_.value, sizeof(RowCache), MADV_DONTDUMP}));
  }
  std::vector<uint8_t> arena = SONDE_TRY(build_arena(input));
  Addr block = SONDE_TRY(map_block(tracee, arena.size()));
  SONDE_TRY_VOID(tracee.write(block, arena));
  SONDE_TRY_VOID(tracee.write_as(agent_address(agent_.control) + offsetof(AgentControl, tables), block.value));
  if (old_cache)
    SONDE_TRY(tracee.system_call(syscall_, SYS_madvise, {old_cache.value, sizeof(RowCache), MADV_DONTNEED}));
  return {};
}

}  // namespace sonde::host
