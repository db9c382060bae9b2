// Calls in flight: read from the agent's entries in the target's memory, without stopping it.
#include <fmt/format.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <optional>
#include <unordered_map>

#include "core/probe/entries.h"
#include "core/probe/stack_capture.h"
#include "host/target/target.h"

namespace sonde::host {

namespace {

template <class T>
Result<std::vector<T>> read_array(pid_t pid, Addr at, size_t count) {
  std::vector<T> values(count);
  iovec here{values.data(), count * sizeof(T)}, there{reinterpret_cast<void*>(at.value), count * sizeof(T)};
  if (count && process_vm_readv(pid, &here, 1, &there, 1, 0) != static_cast<ssize_t>(here.iov_len))
    return fail_errno(fmt::format("read the calls in flight of process {}", pid));
  return values;
}

// As the agent knows it: what the thread's last sigaltstack() said.
Result<AddrRange> signal_stack_of(pid_t pid, Addr thread_area, uint32_t tid) {
  auto states = SONDE_TRY(read_array<ThreadState>(pid, thread_area, kThreadSlots));
  for (const ThreadState& state : states) {
    if (state.pid != static_cast<uint32_t>(pid) || state.tid != tid || state.scratch - 1 >= kMaxThreads) continue;
    auto* scratch = thread_scratch(reinterpret_cast<void*>(thread_area.value), &state);
    return SONDE_TRY(read_array<AddrRange>(pid, Addr(reinterpret_cast<uint64_t>(&scratch->alternate)), 1))[0];
  }
  return AddrRange{};
}

// Return slots, by pages: there may be a hundred thousand on a few of them, and a process that ends waits for the answer.
class Slots {
 public:
  explicit Slots(pid_t pid) : pid_(pid) {}

  std::optional<uint64_t> read(uint64_t address) {
    constexpr uint64_t kPageBytes = 4096, kWord = sizeof(uint64_t);
    if (address % kWord) return one(address);  // a stack that is not aligned
    auto [page, added] = pages_.try_emplace(address / kPageBytes);
    if (added)
      if (auto words = read_array<uint64_t>(pid_, Addr(address & ~(kPageBytes - 1)), kPageBytes / kWord))
        page->second = std::move(*words);
    if (page->second.empty()) return std::nullopt;
    return page->second[address % kPageBytes / kWord];
  }

 private:
  std::optional<uint64_t> one(uint64_t address) const {
    auto word = read_array<uint64_t>(pid_, Addr(address), 1);
    if (!word) return std::nullopt;
    return (*word)[0];
  }

  pid_t pid_;
  std::unordered_map<uint64_t, std::vector<uint64_t>> pages_;  // empty: cannot be read
};

}  // namespace

Result<std::vector<InFlight>> Target::in_flight(pid_t pid) const {
  auto fresh = SONDE_TRY(read_array<uint32_t>(pid, agent_address(agent_.fresh_entries), 1));
  size_t count = std::min<size_t>(fresh[0], kTrampolines);
  auto entries = SONDE_TRY(read_array<ReturnEntry>(pid, agent_address(agent_.entries), count));
  auto calls = SONDE_TRY(read_array<ActiveCall>(pid, agent_address(agent_.calls), count));
  auto owners = SONDE_TRY(read_array<Ownership>(pid, agent_address(agent_.owners), count));
  auto area =
      SONDE_TRY(read_array<uint64_t>(pid, agent_address(agent_.control) + offsetof(AgentControl, thread_area), 1));
  Addr at_mark(reinterpret_cast<uint64_t>(process_mark(reinterpret_cast<void*>(area[0]))));
  auto mark = SONDE_TRY(read_array<ProcessMark>(pid, at_mark, 1));
  // Of a forked child: what runs on the stack of the thread that forked goes on there, as the caller of what the child calls; what
  // other threads had on theirs is only a copy.
  uint64_t begun = mark[0].begun_ticks ? mark[0].begun_ticks : ~uint64_t{0};  // no thread has come yet
  AddrRange own_stack;
  for (const Mapping& mapping : SONDE_TRY(read_maps(pid)))
    if (mapping.range.contains(Addr(mark[0].first_sp))) own_stack = mapping.range;
  auto sums = SONDE_TRY(read_array<SumCall>(pid, agent_address(agent_.sum_calls), options_.sum ? count : 0));
  sums.resize(count);
  uint64_t trampolines = agent_address(agent_.trampolines).value;

  // Which entries a live slot leads to: its trampoline's, and by links those that left the slot to it by tail calls.
  Slots slots(pid);
  std::vector<bool> alive(count);
  for (size_t i = 0; i < count; i++) {
    if (owners[i].state != EntryState::in_use) continue;
    auto slot = slots.read(entries[i].slot);
    if (!slot || !is_trampoline_of(trampolines, static_cast<uint32_t>(i), *slot)) continue;
    size_t at = i;
    for (uint32_t steps = 0; steps <= kMaxTailChain && at < count; steps++) {
      alive[at] = true;
      if (!calls[at].link) break;
      at = calls[at].link - 1;
    }
  }
  struct OfThread {
    bool runs;
    AddrRange signal_stack;
  };
  std::unordered_map<uint32_t, OfThread> threads;
  std::vector<InFlight> found;
  for (size_t i = 0; i < count; i++) {
    const ActiveCall& call = calls[i];
    uint32_t tid = owners[i].owner;
    if (owners[i].state != EntryState::in_use || call.site == kNoSite) continue;
    if (call.entry_ticks < begun) {
      if (alive[i] && own_stack.contains(Addr(entries[i].slot)))
        found.push_back({call.site,
                         static_cast<uint32_t>(pid),
                         call.entry_ticks,
                         entries[i].slot,
                         sums[i],
                         ExitKind::inherited,
                         {}});
      continue;
    }
    auto [thread, added] = threads.try_emplace(tid);
    auto& [runs, signal_stack] = thread->second;
    if (added) {
      runs = access(fmt::format("/proc/{}/task/{}", pid, tid).c_str(), F_OK) == 0;
      signal_stack = SONDE_TRY(signal_stack_of(pid, Addr(area[0]), tid));
    }
    ExitKind kind = alive[i] ? ExitKind::unfinished : ExitKind::abandoned;
    found.push_back({call.site, tid, call.entry_ticks, entries[i].slot, sums[i], runs ? kind : ExitKind::thread_ended,
                     signal_stack});
  }
  return found;
}

}  // namespace sonde::host
