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
constexpr auto kBetweenRounds = milliseconds(2);
constexpr auto kLeaving = milliseconds(3000);
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

class Stopwatch {
 public:
  explicit Stopwatch(nanoseconds* longest) : longest_(longest) {}
  ~Stopwatch() { *longest_ = std::max<nanoseconds>(*longest_, steady_clock::now() - begin_); }

 private:
  nanoseconds* longest_;
  steady_clock::time_point begin_ = steady_clock::now();
};

}  // namespace

// Patches those of the sites in whose bytes no thread stands, or from where it can be led into the detour. Value: the others.
Result<std::vector<uint32_t>> Target::patch_stopped(const StoppedProcess& stopped, Tracee& tracee,
                                                    std::vector<uint32_t> sites) {
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

Result<void> Target::arm_running(const Selector& select, nanoseconds* longest_pause) {
  Tracee running = SONDE_TRY(Tracee::running(pid_));
  std::vector<Planned> planned;
  SONDE_TRY(look(running, select, &planned));
  size_t first = sites_.size();
  SONDE_TRY_VOID(place(running, planned));
  std::vector<uint32_t> todo;
  for (auto i = static_cast<uint32_t>(first); i < sites_.size(); i++)
    if (sites_[i].plan.method != Method::refused) todo.push_back(i);
  for (int round = 0; round < kRounds && !todo.empty(); round++) {
    if (round) std::this_thread::sleep_for(kBetweenRounds);
    Stopwatch watch(longest_pause);
    StoppedProcess stopped = SONDE_TRY(StoppedProcess::stop(pid_));
    Tracee tracee = SONDE_TRY(Tracee::borrow(stopped.threads().front().tid, pid_));
    todo = SONDE_TRY(patch_stopped(stopped, tracee, std::move(todo)));
  }
  for (uint32_t i : todo) {
    SitePlan& plan = sites_[i].plan;
    plan.method = Method::refused;
    plan.refusal = Refusal::occupied;
    plan.refusal_offset = static_cast<uint32_t>(plan.patch - plan.entry);
    __atomic_store_n(&session_sites(session_)[i].flags, 0, __ATOMIC_RELAXED);
  }
  return {};
}

namespace {

template <class T>
Result<std::vector<T>> read_array(const Tracee& tracee, Addr at, size_t count) {
  std::vector<T> values(count);
  SONDE_TRY_VOID(tracee.read(at, {reinterpret_cast<uint8_t*>(values.data()), count * sizeof(T)}));
  return values;
}

}  // namespace

// Whether the thread runs the engine's code or a detour, or somebody on its stack does.
Result<bool> Target::is_inside(StackTarget& images, const StoppedThread& thread) const {
  auto ours = [&](Addr pc) {
    const LoadedImage* image = images.image_at(pc);
    return (image && image->image->build_id() == agent_.image->build_id()) ||
           std::ranges::any_of(mapped_, [&](AddrRange range) { return range.contains(pc); });
  };
  if (ours(Addr(thread.regs.pc()))) return true;
  ThreadStack stack = SONDE_TRY(images.walk_now(thread, {.max_frames = kMostFrames}));
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

// Whether some word of the process's memory leads to a return trampoline: a copy of a stack, whoever made it.
Result<bool> Target::holds_trampolines(pid_t pid) const {
  uint64_t begin = agent_address(agent_.trampolines).value, size = uint64_t{kTrampolines} * kTrampolineStride;
  std::vector<uint64_t> words(1 << 17);
  for (const Mapping& mapping : SONDE_TRY(read_maps(pid))) {
    if (!mapping.writable || mapping.shared) continue;
    if (std::ranges::any_of(mapped_, [&](AddrRange range) { return range.overlaps(mapping.range); })) continue;
    if (mapping.path == agent_.path) continue;
    for (uint64_t at = mapping.range.begin.value; at < mapping.range.end.value; at += words.size() * 8) {
      uint64_t bytes = std::min<uint64_t>(words.size() * 8, mapping.range.end.value - at);
      iovec here{words.data(), bytes}, there{reinterpret_cast<void*>(at), bytes};
      ssize_t got = process_vm_readv(pid, &here, 1, &there, 1, 0);
      for (ssize_t i = 0; i < got / 8; i++)
        if (words[static_cast<size_t>(i)] - begin < size) return true;
    }
  }
  return false;
}

Result<std::string> Target::detach(pid_t pid, Addr handle, nanoseconds* longest_pause) {
  StackTarget images = SONDE_TRY(StackTarget::of_images(pid));
  auto deadline = steady_clock::now() + kLeaving;
  size_t elsewhere = 0;
  for (bool first = true;; first = false) {
    {
      Stopwatch watch(longest_pause);
      StoppedProcess stopped = SONDE_TRY(StoppedProcess::stop(pid));
      Tracee tracee = SONDE_TRY(Tracee::borrow(stopped.threads().front().tid, pid));
      ManyWrites writes;
      for (const TargetSite& site : sites_) {
        const SitePlan& plan = site.plan;
        if (!first || site.gone || plan.method == Method::refused) continue;
        writes.add(plan.patch, plan.original);
        writes.add(plan.island, plan.island_original);
      }
      SONDE_TRY_VOID(writes.make(tracee));
      bool inside = false;
      for (const StoppedThread& thread : stopped.threads()) inside |= SONDE_TRY(is_inside(images, thread));
      if (!inside) {
        elsewhere = SONDE_TRY(release_slots(tracee));
        break;
      }
    }
    if (steady_clock::now() > deadline)
      return fmt::format(
          "a thread of process {} stayed in the engine's code, so calls that were open return through it, and it "
          "stays in memory, without effect",
          pid);
    std::this_thread::sleep_for(kBetweenRounds);
  }
  if (elsewhere && SONDE_TRY(holds_trampolines(pid)))
    return fmt::format(
        "process {} has copies of stacks with open calls, which return through the engine: it stays in memory, "
        "without effect",
        pid);
  if (!handle) return std::string();
  LentThread lent = SONDE_TRY(LentThread::find(pid));
  for (AddrRange range : mapped_)
    SONDE_TRY(lent.tracee().system_call(lent.syscall_instruction(), SYS_munmap, {range.begin.value, range.size()}));
  if (SONDE_TRY(lent.call("dlclose", {handle.value})) != 0)
    return fmt::format("process {} could not unload {}", pid, agent_.path);
  return std::string();
}

}  // namespace sonde::host
