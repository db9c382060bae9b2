// Sites in a process whose threads run: patched while all of them stand, where none stands in what changes; and taken out.
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <map>
#include <thread>

#include "core/probe/control.h"
#include "core/probe/entries.h"
#include "host/target/attach.h"
#include "host/target/target.h"

namespace sonde::host {

namespace {

using std::chrono::milliseconds;
using std::chrono::nanoseconds;
using std::chrono::steady_clock;

constexpr int kRounds = 40;
constexpr size_t kSitesPerStop = 4096;
constexpr auto kBetweenRounds = milliseconds(2), kMostBetween = milliseconds(64);
constexpr auto kLeaving = milliseconds(10000), kLettingOut = milliseconds(3);
constexpr auto kMoment = std::chrono::microseconds(50);
constexpr unsigned kMostFrames = 10000;
constexpr uint64_t kLongestStack = 8 << 20;  // of a thread, looked through for interrupted code

// Registers as the kernel has them, and the pc from which the thread will go on: an interrupted system call is made again.
constexpr uint64_t kSystemCallBytes = 2;
bool restarts(const user_regs_struct& regs) {
  auto result = static_cast<int64_t>(regs.rax);
  return static_cast<int64_t>(regs.orig_rax) >= 0 &&
         (result == -512 || result == -513 || result == -514 || result == -516);
}

AddrRange window_of(const SitePlan& plan) { return {plan.patch, plan.patch + static_cast<int64_t>(plan.bytes.size())}; }

// Where in the detour the instruction at `original` bytes from the patch is; none: there is no such place.
std::optional<Addr> in_detour(const SitePlan& plan, int64_t original) {
  for (const DetourStep& step : plan.steps)
    if (step.original == original && step.sp_adjust == 0) return plan.detour + step.offset;
  return std::nullopt;
}

// The words of a thread's stack that may be code addresses of somebody who was interrupted.
std::vector<uint64_t> stack_words(pid_t pid, Addr sp, std::span<const Mapping> maps) {
  for (const Mapping& mapping : maps) {
    if (!mapping.range.contains(sp) || !mapping.writable) continue;
    uint64_t size = std::min<uint64_t>(static_cast<uint64_t>(mapping.range.end - sp), kLongestStack);
    std::vector<uint64_t> words(size / 8);
    iovec here{words.data(), words.size() * 8},
        there{reinterpret_cast<void*>(sp.value & ~uint64_t{7}), words.size() * 8};
    ssize_t got = process_vm_readv(pid, &here, 1, &there, 1, 0);
    words.resize(got < 0 ? 0 : static_cast<size_t>(got) / 8);
    return words;
  }
  return {};
}

// Thousands of small writes that lie close together, as few large ones: while they are made nothing runs.
class ManyWrites {
 public:
  void add(Addr at, std::span<const uint8_t> bytes) {
    if (!bytes.empty()) pieces_.push_back({at, bytes});
  }
  Result<void> make(const Tracee& tracee) {
    std::ranges::sort(pieces_, {}, &Piece::at);
    for (size_t first = 0, next; first < pieces_.size(); first = next) {
      Addr begin = pieces_[first].at, end = pieces_[first].end();
      for (next = first + 1; next < pieces_.size() && pieces_[next].at - end < kGap; next++)
        end = std::max(end, pieces_[next].end());
      std::vector<uint8_t> bytes(static_cast<size_t>(end - begin));
      SONDE_TRY_VOID(tracee.read(begin, bytes));
      for (size_t i = first; i < next; i++)
        std::ranges::copy(pieces_[i].bytes, bytes.begin() + (pieces_[i].at - begin));
      SONDE_TRY_VOID(tracee.write(begin, bytes));
    }
    return {};
  }

