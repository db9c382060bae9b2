// Stopping a process from outside for as short as possible, all threads at once or one after the other: seized and
// interrupted, registers read, then let go again exactly as it was (pending signals, group stops and interrupted system
// calls included). The kernel detaches by itself should sonde die meanwhile.
#pragma once

#include <sys/types.h>
#include <sys/user.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/isa/regset.h"
#include "host/error.h"

namespace sonde::host {

// One line's value from /proc/TID/status, "" if there is none.
std::string status_field(pid_t tid, std::string_view field);

struct StoppedThread {
  pid_t tid;
  std::string name;
  RegSet<X86_64> regs;  // all of them
};

// What /proc says about a process before anybody touches it: exists, is no zombie, no thread of the kernel, is traced by
// nobody. The error names the tracer. Returns the process id of the thread group (a thread's id is accepted too).
Result<pid_t> check_traceable(pid_t pid);

// Why the kernel forbids to look into the process (EPERM, EACCES), and what to do about it.
Error not_permitted(pid_t pid);

// The threads there are now, those that have ended and wait for their leader or parent left out.
std::vector<pid_t> live_threads(pid_t pid);

// The kernel's registers as a walk wants them.
RegSet<X86_64> regset_of(const user_regs_struct& regs);

struct HeldThread {
  pid_t tid;
  bool stopped = false;
  bool gone = false;
  int signal = 0;  // to deliver when it goes on
};

enum class Visit : uint8_t { done, gone, does_not_stop };

// One thread of process `pid` stands while `visit` looks at it, and runs on. `pause`: no shorter than it stood.
Result<Visit> visit_thread(pid_t pid, pid_t tid, const std::function<void(const StoppedThread&)>& visit,
                           std::chrono::nanoseconds* pause);

// One thread stands still for as long as this lives; the others run.
class StillThread {
 public:
  // Nothing: it has gone, or does not stop.
  static Result<std::optional<StillThread>> hold(pid_t pid, pid_t tid);
  const StoppedThread& thread() const { return thread_; }
  StillThread(StillThread&& other) noexcept;
  StillThread& operator=(StillThread&&) = delete;
  ~StillThread();

 private:
  StillThread() = default;
  HeldThread held_{.tid = 0};
  StoppedThread thread_;
};

class StoppedProcess {
 public:
  // Returns when every thread of pid stands still; on error everything that was stopped runs again. `longest_pause`, which must
  // outlive it, is made no shorter than the time for which a thread stood.
  static Result<StoppedProcess> stop(pid_t pid, std::chrono::nanoseconds* longest_pause = nullptr);

  std::span<const StoppedThread> threads() const { return threads_; }
  // One of them runs for a moment, the others stand: out of code that nobody is to be in. False: it is gone.
  Result<bool> let_run(pid_t tid, std::chrono::microseconds moment);
  void resume();

  ~StoppedProcess();
  StoppedProcess(StoppedProcess&& other) noexcept;
  StoppedProcess& operator=(StoppedProcess&&) = delete;

 private:
  StoppedProcess();
  Result<bool> seize_new_threads(pid_t pid);
  bool interrupt(HeldThread& held);

  std::unique_ptr<class Urgent> urgent_;
  std::chrono::steady_clock::time_point begin_;
  std::chrono::nanoseconds* longest_pause_ = nullptr;
  std::vector<HeldThread> held_;
  std::vector<StoppedThread> threads_;
};

}  // namespace sonde::host
