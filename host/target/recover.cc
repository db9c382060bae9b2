// An agent whose recorder was killed: what that one had put into the process, as the process itself still says. The detours that
// the agent was given name the patched places; what a patch stood for is in the image's file, and only a jump that leads to
// its detour is taken for one of ours.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>

#include "core/probe/control.h"
#include "host/target/agent_view.h"
#include "host/target/target.h"

namespace sonde::host {

namespace {

constexpr uint8_t kJump = 0xe9, kShortJump = 0xeb;
constexpr int64_t kJumpBytes = 5, kShortJumpBytes = 2;
constexpr int kMostPrefixes = 3;  // in front of a jump whose displacement is in part the following instructions' bytes

// What stands at an address, as far as it can be read.
std::array<uint8_t, kMostPrefixes + kJumpBytes> code_at(const Tracee& tracee, Addr at) {
  std::array<uint8_t, kMostPrefixes + kJumpBytes> code{};
  for (size_t size = code.size(); size >= kJumpBytes; size--)
    if (tracee.read(at, std::span(code).first(size))) break;
  return code;
}

// How many bytes the jump at `at` has that leads to `to`; 0: there is none.
int64_t jump_bytes(const Tracee& tracee, Addr at, Addr to) {
  auto code = code_at(tracee, at);
  for (int prefixes = 0; prefixes <= kMostPrefixes; prefixes++) {
    int32_t distance;
    std::memcpy(&distance, code.data() + prefixes + 1, sizeof distance);
    if (code[static_cast<size_t>(prefixes)] == kJump && at + (prefixes + kJumpBytes) + distance == to)
      return prefixes + kJumpBytes;
  }
  return 0;
}

// Where a short jump at `at` leads.
std::optional<Addr> short_jump_target(const Tracee& tracee, Addr at) {
  auto code = code_at(tracee, at);
  if (code[0] != kShortJump) return std::nullopt;
  return at + (kShortJumpBytes + static_cast<int8_t>(code[1]));
}

// What the file has there; empty: nothing.
std::vector<uint8_t> bytes_of_file(std::span<const LoadedImage> images, Addr at, int64_t size) {
  for (const LoadedImage& loaded : images) {
    if (!loaded.range.contains(at)) continue;
    auto bytes = loaded.image->bytes({loaded.to_image(at), loaded.to_image(at + size)});
    return {bytes.begin(), bytes.end()};
  }
  return {};
}

}  // namespace

Result<Target> Target::recover(pid_t pid, AgentFile agent) {
  Target target(pid, std::move(agent), "", Addr(), {.launched = false});
  auto images = SONDE_TRY(loaded_images(pid, nullptr));
  const LoadedImage* loaded = nullptr;
  for (const LoadedImage& image : images)
    if (image.image->build_id() == target.agent_.image->build_id()) loaded = &image;
  auto view = loaded ? view_agent(*loaded) : std::nullopt;
  if (!view)
    return fail(fmt::format("process {} ({}) has no agent of this sonde in it", pid, status_field(pid, "Name")));
  target.agent_bias_ = loaded->bias;
  target.syscall_ = SONDE_TRY(target.agent_system_call());
  Tracee tracee = SONDE_TRY(Tracee::running(pid));
  auto control = SONDE_TRY(tracee.read_as<AgentControl>(view->control));
  if (control.version != kAgentVersion || (control.session && !control.handle))
    return fail(
        fmt::format("process {} ({}) was started by sonde record: the agent is a part of it and stays, without effect",
                    pid, status_field(pid, "Name")));
  target.options_.handle = Addr(control.handle);
  for (uint32_t i = 0; i < std::min<uint32_t>(control.mapped_count, kMaxMapped); i++)
    target.mapped_.push_back({Addr(control.mapped[i].begin), Addr(control.mapped[i].end)});
  if (!control.tables) return target;

  ProcessMemory memory(pid, SONDE_TRY(read_maps(pid)));
  auto detours = SONDE_TRY(published_detours(Addr(reinterpret_cast<uint64_t>(control.tables)), memory));
  // Jumps in padding, by the place that they stand for.
  auto is_island = [](const ArenaDetour& d) {
    return d.steps.size() == 1 && static_cast<int64_t>(d.range.end - d.range.begin) == kJumpBytes;
  };
  std::map<Addr, Addr> islands;
  for (const ArenaDetour& detour : detours)
    if (is_island(detour)) islands[detour.patch] = detour.range.begin;
  for (const ArenaDetour& detour : detours) {
    if (is_island(detour)) continue;
    TargetSite site{.image = 0, .function = kNoFunction, .plan = {}};
    SitePlan& plan = site.plan;
    plan.method = Method::jump;
    plan.patch = plan.entry = detour.patch;
    plan.detour = detour.range.begin;
    plan.detour_bytes.resize(static_cast<size_t>(detour.range.end - detour.range.begin));
    for (const DetourStepEntry& step : detour.steps) plan.steps.push_back({step.offset, step.original, step.sp_adjust});
    auto flags = tracee.read_as<Site>(Addr(reinterpret_cast<uint64_t>(&session_sites(control.session)[detour.site])));
    if (flags && detour.site < kMaxSites) site.event_flag = flags->flags & kSiteSystemCall;
    // Where no jump of ours stands the code is as it was, but a thread may still be in the detour.
    auto restore = [&](Addr at, int64_t size, std::vector<uint8_t>* bytes) -> Result<void> {
      *bytes = bytes_of_file(images, at, size);
      if (!bytes->empty()) return {};
      return fail(fmt::format("process {}: what stood at {:#x} can be found in no file", pid, at.value));
    };
    if (auto island = islands.find(detour.patch); island != islands.end()) {
      plan.island = island->second;
      if (short_jump_target(tracee, plan.patch) == plan.island)
        SONDE_TRY_VOID(restore(plan.patch, kShortJumpBytes, &plan.original));
      if (jump_bytes(tracee, plan.island, plan.detour) == kJumpBytes)
        SONDE_TRY_VOID(restore(plan.island, kJumpBytes, &plan.island_original));
    } else if (int64_t size = jump_bytes(tracee, plan.patch, plan.detour)) {
      SONDE_TRY_VOID(restore(plan.patch, size, &plan.original));
    }
    target.sites_.push_back(std::move(site));
  }
  return target;
}

}  // namespace sonde::host
