// A process: tables are made ready first, as that may take long; then it is stopped, and the picture taken. Should its
// libraries or detours have changed in between, once more from the beginning.
#include "host/target/stack_target.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <optional>

#include "core/isa/code.h"
#include "core/probe/control.h"
#include "core/walk/recover.h"
#include "host/target/agent_view.h"
#include "host/target/core_file.h"

namespace sonde::host {
namespace {

constexpr int kAttempts = 4;
constexpr uint64_t kLargestStackCopy = uint64_t{256} << 20;
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
  StackCopier(SnapshotMemory& snapshot, const ProcessMemory& process, const TableArena& arena,
              std::span<const Addr> signal_returns)
      : snapshot_(snapshot), process_(process), arena_(arena), signal_returns_(signal_returns) {}

  void copy(const RegSet<X86_64>& regs) {
    for (unsigned reg = 0; reg < X86_64::kRegs; reg++)
      if (regs.has(reg)) copy_entry(regs.get(reg));
    std::vector<Addr> todo = {regs.sp()};
    for (size_t i = 0; i < todo.size() && i < kMaxStacksPerThread; i++) copy_stack(todo[i], &todo);
  }

 private:
  void copy_stack(Addr sp, std::vector<Addr>* found) {
    const Mapping* mapping = process_.mapping(sp);
    if (!mapping || !mapping->writable || snapshot_.holds(sp)) return;
    Addr begin = std::max(mapping->range.begin, sp - X86_64::kRedZone);
    begin = Addr(begin.value & ~uint64_t{7});
    auto bytes = snapshot_.copy(begin, std::min<uint64_t>(mapping->range.end - begin, kLargestStackCopy));
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
      if (!snapshot_.holds(entry)) snapshot_.copy(entry, kTrampolineStride);
      if (!snapshot_.read_as(entry, &word)) return word;
    }
    return word;
  }

  SnapshotMemory& snapshot_;
  const ProcessMemory& process_;
  const TableArena& arena_;
  std::span<const Addr> signal_returns_;
};

}  // namespace

const LoadedImage* StackTarget::image_at(Addr pc) const {
  for (const LoadedImage& image : images_)
    if (image.range.contains(pc)) return &image;
  return nullptr;
}

Result<void> StackTarget::describe(TargetMemory& memory) {
  ArenaInput input;
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
    auto table = load_table(*loaded.image);
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

Result<StackTarget> StackTarget::of_process(pid_t pid) {
  pid = SONDE_TRY(check_traceable(pid));
  for (int attempt = 0; attempt < kAttempts; attempt++) {
    StackTarget target;
    target.pid_ = pid;
    auto before = SONDE_TRY(read_maps(pid));
    target.images_ = SONDE_TRY(loaded_images(pid, &target.problems_));
    ProcessMemory memory(pid, before);
    SONDE_TRY_VOID(target.describe(memory));

    auto stopped = SONDE_TRY(StoppedProcess::stop(pid));
    auto now = SONDE_TRY(read_maps(pid));
    auto process = std::make_shared<ProcessMemory>(pid, now);
    uint64_t tables = target.published_arena_.value;
    if (target.agent_control_) process->read_as(target.agent_control_ + offsetof(AgentControl, tables), &tables);
    if (!same_code(before, now) || tables != target.published_arena_.value) continue;
    auto snapshot = std::make_unique<SnapshotMemory>(process);
    StackCopier copier(*snapshot, *process, *target.arena(), target.signal_returns_);
    for (const StoppedThread& thread : stopped.threads()) copier.copy(thread.regs);
    target.threads_.assign(stopped.threads().begin(), stopped.threads().end());
    stopped.resume();
    snapshot->use_files(target.images_);
    target.memory_ = std::move(snapshot);
    return target;
  }
  return fail(fmt::format("process {} loads and unloads libraries faster than they can be read; try again", pid));
}

Result<StackTarget> StackTarget::of_core(const std::string& path, const std::string& executable) {
  StackTarget target;
  auto core = SONDE_TRY(CoreFile::open(path));
  target.pid_ = core->pid();
  target.threads_.assign(core->threads().begin(), core->threads().end());
  for (StoppedThread& thread : target.threads_)
    if (thread.name.empty()) thread.name = core->program();
  target.images_ = core->load_images(executable, &target.problems_);
  SONDE_TRY_VOID(target.describe(*core));
  target.memory_ = std::move(core);
  return target;
}

ThreadStack StackTarget::walk(const StoppedThread& thread, const WalkOptions& options) {
  WalkStart<X86_64> start{.regs = thread.regs, .source = Source::regs_pc};
  start.reliable_only = options.reliable_only;
  ThreadStack stack;
  AnyMemory memory = memory_->any_memory();
  start.max_frames = options.max_frames;
  // One more place than frames are asked for, so that a cut is the depth limit's.
  stack.frames.resize(options.max_frames + 1);
  stack.result = sonde::walk(arena(), cache_.get(), memory, start, std::span<Frame>(stack.frames));
  stack.frames.resize(stack.result.frames);
  return stack;
}

}  // namespace sonde::host
