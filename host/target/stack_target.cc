// A process: tables are made ready first, as that may take long; then each thread is stopped, and its picture taken. Should
// libraries or detours have changed meanwhile, once more from the beginning.
#include "host/target/stack_target.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <optional>
#include <set>

#include "core/isa/code.h"
#include "core/probe/control.h"
#include "core/walk/recover.h"
#include "host/check/proven_table.h"
#include "host/target/agent_view.h"
#include "host/target/core_file.h"

namespace sonde::host {
namespace {

constexpr int kAttempts = 4;
// What is copied of a stack at first, and of one that goes on behind that. Where a stack ends nobody knows: a fiber's may lie
// in the middle of a heap of gigabytes.
constexpr uint64_t kStackCopies[] = {uint64_t{1} << 19, uint64_t{1} << 23, uint64_t{256} << 20};
constexpr size_t kMaxStacksPerThread = 8;  // its own, signal stacks, fibers' under them

bool same_code(const std::vector<Mapping>& a, const std::vector<Mapping>& b) {
  auto code = [](const std::vector<Mapping>& all) {
    std::vector<std::pair<AddrRange, std::string>> ranges;
    for (const Mapping& m : all)
      if (m.executable) ranges.emplace_back(m.range, m.path);
    return ranges;
  };
  return code(a) == code(b);
}

// Copies whole stacks, and the return entries and interrupted stacks that the copied words lead to.
class StackCopier {
 public:
  StackCopier(SnapshotMemory& snapshot, ProcessMemory& process, const TableArena& arena,
              std::span<const Addr> signal_returns, uint64_t limit)
      : snapshot_(snapshot), process_(process), arena_(arena), signal_returns_(signal_returns), limit_(limit) {}

  void copy(const RegSet<X86_64>& regs) {
    for (unsigned reg = 0; reg < X86_64::kRegs; reg++)
      if (regs.has(reg)) copy_entry(regs.get(reg));
    std::vector<Addr> todo = {regs.sp()};
    for (size_t i = 0; i < todo.size() && i < kMaxStacksPerThread; i++) copy_stack(todo[i], &todo);
  }

  // Something was left out that may belong to a stack.
  bool cut() const { return cut_; }

 private:
  void copy_stack(Addr sp, std::vector<Addr>* found) {
    const Mapping* mapping = process_.mapping(sp);
    if (!mapping || !mapping->writable) process_.reload_mappings(), mapping = process_.stack_mapping(sp);
    if (!mapping || snapshot_.holds(std::max(sp, mapping->range.begin))) return;
    Addr begin = std::max(mapping->range.begin, sp - X86_64::kRedZone);
    begin = Addr(begin.value & ~uint64_t{7});
    uint64_t size = static_cast<uint64_t>(mapping->range.end - begin);
    cut_ |= size > limit_;
    auto bytes = snapshot_.copy(begin, std::min(size, limit_));
    for (size_t at = 0; at + 8 <= bytes.size(); at += 8) {
      uint64_t word;
      std::memcpy(&word, bytes.data() + at, 8);
      word = copy_entry(word);  // a handler's return may be hooked as well
      if (std::ranges::find(signal_returns_, Addr(word)) == signal_returns_.end()) continue;
      size_t sp_at = at + 8 + static_cast<size_t>(Code<X86_64>::signal_register(X86_64::rsp));
      if (sp_at + 8 > bytes.size()) continue;
      std::memcpy(&word, bytes.data() + sp_at, 8);
      found->push_back(Addr(word));
    }
  }

  // What the word stands for: entries may in turn hold trampolines.
  uint64_t copy_entry(uint64_t word) {
    for (int i = 0; i < 16 && arena_.trampolines; i++) {
      uint64_t offset = trampoline_offset(arena_, Addr(word));
      if (offset >= uint64_t{kTrampolines} * kTrampolineStride) return word;
      Addr entry(arena_.entries + offset / kTrampolineStride * kTrampolineStride);
      if (!snapshot_.holds(entry)) copy_around(entry);
      if (!snapshot_.read_as(entry, &word)) return word;
    }
    return word;
  }

  // Calls that are open have entries side by side: with a hundred thousand of them the thread stands still for each copy.
  void copy_around(Addr entry) {
    constexpr uint64_t kTogether = 4096;
    AddrRange all = entries_of(arena_);
    Addr begin = std::max(all.begin, Addr(entry.value & ~(kTogether - 1)));
    snapshot_.copy(begin, std::min(kTogether, static_cast<uint64_t>(all.end - begin)));
  }

