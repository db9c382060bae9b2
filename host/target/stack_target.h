// Everything that a walk from outside needs of one target: threads' registers, their stacks, images with tables, the
// agent's return entries. Of a running process each thread stands still only while its registers and its stack are copied,
// the others run: the picture of each thread is of one moment, those of different threads are not.
#pragma once

#include <chrono>
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

  // A process of which no thread is stopped: only for walk_now().
  static Result<StackTarget> of_images(pid_t pid);

  pid_t pid() const { return pid_; }
  std::span<const StoppedThread> threads() const { return threads_; }
  std::span<const LoadedImage> images() const { return images_; }
  // Of a core file: the signal that ended the process, or 0.
  int signal() const { return signal_; }
  // Threads that did not stop: they have no stack here.
  size_t unstopped() const { return unstopped_; }
  // What could not be read, one sentence each; stacks that need it say so by their reasons.
  std::span<const std::string> problems() const { return problems_; }
  // For how long a thread stood still, one entry for each stop, ascending; none for a core file. On a busy machine it is the
  // scheduler that decides about the longest.
  std::span<const std::chrono::nanoseconds> pauses() const { return pauses_; }
  // The loaded image whose memory holds pc, or null.
  const LoadedImage* image_at(Addr pc) const;

  // `thread`: one of threads().
  ThreadStack walk(const StoppedThread& thread, const WalkOptions& options);
  // A thread that stands still now, from the memory as it is.
  Result<ThreadStack> walk_now(const StoppedThread& thread, const WalkOptions& options);
  // The same for many, from what `memory` has read while all of them stand.
  ThreadStack walk_now(const StoppedThread& thread, const WalkOptions& options, ProcessMemory& memory);
  // The file that was mapped at pc, whether it could be read or not; "" if none was.
  std::string file_at(Addr pc) const;

 private:
  StackTarget() = default;
  // Tables, special code, agent: arena_ from images_. Reads the agent's list of detours through `memory`.
  Result<void> describe(TargetMemory& memory, std::span<const Mapping> mappings);
  // Stops each thread there is and copies its stack.
  Result<void> take_threads(const std::shared_ptr<ProcessMemory>& process);
  Result<Visit> take_thread(pid_t tid, const std::shared_ptr<ProcessMemory>& process);
  ThreadStack walk(const StoppedThread& thread, TargetMemory& memory, const WalkOptions& options);
  void doubt(ThreadStack* stack, bool reliable_only) const;
  const TableArena* arena() const { return reinterpret_cast<const TableArena*>(arena_.data()); }

  pid_t pid_ = 0;
  std::vector<StoppedThread> threads_;
  std::vector<LoadedImage> images_;
  std::vector<std::string> problems_;
  std::vector<uint8_t> arena_;
  std::vector<Addr> signal_returns_;
  Addr published_arena_, agent_control_;
  std::vector<std::shared_ptr<TargetMemory>> memories_;  // of each thread
  std::vector<std::chrono::nanoseconds> pauses_;
  std::vector<AddrRange> doubtful_;  // images that may not be those of the process
  std::vector<std::pair<AddrRange, std::string>> files_;  // as the process had them mapped
  int signal_ = 0;
  size_t unstopped_ = 0;
  std::unique_ptr<RowCache> cache_;
};

}  // namespace sonde::host
