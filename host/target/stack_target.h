// Everything that a walk from outside needs of one target, taken at one moment: threads' registers, their stacks, images
// with tables, the agent's return entries. A running process stands still only while registers and stacks are copied.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/walk/walker.h"
#include "host/tables/arena.h"
#include "host/target/memory.h"
#include "host/target/threads.h"

namespace sonde::host {

struct WalkOptions {
  unsigned max_frames = 1000;
  bool reliable_only = false;
};

struct ThreadStack {
  std::vector<Frame> frames;
  WalkResult result;
};

class StackTarget {
 public:
  static Result<StackTarget> of_process(pid_t pid);
  // A core file; `executable` replaces the path that the core names for its program ("": as named).
  static Result<StackTarget> of_core(const std::string& path, const std::string& executable);

  pid_t pid() const { return pid_; }
  std::span<const StoppedThread> threads() const { return threads_; }
  std::span<const LoadedImage> images() const { return images_; }
  // What could not be read, one sentence each; stacks that need it say so by their reasons.
  std::span<const std::string> problems() const { return problems_; }
  // The loaded image whose memory holds pc, or null.
  const LoadedImage* image_at(Addr pc) const;

  ThreadStack walk(const StoppedThread& thread, const WalkOptions& options);

 private:
  StackTarget() = default;
  // Tables, special code, agent: arena_ from images_. Reads the agent's list of detours through `memory`.
  Result<void> describe(TargetMemory& memory);
  const TableArena* arena() const { return reinterpret_cast<const TableArena*>(arena_.data()); }

  pid_t pid_ = 0;
  std::vector<StoppedThread> threads_;
  std::vector<LoadedImage> images_;
  std::vector<std::string> problems_;
  std::vector<uint8_t> arena_;
  std::vector<Addr> signal_returns_;
  Addr published_arena_, agent_control_;
  std::unique_ptr<TargetMemory> memory_;
  std::unique_ptr<RowCache> cache_;
};

}  // namespace sonde::host