 private:
  static constexpr int64_t kGap = 2048;
  struct Piece {
    Addr at;
    std::span<const uint8_t> bytes;
    Addr end() const { return at + static_cast<int64_t>(bytes.size()); }
  };
  std::vector<Piece> pieces_;
};

}  // namespace

// Patches those of the sites in whose bytes no thread stands, or from where it can be led into the detour. Value: the others;
// with `all`, none is patched if there are any.
Result<std::vector<uint32_t>> Target::patch_stopped(const StoppedProcess& stopped, Tracee& tracee,
                                                    std::vector<uint32_t> sites, bool all) {
  std::ranges::sort(sites, {}, [&](uint32_t i) { return sites_[i].plan.patch; });
  // The site in the middle of whose bytes an address lies.
  auto at = [&](Addr pc) -> const uint32_t* {
    auto after = std::ranges::upper_bound(sites, pc, {}, [&](uint32_t i) { return sites_[i].plan.patch; });
    if (after == sites.begin()) return nullptr;
    const SitePlan& plan = sites_[*(after - 1)].plan;
    return pc > plan.patch && window_of(plan).contains(pc) ? &*(after - 1) : nullptr;
  };
  std::vector<bool> left(sites_.size());
  std::vector<std::pair<pid_t, user_regs_struct>> moves;
  auto maps = SONDE_TRY(read_maps(pid_));
  for (const StoppedThread& thread : stopped.threads()) {
    Tracee one = SONDE_TRY(Tracee::borrow(thread.tid, pid_));
    user_regs_struct regs = SONDE_TRY(one.regs());
    uint64_t back = restarts(regs) ? kSystemCallBytes : 0;
    if (const uint32_t* site = at(Addr(regs.rip - back)); site || (site = at(Addr(regs.rip)))) {
      auto to = in_detour(sites_[*site].plan, static_cast<int64_t>(regs.rip - sites_[*site].plan.patch.value));
      // The copy of a system call is that instruction itself, so that it can be made again from there too.
      if (to && sites_[*site].plan.method != Method::nops) regs.rip = to->value, moves.emplace_back(thread.tid, regs);
      else left[*site] = true;
    }
    for (uint64_t word : stack_words(pid_, thread.regs.sp(), maps))
      if (const uint32_t* site = at(Addr(word))) left[*site] = true;
  }
  if (all && std::ranges::find(left, true) != left.end()) {
    std::erase_if(sites, [&](uint32_t i) { return !left[i]; });
    return sites;
  }
  for (auto& [tid, regs] : moves) {
    Tracee one = SONDE_TRY(Tracee::borrow(tid, pid_));
    SONDE_TRY_VOID(one.set_regs(regs));
  }
  std::vector<uint32_t> rest;
  ManyWrites writes;
  for (uint32_t i : sites) {
    const SitePlan& plan = sites_[i].plan;
    if (left[i]) {
      rest.push_back(i);
      continue;
    }
    writes.add(plan.island, plan.island_bytes);
    writes.add(plan.patch, plan.bytes);
  }
  SONDE_TRY_VOID(writes.make(tracee));
  return rest;
}

// First the program's system calls about handlers, all of them, and the handlers that are installed already; then functions, a
// bounded number in each stop.
Result<void> Target::arm_running(const Selector& select, nanoseconds* longest_pause) {
  Tracee running = SONDE_TRY(Tracee::running(pid_));
  std::vector<Planned> planned;
  SONDE_TRY(look(running, select, &planned));
  size_t first = sites_.size();
  SONDE_TRY_VOID(place(running, planned));
  std::vector<uint32_t> calls, functions;
  for (auto i = static_cast<uint32_t>(first); i < sites_.size(); i++)
    if (sites_[i].plan.method != Method::refused)
      (sites_[i].event_flag & kSiteSystemCall ? calls : functions).push_back(i);
  // All in one stop: a handler without an entrance must not interrupt the copy of one.
  bool wrapped = false;
  std::vector<uint32_t> occupied;
  for (int round = 0; round < kRounds && !wrapped; round++) {
    if (round) std::this_thread::sleep_for(kBetweenRounds);
    StoppedProcess stopped = SONDE_TRY(StoppedProcess::stop(pid_, longest_pause));
    Tracee tracee = SONDE_TRY(Tracee::borrow(stopped.threads().front().tid, pid_));
    occupied = SONDE_TRY(patch_stopped(stopped, tracee, calls, true));
    if ((wrapped = occupied.empty())) SONDE_TRY_VOID(wrap_handlers(tracee));
  }
  // Where a thread never left one of them the agent minds none, and handlers may see where they interrupted the functions.
  minds_calls_ = wrapped;
  if (!wrapped) refuse_occupied(calls);
  for (int round = 0; round < kRounds && !functions.empty(); round++) {
    if (round) std::this_thread::sleep_for(kBetweenRounds);
    std::vector<uint32_t> rest;
    for (size_t begin = 0; begin < functions.size(); begin += kSitesPerStop) {
      auto from = functions.begin() + static_cast<ptrdiff_t>(begin);
      auto to = functions.begin() + static_cast<ptrdiff_t>(std::min(begin + kSitesPerStop, functions.size()));
      StoppedProcess stopped = SONDE_TRY(StoppedProcess::stop(pid_, longest_pause));
      Tracee tracee = SONDE_TRY(Tracee::borrow(stopped.threads().front().tid, pid_));
      auto left = SONDE_TRY(patch_stopped(stopped, tracee, {from, to}, false));
      rest.insert(rest.end(), left.begin(), left.end());
    }
    functions = std::move(rest);
  }
  refuse_occupied(functions);
  return {};
}

void Target::refuse_occupied(std::span<const uint32_t> sites) {
  for (uint32_t i : sites) {
    SitePlan& plan = sites_[i].plan;
    plan.method = Method::refused;
    plan.refusal = Refusal::occupied;
    plan.refusal_offset = static_cast<uint32_t>(plan.patch - plan.entry);
    __atomic_store_n(&session_sites(session_)[i].flags, 0, __ATOMIC_RELAXED);
  }
}

namespace {

template <class T>
Result<std::vector<T>> read_array(const Tracee& tracee, Addr at, size_t count) {
  std::vector<T> values(count);
  SONDE_TRY_VOID(tracee.read(at, {reinterpret_cast<uint8_t*>(values.data()), count * sizeof(T)}));
  return values;
}

}  // namespace

// Where a thread that stands in a detour goes on in the code itself when that has come back: in front of the function while the
// detour has only made room on the stack, else between two of the displaced instructions, also where it waits in a system
// call for as long as it likes. Without value: it does not stand there, or in the middle of what stands for one instruction.
std::optional<Target::WayOut> Target::way_out(Addr pc) const {
  if (std::ranges::none_of(mapped_, [&](AddrRange range) { return range.contains(pc); })) return std::nullopt;
  for (const TargetSite& site : sites_) {
    const SitePlan& plan = site.plan;
    if (site.gone || plan.method == Method::refused) continue;
    if (pc < plan.detour || pc >= plan.detour + static_cast<int64_t>(plan.detour_bytes.size())) continue;
    bool call = site.event_flag & kSiteSystemCall;
    for (const DetourStep& step : plan.steps) {
      if (plan.detour + step.offset != pc) continue;
      if (step.original < 0) return WayOut{plan.patch, step.sp_adjust, call};
      if (!step.sp_adjust) return WayOut{plan.patch + step.original, 0, call};
    }
  }
  return std::nullopt;
}

namespace {

// Where the stacks of threads are that the C library or the kernel has made, and their tops.
Result<std::vector<StackTop>> stack_tops(const StoppedProcess& stopped, pid_t pid) {
  std::vector<StackTop> tops;
  auto maps = SONDE_TRY(read_maps(pid));
  for (const StoppedThread& thread : stopped.threads()) {
    Tracee one = SONDE_TRY(Tracee::borrow(thread.tid, pid));
    Addr sp = thread.regs.sp(), thread_pointer(SONDE_TRY(one.regs()).fs_base);
    auto mapping = std::ranges::find_if(maps, [&](const Mapping& m) { return m.range.contains(sp); });
    if (mapping == maps.end()) continue;
    // glibc has the thread's own data above its stack, and below it a page that is nobody's.
    bool guarded = mapping != maps.begin() && std::prev(mapping)->range.end == mapping->range.begin &&
                   !std::prev(mapping)->readable && !std::prev(mapping)->writable;
    bool made =
        mapping->path == "[stack]" || (guarded && sp < thread_pointer && mapping->range.contains(thread_pointer));
    if (made) tops.push_back({mapping->range.begin, sp});
  }
  return tops;
}

}  // namespace

// Whether the thread runs the engine's code or a detour, or somebody on its stack does.
bool Target::is_inside(StackTarget& images, const StoppedThread& thread, ProcessMemory& memory) const {
  auto ours = [&](Addr pc) {
    const LoadedImage* image = images.image_at(pc);
    return (image && image->image->build_id() == agent_.image->build_id()) ||
           std::ranges::any_of(mapped_, [&](AddrRange range) { return range.contains(pc); });
  };
  if (ours(thread.regs.pc())) return true;
  ThreadStack stack = images.walk_now(thread, {.max_frames = kMostFrames}, memory);
  return std::ranges::any_of(stack.frames,
                             [&](const Frame& f) { return f.recovered & kInDetour || ours(f.code().lookup()); });
}

// Gives every hooked slot its return address back. Value: activations whose slot is not where they were hooked: left by a
// jump, or moved with their stack.
Result<size_t> Target::release_slots(Tracee& tracee) const {
  uint32_t fresh = SONDE_TRY(tracee.read_as<uint32_t>(agent_address(agent_.fresh_entries)));
  size_t count = std::min<size_t>(fresh, kTrampolines), elsewhere = 0;
  auto entries = SONDE_TRY(read_array<ReturnEntry>(tracee, agent_address(agent_.entries), count));
  auto owners = SONDE_TRY(read_array<Ownership>(tracee, agent_address(agent_.owners), count));
  uint64_t trampolines = agent_address(agent_.trampolines).value;
  for (uint32_t i = 0; i < count; i++) {
    if (owners[i].state != EntryState::in_use) continue;
    auto slot = tracee.read_as<uint64_t>(Addr(entries[i].slot));
    if (slot && is_trampoline_of(trampolines, i, *slot))
      SONDE_TRY_VOID(tracee.write_as(Addr(entries[i].slot), entries[i].real));
    else elsewhere++;
  }
  return elsewhere;
}

// Whether some word of the process's memory leads to a return trampoline: a copy of a stack, whoever made it. Below the tops of
// stacks there are none: what is there is left over from calls that a jump has ended.
Result<bool> Target::holds_trampolines(pid_t pid, std::span<const StackTop> tops) const {
  constexpr uint64_t kRedZone = 128;
  uint64_t begin = agent_address(agent_.trampolines).value, size = uint64_t{kTrampolines} * kTrampolineStride;
  std::vector<uint64_t> words(1 << 17);
  for (const Mapping& mapping : SONDE_TRY(read_maps(pid))) {
    if (!mapping.writable || mapping.shared) continue;
    if (std::ranges::any_of(mapped_, [&](AddrRange range) { return range.overlaps(mapping.range); })) continue;
    if (mapping.path == agent_.path) continue;
    uint64_t from = mapping.range.begin.value;
    for (const StackTop& top : tops)  // the main one may have grown meanwhile
      if (mapping.range.contains(top.sp) && (mapping.range.begin == top.begin || mapping.path == "[stack]"))
        from = (top.sp.value - kRedZone) & ~uint64_t{7};
    for (uint64_t at = from; at < mapping.range.end.value; at += words.size() * 8) {
      uint64_t bytes = std::min<uint64_t>(words.size() * 8, mapping.range.end.value - at);
      iovec here{words.data(), bytes}, there{reinterpret_cast<void*>(at), bytes};
      ssize_t got = process_vm_readv(pid, &here, 1, &there, 1, 0);
      for (ssize_t i = 0; i < got / 8; i++)
        if (words[static_cast<size_t>(i)] - begin < size) return true;
    }
  }
  return false;
}

// The program's code, byte for byte: that of functions, or what its system calls about handlers stood for.
Result<void> Target::restore_code(Tracee& tracee, bool calls) const {
  ManyWrites writes;
  for (const TargetSite& site : sites_) {
    const SitePlan& plan = site.plan;
    if (site.gone || plan.method == Method::refused || calls != !!(site.event_flag & kSiteSystemCall)) continue;
    writes.add(plan.patch, plan.original);
    writes.add(plan.island, plan.island_original);
  }
  return writes.make(tracee);
}

// Functions come back first. While anybody is inside, handlers keep their entrances, so that they see the program's own pc, and
// the system calls by which it would find them go on coming by the agent. Both come back together, with the slots.
Result<std::string> Target::detach(pid_t pid, nanoseconds* longest_pause) {
  StackTarget images = SONDE_TRY(StackTarget::of_images(pid));
  auto deadline = steady_clock::now() + kLeaving;
  auto between = kBetweenRounds;
  size_t elsewhere = 0;
  std::vector<StackTop> tops;
  for (bool first = true;; first = false) {
    bool late = steady_clock::now() > deadline;
    {
      StoppedProcess stopped = SONDE_TRY(StoppedProcess::stop(pid, longest_pause));
      Tracee tracee = SONDE_TRY(Tracee::borrow(stopped.threads().front().tid, pid));
      ProcessMemory memory(pid, SONDE_TRY(read_maps(pid)));
      if (first) SONDE_TRY_VOID(restore_code(tracee, false));
      std::map<pid_t, WayOut> ways_out;
      std::vector<pid_t> inside;
      auto look_at = [&](StoppedThread thread) {
        if (auto way = way_out(thread.regs.pc())) {
          ways_out.emplace(thread.tid, *way);
          thread.regs.set(X86_64::rip, way->pc.value);
          thread.regs.set(X86_64::rsp, (thread.regs.sp() + way->sp_adjust).value);
        }
        if (is_inside(images, thread, memory)) inside.push_back(thread.tid);
      };
      for (const StoppedThread& thread : stopped.threads()) look_at(thread);
      // Most need a few more instructions, and would be the last of many to get a processor.
      auto patience = steady_clock::now() + kLettingOut;
      for (size_t turn = 0; !inside.empty() && steady_clock::now() < patience; turn++) {
        pid_t tid = inside[turn % inside.size()];
        std::erase(inside, tid);
        ways_out.erase(tid);
        bool runs = SONDE_TRY(stopped.let_run(tid, kMoment));
        memory.forget();
        if (runs) look_at(*std::ranges::find(stopped.threads(), tid, &StoppedThread::tid));
      }
      bool last = inside.empty() || late;
      if (last) {
        SONDE_TRY_VOID(restore_code(tracee, true));
        SONDE_TRY_VOID(set_flag(tracee, kControlBareHandlers, true));
        SONDE_TRY_VOID(unwrap_handlers(tracee, pid));
      }
      for (auto& [tid, way] : ways_out) {
        if (way.call && !last) continue;
        Tracee one = SONDE_TRY(Tracee::borrow(tid, pid));
        user_regs_struct regs = SONDE_TRY(one.regs());
        regs.rip = way.pc.value, regs.rsp += static_cast<uint64_t>(way.sp_adjust);
        SONDE_TRY_VOID(one.set_regs(regs));
      }
      if (inside.empty()) {
        elsewhere = SONDE_TRY(release_slots(tracee));
        if (elsewhere) tops = SONDE_TRY(stack_tops(stopped, pid));
        break;
      }
    }
    if (late)
      return fmt::format(
          "a thread of process {} stayed in the engine's code, so calls that were open return through it, and it "
          "stays in memory, without effect",
          pid);
    std::this_thread::sleep_for(between);
    between = std::min(between * 2, kMostBetween);
  }
  if (elsewhere && SONDE_TRY(holds_trampolines(pid, tops)))
    return fmt::format(
        "process {} has copies of stacks with open calls, which return through the engine: it stays in memory, "
        "without effect",
        pid);
  if (pid != pid_ || !options_.handle) return std::string();
  LentThread lent = SONDE_TRY(LentThread::find(pid));
  // From here on nobody else may give that memory back: it may be the program's by then.
  SONDE_TRY_VOID(
      lent.tracee().write_as(agent_address(agent_.control) + offsetof(AgentControl, mapped_count), uint32_t{0}));
  for (AddrRange range : mapped_)
    SONDE_TRY(lent.tracee().system_call(lent.syscall_instruction(), SYS_munmap, {range.begin.value, range.size()}));
  if (SONDE_TRY(lent.call("dlclose", {options_.handle.value})) != 0)
    return fmt::format("process {} could not unload {}", pid, agent_.path);
  return std::string();
}

}  // namespace sonde::host