  SnapshotMemory& snapshot_;
  ProcessMemory& process_;
  const TableArena& arena_;
  std::span<const Addr> signal_returns_;
  uint64_t limit_;
  bool cut_ = false;
};

std::string ended(pid_t pid) { return fmt::format("process {} ended while its stacks were copied", pid); }

}  // namespace

const LoadedImage* StackTarget::image_at(Addr pc) const {
  for (const LoadedImage& image : images_)
    if (image.range.contains(pc)) return &image;
  return nullptr;
}

std::string StackTarget::file_at(Addr pc) const {
  for (const auto& [range, path] : files_)
    if (range.contains(pc)) return path;
  return "";
}

Result<void> StackTarget::describe(TargetMemory& memory, std::span<const Mapping> mappings) {
  ArenaInput input;
  input.specials = mapped_specials(mappings);
  signal_returns_.clear();
  for (const LoadedImage& loaded : images_) {
    if (auto agent = view_agent(loaded)) {
      input.trampolines = agent->trampolines, input.entries = agent->entries, agent_control_ = agent->control;
      input.specials.insert(input.specials.end(), agent->specials.begin(), agent->specials.end());
      published_arena_ = published_arena(*agent, memory);
      if (published_arena_) {
        auto detours = published_detours(published_arena_, memory);
        if (detours) input.detours = std::move(*detours);
        else problems_.push_back(std::move(detours.error().message));
      }
    }
  }
  for (const LoadedImage& loaded : images_) {
    auto table = load_proven_table(*loaded.image);
    if (!table)
      problems_.push_back(fmt::format("{}: no unwind table: {}", loaded.image->path(), table.error().message));
    input.images.push_back({loaded, table ? *table : nullptr});
    std::optional<Table> view;
    if (table) view = (*table)->table();
    auto specials = find_specials(loaded, view ? &*view : nullptr);
    for (const ArenaSpecial& special : specials)
      if (special.kind == SpecialKind::signal_return) signal_returns_.push_back(special.range.begin);
    input.specials.insert(input.specials.end(), specials.begin(), specials.end());
  }
  arena_ = SONDE_TRY(build_arena(input));
  cache_ = std::make_unique<RowCache>();
  return {};
}

Result<Visit> StackTarget::take_thread(pid_t tid, const std::shared_ptr<ProcessMemory>& process) {
  std::optional<StoppedThread> found;
  std::shared_ptr<SnapshotMemory> snapshot;
  for (uint64_t limit : kStackCopies) {
    bool cut = false;
    auto copy = [&](const StoppedThread& thread) {
      snapshot = std::make_shared<SnapshotMemory>(process);
      StackCopier copier(*snapshot, *process, *arena(), signal_returns_, limit);
      copier.copy(thread.regs);
      cut = copier.cut();
      found = thread;
    };
    std::chrono::nanoseconds pause{0};
    Visit visit = SONDE_TRY(visit_thread(pid_, tid, copy, &pause));
    pauses_.push_back(pause);
    if (visit == Visit::does_not_stop || (visit == Visit::gone && !found)) return visit;
    snapshot->use_files(images_);
    // A first look: did the stack end within the copy?
    if (!cut) break;
    WalkOptions all{.max_frames = static_cast<unsigned>(limit / 8), .reliable_only = true};
    if (walk(*found, *snapshot, all).result.reason != Reason::stack_out_of_range) break;
  }
  threads_.push_back(std::move(*found));
  memories_.push_back(std::move(snapshot));
  return Visit::done;
}

// Threads may come until nobody new is found.
Result<void> StackTarget::take_threads(const std::shared_ptr<ProcessMemory>& process) {
  std::set<pid_t> seen;
  for (bool any = true; any;) {
    any = false;
    for (pid_t tid : live_threads(pid_)) {
      if (!seen.insert(tid).second) continue;
      any = true;
      if (SONDE_TRY(take_thread(tid, process)) != Visit::does_not_stop) continue;
      unstopped_++;
      problems_.push_back(
          fmt::format("thread {} does not stop: it waits in the kernel for a vfork child or a device "
                      "(state {}); its stack is not shown, try again later",
                      tid, status_field(tid, "State")));
    }
  }
  if (threads_.empty()) return fail(unstopped_ ? problems_.back() : ended(pid_));
  std::ranges::sort(pauses_);
  return {};
}

Result<StackTarget> StackTarget::of_process(pid_t pid) {
  pid = SONDE_TRY(check_traceable(pid));
  for (int attempt = 0; attempt < kAttempts; attempt++) {
    StackTarget target;
    target.pid_ = pid;
    // Of a leader that has ended before its threads, /proc shows no memory.
    auto threads = live_threads(pid);
    pid_t any = threads.empty() ? pid : threads.front();
    auto before = read_maps(any);
    if (!before) return status_field(any, "Name").empty() ? fail(ended(pid)) : std::unexpected(not_permitted(any));
    target.images_ = SONDE_TRY(loaded_images(any, &target.problems_));
    auto process = std::make_shared<ProcessMemory>(any, *before);
    SONDE_TRY_VOID(target.describe(*process, *before));
    process->forget();

    for (const Mapping& m : *before)
      if (!m.path.empty()) target.files_.emplace_back(m.range, m.path);
    SONDE_TRY_VOID(target.take_threads(process));
    auto now = read_maps(any);
    if (!now) return fail(ended(pid));
    uint64_t tables = target.published_arena_.value;
    process->forget();
    if (target.agent_control_) process->read_as(target.agent_control_ + offsetof(AgentControl, tables), &tables);
    if (!same_code(*before, *now) || tables != target.published_arena_.value) continue;
    return target;
  }
  return fail(fmt::format("process {} loads and unloads libraries faster than they can be read; try again", pid));
}

Result<StackTarget> StackTarget::of_images(pid_t pid) {
  StackTarget target;
  target.pid_ = SONDE_TRY(check_traceable(pid));
  target.images_ = SONDE_TRY(loaded_images(pid, &target.problems_));
  auto maps = read_maps(pid);
  if (!maps) return std::unexpected(not_permitted(pid));
  ProcessMemory memory(pid, *maps);
  SONDE_TRY_VOID(target.describe(memory, *maps));
  return target;
}

Result<ThreadStack> StackTarget::walk_now(const StoppedThread& thread, const WalkOptions& options) {
  auto maps = read_maps(pid_);
  if (!maps) return fail(ended(pid_));
  ProcessMemory memory(pid_, *std::move(maps));
  return walk(thread, memory, options);
}

ThreadStack StackTarget::walk_now(const StoppedThread& thread, const WalkOptions& options, ProcessMemory& memory) {
  return walk(thread, memory, options);
}

Result<StackTarget> StackTarget::of_core(const std::string& path, const std::string& executable) {
  StackTarget target;
  auto core = SONDE_TRY(CoreFile::open(path));
  target.pid_ = core->pid();
  target.threads_.assign(core->threads().begin(), core->threads().end());
  for (StoppedThread& thread : target.threads_)
    if (thread.name.empty()) thread.name = core->program();
  target.signal_ = core->signal();
  target.files_ = core->files();
  target.images_ = core->load_images(executable, &target.problems_);
  target.doubtful_.assign(core->doubtful().begin(), core->doubtful().end());
  SONDE_TRY_VOID(target.describe(*core, {}));
  target.memories_.assign(target.threads_.size(), std::move(core));
  return target;
}

// A frame in a file that may be another than the one that ran is found as if it were that one, and not believed.
void StackTarget::doubt(ThreadStack* stack, bool reliable_only) const {
  auto doubtful = [&](const Frame& f) {
    Addr pc = f.code().lookup();
    return is_reliable(f) && std::ranges::any_of(doubtful_, [&](AddrRange range) { return range.contains(pc); });
  };
  auto first = std::ranges::find_if(stack->frames, doubtful);
  if (first == stack->frames.end()) return;
  first->reason = stack->result.reason = Reason::unknown_code;
  for (auto later = first + 1; later != stack->frames.end(); ++later) {
    later->recovered |= kMarked;
    if (later->reason == Reason::reliable) later->reason = Reason::unknown_code;
  }
  if (reliable_only) stack->frames.erase(first + 1, stack->frames.end());
  stack->result.frames = static_cast<unsigned>(stack->frames.size());
}

ThreadStack StackTarget::walk(const StoppedThread& thread, const WalkOptions& options) {
  return walk(thread, *memories_.at(static_cast<size_t>(&thread - threads_.data())), options);
}

ThreadStack StackTarget::walk(const StoppedThread& thread, TargetMemory& from, const WalkOptions& options) {
  WalkStart<X86_64> start{.regs = thread.regs, .source = Source::regs_pc};
  start.reliable_only = options.reliable_only;
  ThreadStack stack;
  AnyMemory memory = from.any_memory();
  start.max_frames = options.max_frames;
  // One more place than frames are asked for, so that a cut is the depth limit's.
  stack.frames.resize(options.max_frames + 1);
  stack.result = sonde::walk(arena(), cache_.get(), memory, start, std::span<Frame>(stack.frames));
  stack.frames.resize(stack.result.frames);
  doubt(&stack, options.reliable_only);
  return stack;
}

}  // namespace sonde::host
