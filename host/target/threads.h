// Stopping a whole process from outside for as short as possible: every thread seized and interrupted, registers read,
// then let go again exactly as it was (pending signals, group stops and interrupted system calls included). The kernel
// detaches by itself should sonde die meanwhile.
#pragma once

#include <sys/types.h>
#include <sys/user.h>

#include <chrono>
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

// What /proc says about a process before anybody touches it: exists, is no zombie, is traced by nobody.
// The error names the tracer. Returns the process id of the thread group (a thread's id is accepted too).
Result<pid_t> check_traceable(pid_t pid);

// The kernel's registers as a walk wants them.
RegSet<X86_64> regset_of(const user_regs_struct& regs);

class StoppedProcess {
 public:
  // Returns when every thread of pid stands still; on error everything that was stopped runs again.
  static Result<StoppedProcess> stop(pid_t pid);

  std::span<const StoppedThread> threads() const { return threads_; }
  void resume();

  ~StoppedProcess() { resume(); }
  StoppedProcess(StoppedProcess&& other) noexcept;
  StoppedProcess& operator=(StoppedProcess&&) = delete;

 private:
  StoppedProcess() = default;
  Result<bool> seize_new_threads(pid_t pid);

  struct Held {
    pid_t tid;
    bool stopped = false;
    bool gone = false;
    int signal = 0;  // to deliver when it goes on
  };
  static bool wait_until_stopped(Held& held, std::chrono::milliseconds patience);
  std::vector<Held> held_;
  std::vector<StoppedThread> threads_;
};

}  // namespace sonde::host
