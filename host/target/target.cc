#include "host/target/target.h"

#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/syscall.h>

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "core/probe/control.h"
#include "core/probe/stack_capture.h"
#include "host/plan/places.h"
#include "host/plan/runtime.h"
#include "host/target/presence.h"
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
  AddrRange mapped{Addr(static_cast<uint64_t>(got)), Addr(static_cast<uint64_t>(got) + size)};
  Addr control = agent_address(agent_.control);
  auto count = static_cast<uint32_t>(mapped_.size());
  mapped_.push_back(mapped);
  if (count < kMaxMapped)
    SONDE_TRY_VOID(tracee.write_as(
        control + static_cast<int64_t>(offsetof(AgentControl, mapped) + count * sizeof mapped), mapped));
  SONDE_TRY_VOID(tracee.write_as(control + offsetof(AgentControl, mapped_count), count + 1));
  return mapped.begin;
}

Result<Addr> Target::agent_system_call() const {
  static constexpr uint8_t kSyscall[] = {0x0f, 0x05};
  for (const Segment& segment : agent_.image->segments()) {
    if (!segment.executable) continue;
    auto code = agent_.image->bytes(segment.range);
    auto found = std::search(code.begin(), code.end(), std::begin(kSyscall), std::end(kSyscall));
    if (found != code.end()) return agent_address(segment.range.begin + (found - code.begin()));
  }
  return fail(agent_.path + " makes no system calls");
}

Result<void> Target::install(Tracee& tracee, int session_fd, int presence_fd, SessionHeader* session) {
  session_ = session;
  for (LoadedImage& loaded : SONDE_TRY(loaded_images(pid_, &problems_)))
    if (loaded.image->build_id() == agent_.image->build_id()) agent_bias_ = loaded.bias;
  if (agent_bias_ == 0) return fail("the program's loader did not load the agent");
  syscall_ = SONDE_TRY(agent_system_call());  // all others are to be patched

  SONDE_TRY_VOID(
      tracee.write_as(agent_address(agent_.control) + offsetof(AgentControl, handle), options_.handle.value));
  Addr area = SONDE_TRY(map(tracee, Addr(), thread_area_bytes(), PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1));
  int64_t wiped =
      SONDE_TRY(tracee.system_call(syscall_, SYS_madvise, {area.value, thread_area_bytes(), MADV_WIPEONFORK}));
  if (wiped != 0)
    return fail("this kernel has no MADV_WIPEONFORK (Linux 4.14): forked children could not be told apart");
  Addr mapped =
      SONDE_TRY(map(tracee, Addr(), session->size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, session_fd));
  SONDE_TRY(map(tracee, Addr(), kPresenceBytes, PROT_NONE, MAP_SHARED, presence_fd));
  for (int fd : {session_fd, presence_fd})
    SONDE_TRY(tracee.system_call(syscall_, SYS_close, {static_cast<uint64_t>(fd)}));
  // Hundreds of megabytes that no reader of a core file wants; without this advice core files hold them, nothing worse.
  SONDE_TRY(tracee.system_call(syscall_, SYS_madvise, {area.value, thread_area_bytes(), MADV_DONTDUMP}));
  SONDE_TRY(tracee.system_call(syscall_, SYS_madvise, {mapped.value, session->size, MADV_DONTDUMP}));

  Addr control = agent_address(agent_.control);
  SONDE_TRY_VOID(tracee.write_as(control + offsetof(AgentControl, session), mapped.value));
  SONDE_TRY_VOID(tracee.write_as(control + offsetof(AgentControl, thread_area), area.value));
  uint32_t flags = 0;
  if (!options_.launched) flags |= kControlBareHandlers;
  if (status_field(pid_, "Seccomp") != "0") flags |= kControlNoSystemCalls;  // a sandbox that sonde itself runs in
  SONDE_TRY_VOID(tracee.write_as(control + offsetof(AgentControl, flags), flags));
  for (const Mapping& mapping : SONDE_TRY(read_maps(pid_)))
    if (mapping.path == "[stack]")
      SONDE_TRY_VOID(tracee.write_as(control + offsetof(AgentControl, main_stack_end), mapping.range.end.value));
  return {};
}

Result<void> Target::update(Tracee& tracee, const Selector& select) {
  std::vector<Planned> planned;
  if (!SONDE_TRY(look(tracee, select, &planned))) return {};
  size_t first = sites_.size();
  SONDE_TRY_VOID(place(tracee, planned));
  for (size_t i = first; i < sites_.size(); i++) SONDE_TRY_VOID(patch(tracee, sites_[i]));
  return arm_traps(tracee);
}

