#include "host/target/target.h"

#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/syscall.h>

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "core/probe/control.h"
#include "core/probe/stack_capture.h"
#include "host/target/threads.h"

#ifndef MAP_FIXED_NOREPLACE
#define MAP_FIXED_NOREPLACE 0x100000
#endif

namespace sonde::host {

namespace {
bool same_file(const LoadedImage& a, const LoadedImage& b) {
  return a.range.begin == b.range.begin && a.image->path() == b.image->path() &&
         a.image->build_id() == b.image->build_id();
}
}  // namespace

Result<Addr> Target::map(Tracee& tracee, Addr at, uint64_t size, int protection, int flags, int fd) {
  int64_t got = SONDE_TRY(tracee.system_call(
      syscall_, SYS_mmap,
      {at.value, size, static_cast<uint64_t>(protection), static_cast<uint64_t>(flags), static_cast<uint64_t>(fd), 0}));
  if (got < 0 && got > -4096)
    return fail(fmt::format("the target cannot map {} bytes{}: {}", size, at ? fmt::format(" at {:#x}", at.value) : "",
                            std::strerror(static_cast<int>(-got))));
  return Addr(static_cast<uint64_t>(got));
}

Result<void> Target::install(Tracee& tracee, int session_fd, SessionHeader* session) {
  session_ = session;
  for (LoadedImage& loaded : SONDE_TRY(loaded_images(pid_, &problems_)))
    if (loaded.image->build_id() == agent_.image->build_id()) agent_bias_ = loaded.bias;
  if (agent_bias_ == 0) return fail("the program's loader did not load the agent");

  Addr area = SONDE_TRY(map(tracee, Addr(), thread_area_bytes(), PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1));
  int64_t wiped =
      SONDE_TRY(tracee.system_call(syscall_, SYS_madvise, {area.value, thread_area_bytes(), MADV_WIPEONFORK}));
  if (wiped != 0)
    return fail("this kernel has no MADV_WIPEONFORK (Linux 4.14): forked children could not be told apart");
  Addr mapped =
      SONDE_TRY(map(tracee, Addr(), session->size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, session_fd));
  SONDE_TRY(tracee.system_call(syscall_, SYS_close, {static_cast<uint64_t>(session_fd)}));
  // Hundreds of megabytes that no reader of a core file wants; without this advice core files hold them, nothing worse.
  SONDE_TRY(tracee.system_call(syscall_, SYS_madvise, {area.value, thread_area_bytes(), MADV_DONTDUMP}));
  SONDE_TRY(tracee.system_call(syscall_, SYS_madvise, {mapped.value, session->size, MADV_DONTDUMP}));

  Addr control = agent_address(agent_.control);
  SONDE_TRY_VOID(tracee.write_as(control + offsetof(AgentControl, session), mapped.value));
  SONDE_TRY_VOID(tracee.write_as(control + offsetof(AgentControl, thread_area), area.value));
  if (status_field(pid_, "Seccomp") != "0")  // a sandbox that sonde itself runs in
    SONDE_TRY_VOID(tracee.write_as(control + offsetof(AgentControl, flags), uint32_t{kControlNoSystemCalls}));
  for (const Mapping& mapping : SONDE_TRY(read_maps(pid_)))
    if (mapping.path == "[stack]")
      SONDE_TRY_VOID(tracee.write_as(control + offsetof(AgentControl, main_stack_end), mapping.range.end.value));
  return {};
}

Result<void> Target::update(Tracee& tracee, const Selector& select) {
  std::vector<LoadedImage> now = SONDE_TRY(loaded_images(pid_, &problems_));
  bool changed = false;
  for (uint32_t i = 0; i < images_.size(); i++) {
    TargetImage& known = images_[i];
    if (known.gone) continue;
    known.gone = std::none_of(now.begin(), now.end(), [&](const auto& l) { return same_file(l, known.loaded); });
    if (!known.gone) continue;
    changed = true;
    for (TargetSite& site : sites_) site.gone |= site.image == i;
  }
  for (LoadedImage& loaded : now) {
    bool known = std::any_of(images_.begin(), images_.end(),
                             [&](const TargetImage& i) { return !i.gone && same_file(i.loaded, loaded); });
    if (known) continue;
    uint32_t index = static_cast<uint32_t>(images_.size());
    images_.push_back({loaded});
    find_tables(images_.back());
    changed = true;
    if (loaded.bias == agent_bias_) continue;
    std::vector<uint32_t> chosen = SONDE_TRY(select(loaded, loaded.image->path() == program_));
    auto events = SONDE_TRY(event_functions(tracee, loaded));
    if (!chosen.empty() || !events.empty()) SONDE_TRY_VOID(arm_image(tracee, index, chosen, events));
  }
  if (!changed) return {};  // a library that was loaded already
  SONDE_TRY_VOID(publish_unwinders(tracee));
  return publish_tables(tracee);
}

// Functions whose calls the engine itself wants to know of, with the flags of their sites: the loader tells debuggers about
// libraries by calling an empty function, a process that ends by itself calls _exit, one that forbids itself system calls
// comes by prctl or syscall, a small signal stack by sigaltstack, and backtraces must not show the engine.
Result<std::map<uint32_t, uint32_t>> Target::event_functions(Tracee& tracee, const LoadedImage& loaded) {
  std::map<uint32_t, uint32_t> found;
  auto add = [&](std::string_view name, uint32_t flag) {
    auto address = loaded.image->symbol(name);
    auto functions = loaded.image->functions();
    for (uint32_t i = 0; address && i < functions.size(); i++)
      if (functions[i].range.begin == *address) found[i] = flag;
  };
  if (auto debug = loaded.image->symbol("_r_debug")) {
    add("_dl_debug_state", kSiteLoader);
    SONDE_TRY_VOID(tracee.write_as(agent_address(agent_.control) + offsetof(AgentControl, loader_debug),
                                   loaded.to_target(*debug).value));
  }
  if (loaded.image->symbol("__libc_start_main")) {
    add("_exit", kSiteExit);
    add("prctl", kSitePrctl);
    add("syscall", kSiteSyscall);
    add("sigaltstack", kSiteSigaltstack);
  }
  add("_Unwind_Backtrace", kSiteBacktrace);
  return found;
}

Result<std::vector<AddrRange>> Target::used_ranges() const {
  std::vector<AddrRange> used;
  for (const Mapping& mapping : SONDE_TRY(read_maps(pid_))) used.push_back(mapping.range);
  return used;
}

Result<void> Target::arm_image(Tracee& tracee, uint32_t image, const std::vector<uint32_t>& chosen,
                               const std::map<uint32_t, uint32_t>& events) {
  std::vector<uint32_t> functions = chosen;
  for (const auto& [function, flag] : events) functions.push_back(function);
  std::sort(functions.begin(), functions.end());
  functions.erase(std::unique(functions.begin(), functions.end()), functions.end());
  PlanRequest request;
  request.image = &images_[image].loaded;
  request.functions = functions;
  request.first_site = static_cast<uint32_t>(sites_.size());
  request.entry_trampoline = agent_address(agent_.entry);
  request.used = SONDE_TRY(used_ranges());
  request.allow_traps = options_.allow_traps;
  request.force_traps = options_.force_traps;
  if (request.first_site + functions.size() > kMaxSites)
    return fail(fmt::format("more than {} functions to probe: choose fewer with -f", kMaxSites));
  ImagePlan plan = SONDE_TRY_CONTEXT(plan_image(request), request.image->image->path());

  for (const AddrRange& arena : plan.arenas)
    SONDE_TRY(map(tracee, arena.begin, arena.size(), PROT_READ | PROT_EXEC,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1));
  for (const auto& [at, bytes] : plan.writes) SONDE_TRY_VOID(tracee.write(at, bytes));
  for (size_t i = 0; i < plan.sites.size(); i++) {
    uint32_t function = plan.sites[i].function;
    auto event = events.find(function);
    bool internal = !std::binary_search(chosen.begin(), chosen.end(), function);
    sites_.push_back(
        {image, function, std::move(plan.sites[i]), event == events.end() ? 0 : event->second, internal, false});
    SONDE_TRY_VOID(arm_site(tracee, sites_.back(), static_cast<uint32_t>(sites_.size() - 1)));
  }
  return {};
}

// The site's record first, then the bytes: a hit finds its site complete.
Result<void> Target::arm_site(Tracee& tracee, const TargetSite& site, uint32_t number) {
  const SitePlan& plan = site.plan;
  Site& shared = session_sites(session_)[number];
  shared = {plan.entry.value, plan.patch.value, plan.resume.value, 0, 0};
  __atomic_store_n(&session_->site_count, number + 1, __ATOMIC_RELEASE);
  if (plan.method == Method::refused) return {};
  uint32_t flags = kSiteEnabled | site.event_flag;
  if (site.internal) {
    flags |= kSiteSilent;
  } else {
    if (plan.no_hijack == NoHijack::none) flags |= kSiteHijack;
    if (options_.stacks) flags |= kSiteStack;
  }
  shared.flags = flags;
  if (!plan.island_bytes.empty())
    SONDE_TRY_VOID(patch(tracee, site, plan.island, plan.island_original, plan.island_bytes));
  return patch(tracee, site, plan.patch, plan.original, plan.bytes);
}

Result<void> Target::patch(Tracee& tracee, const TargetSite& site, Addr at, const std::vector<uint8_t>& original,
                           const std::vector<uint8_t>& bytes) {
  std::vector<uint8_t> there(original.size());
  SONDE_TRY_VOID(tracee.read(at, there));
  if (there != original)
    return fail(fmt::format("the code at {:#x} is not what {} holds: somebody else patched it", at.value,
                            images_[site.image].loaded.image->path()));
  return tracee.write(at, bytes);
}

// Every image that defines an unwinder's functions, for the personality of the return trampolines.
Result<void> Target::publish_unwinders(Tracee& tracee) {
  std::vector<UnwinderFunctions> found;
  for (const TargetImage& image : images_) {
    if (image.gone || found.size() == kMaxUnwinders) continue;
    const LoadedImage& l = image.loaded;
    auto get_ip = l.image->symbol("_Unwind_GetIP"), set_ip = l.image->symbol("_Unwind_SetIP"),
         set_gr = l.image->symbol("_Unwind_SetGR"), resume = l.image->symbol("_Unwind_Resume");
    if (!get_ip || !set_ip || !set_gr || !resume) continue;
    found.push_back({l.range.begin.value, l.range.end.value, l.to_target(*get_ip).value, l.to_target(*set_ip).value,
                     l.to_target(*set_gr).value, l.to_target(*resume).value});
  }
  Addr control = agent_address(agent_.control);
  if (!found.empty())
    SONDE_TRY_VOID(tracee.write(control + offsetof(AgentControl, unwinders),
                                {reinterpret_cast<uint8_t*>(found.data()), found.size() * sizeof found[0]}));
  return tracee.write_as(control + offsetof(AgentControl, unwinder_count), static_cast<uint32_t>(found.size()));
}

}  // namespace sonde::host