// What came or went, and plans for what came: only reads. False: nothing did.
Result<bool> Target::look(Tracee& tracee, const Selector& select, std::vector<Planned>* planned) {
  std::vector<LoadedImage> now = SONDE_TRY(loaded_images(pid_, &problems_));
  bool changed = false;
  const bool from_start = options_.launched && images_.empty();
  for (uint32_t i = 0; i < images_.size(); i++) {
    TargetImage& known = images_[i];
    if (known.gone) continue;
    known.gone = std::none_of(now.begin(), now.end(), [&](const auto& l) { return same_file(l, known.loaded); });
    if (!known.gone) continue;
    changed = true;
    for (TargetSite& site : sites_) site.gone |= site.image == i;
  }
  std::vector<std::pair<uint32_t, Chosen>> chosen;  // by image
  for (LoadedImage& loaded : now) {
    bool known = std::any_of(images_.begin(), images_.end(),
                             [&](const TargetImage& i) { return !i.gone && same_file(i.loaded, loaded); });
    if (known) continue;
    uint32_t index = static_cast<uint32_t>(images_.size());
    images_.push_back({.loaded = loaded, .stays = from_start});
    find_tables(images_.back());
    changed = true;
    if (loaded.bias == agent_bias_) continue;
    images_.back().small_stacks = has_small_stacks(*loaded.image);
    NoHijack beside = no_hijack_beside(*loaded.image, &images_.back().unwinder);
    if (no_hijack_ == NoHijack::none) hook_no_returns(beside);
    chosen.emplace_back(index, SONDE_TRY(select(loaded, loaded.image->path() == program_)));
  }
  if (!changed) return false;  // a library that was loaded already
  for (auto& [index, its] : chosen) planned->push_back(SONDE_TRY(plan(tracee, index, std::move(its), *planned)));
  SONDE_TRY_VOID(decide_traps(tracee, *planned));
  return true;
}

// Everything that hits will need. Nothing of the program's own is changed yet.
Result<void> Target::place(Tracee& tracee, std::span<Planned> planned) {
  for (Planned& p : planned) SONDE_TRY_VOID(arm(tracee, p));
  SONDE_TRY_VOID(publish_unwinders(tracee));
  return publish_tables(tracee);
}

// From now on, those of functions that are probed already too.
void Target::hook_no_returns(NoHijack why) {
  no_hijack_ = why;
  if (why == NoHijack::none) return;
  for (uint32_t i = 0; i < sites_.size(); i++)
    __atomic_fetch_and(&session_sites(session_)[i].flags, ~uint32_t{kSiteHijack}, __ATOMIC_RELAXED);
}

// Functions whose calls the engine itself wants to know of, with the flags of their sites: the loader tells debuggers about
// libraries by calling an empty function, a process that ends by itself calls _exit, one that forbids itself system calls
// comes by prctl or syscall, a small stack by sigaltstack or makecontext, and backtraces must not show the engine.
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
    add("makecontext", kSiteMakecontext);
  }
  add("_Unwind_Backtrace", kSiteBacktrace);
  return found;
}

Result<std::vector<AddrRange>> Target::used_ranges() const {
  std::vector<AddrRange> used;
  for (const Mapping& mapping : SONDE_TRY(read_maps(pid_))) used.push_back(mapping.range);
  return used;
}

// A point there is hit when the function is called; a landing pad stays in front of it.
static bool is_entry(const Image& image, uint32_t function, ImageAddr at) {
  ImageAddr begin = image.functions()[function].range.begin;
  return at == begin || (at == begin + 4 && is_landing_pad(image, begin));
}

// Nothing is written to the target yet, so earlier plans of this update are kept apart by hand.
Result<Target::Planned> Target::plan(Tracee& tracee, uint32_t image, Chosen chosen, std::span<const Planned> before) {
  Planned planned{image, std::move(chosen), SONDE_TRY(event_functions(tracee, images_[image].loaded)), {}};
  PlanRequest request;
  request.image = &images_[image].loaded;
  request.functions = planned.chosen.functions;
  request.points = planned.chosen.points;
  for (const auto& [function, flag] : planned.events) {
    // A point at its entry sees the event as well.
    auto is_there = [&](ImageAddr at) { return is_entry(*request.image->image, function, at); };
    if (std::ranges::none_of(request.points, is_there)) request.functions.push_back(function);
  }
  std::sort(request.functions.begin(), request.functions.end());
  request.functions.erase(std::unique(request.functions.begin(), request.functions.end()), request.functions.end());
  size_t first_site = sites_.size();
  request.used = SONDE_TRY(used_ranges());
  for (const Planned& p : before) {
    first_site += p.plan.sites.size() + p.plan.system_calls.size();
    request.used.insert(request.used.end(), p.plan.arenas.begin(), p.plan.arenas.end());
  }
  std::sort(request.used.begin(), request.used.end(), [](AddrRange a, AddrRange b) { return a.begin < b.begin; });
  request.first_site = static_cast<uint32_t>(first_site);
  request.entry_trampoline = agent_address(agent_.entry);
  request.allow_traps = options_.allow_traps || options_.force_traps;
  request.force_traps = options_.force_traps;
  request.system_calls = minds_calls_;
  request.no_hijack = no_hijack_;
  if (first_site + request.functions.size() + request.points.size() > kMaxSites)
    return fail(fmt::format("more than {} functions to probe: choose fewer with -f", kMaxSites));
  planned.plan = SONDE_TRY_CONTEXT(plan_image(request), request.image->image->path());
  if (first_site + planned.plan.sites.size() + planned.plan.system_calls.size() > kMaxSites)
    return fail(fmt::format("more than {} sites: choose fewer functions with -f", kMaxSites));
  for (SitePlan& site : planned.plan.sites) {
    SONDE_TRY_VOID(refuse_differing(tracee, site));
    if (options_.sum && images_[image].small_stacks)
      site.method = Method::refused, site.refusal = Refusal::small_stacks, site.refusal_offset = 0;
  }
  for (SystemCallPlan& call : planned.plan.system_calls) SONDE_TRY_VOID(refuse_differing(tracee, call.site));
  return planned;
}

// Somebody else patched the code, or the loader did (text relocations): what the plan takes from the file is not there.
Result<void> Target::refuse_differing(Tracee& tracee, SitePlan& site) const {
  if (site.method == Method::refused) return {};
  auto same = [&](Addr at, const std::vector<uint8_t>& expected) -> Result<bool> {
    std::vector<uint8_t> there(expected.size());
    SONDE_TRY_VOID(tracee.read(at, there));
    return there == expected;
  };
  if (SONDE_TRY(same(site.patch, site.relied)) && SONDE_TRY(same(site.island, site.island_original))) return {};
  site.method = Method::refused;
  site.refusal = Refusal::differs;
  site.refusal_offset = static_cast<uint32_t>(site.patch - site.entry);
  return {};
}

Result<void> Target::arm(Tracee& tracee, Planned& planned) {
  for (const AddrRange& arena : planned.plan.arenas)
    SONDE_TRY(map(tracee, arena.begin, arena.size(), PROT_READ | PROT_EXEC,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1));
  for (const auto& [at, bytes] : planned.plan.writes) SONDE_TRY_VOID(tracee.write(at, bytes));
  for (SitePlan& plan : planned.plan.sites) {
    uint32_t function = plan.function;
    auto event = planned.events.find(function);
    uint32_t flag = event == planned.events.end() ? 0 : event->second;
    bool internal = !std::ranges::binary_search(planned.chosen.functions, function);
    if (plan.is_point()) {
      const LoadedImage& loaded = images_[planned.image].loaded;
      if (flag && !is_entry(*loaded.image, function, loaded.to_image(plan.entry))) flag = 0;
      internal = false;
    }
    add_site({planned.image, function, std::move(plan), flag, internal, false});
  }
  for (SystemCallPlan& call : planned.plan.system_calls) {
    uint32_t function = call.site.function;
    add_site({planned.image, function, std::move(call.site), kSiteSystemCall, true, false});
  }
  return {};
}

// The site's record; its bytes come later (patch), so that a hit finds it complete.
void Target::add_site(TargetSite added) {
  uint32_t number = static_cast<uint32_t>(sites_.size());
  sites_.push_back(std::move(added));
  const TargetSite& site = sites_.back();
  const SitePlan& plan = site.plan;
  Site& shared = session_sites(session_)[number];
  shared = {plan.entry.value, plan.patch.value, plan.resume.value, 0, plan.loop_head};
  __atomic_store_n(&session_->site_count, number + 1, __ATOMIC_RELEASE);
  if (plan.method == Method::refused) return;
  uint32_t flags = kSiteEnabled | site.event_flag;
  if (site.internal) {
    flags |= kSiteSilent;
  } else {
    if (plan.no_hijack == NoHijack::none) flags |= kSiteHijack;
    if (options_.stacks && !images_[site.image].small_stacks) flags |= kSiteStack;
  }
  shared.flags = flags;
}

// Traps come last of all (arm_traps).
Result<void> Target::patch(Tracee& tracee, const TargetSite& site) {
  const SitePlan& plan = site.plan;
  if (plan.method == Method::refused || plan.method == Method::trap) return {};
  if (!plan.island_bytes.empty()) SONDE_TRY_VOID(tracee.write(plan.island, plan.island_bytes));
  return tracee.write(plan.patch, plan.bytes);
}

// Every image that defines an unwinder's functions, for the personality of the return trampolines.
Result<void> Target::publish_unwinders(Tracee& tracee) {
  std::vector<UnwinderFunctions> found;
  for (const TargetImage& image : images_) {
    if (image.gone || found.size() == kMaxUnwinders) continue;
    const LoadedImage& l = image.loaded;
    auto get_ip = l.image->symbol("_Unwind_GetIP"), set_ip = l.image->symbol("_Unwind_SetIP"),
         set_gr = l.image->symbol("_Unwind_SetGR"), resume = l.image->symbol("_Unwind_Resume");
    if (!get_ip || !set_ip || !set_gr || !resume) {
      if (!image.unwinder) continue;
      const StaticUnwinder& hidden = *image.unwinder;
      get_ip = hidden.get_ip, set_ip = hidden.set_ip, set_gr = hidden.set_gr, resume = hidden.resume;
    }
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
