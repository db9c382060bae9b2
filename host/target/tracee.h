// One stopped thread of a target, under ptrace: registers, memory, breakpoints, system calls made in its name. The host
// is a tracer only for the milliseconds in which it looks or patches; a Tracee is released with detach(), also by its
// destructor, and the target runs on.
#pragma once

#include <sys/types.h>
#include <sys/user.h>

#include <chrono>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/base/addr.h"
#include "host/error.h"

namespace sonde::host {

// How a target ended, as waitpid says it.
struct ExitStatus {
  int wait_status = 0;
};

// waitpid() for a thread that is traced, which does not take the end of a child of our own: its exit status is for whoever
// launched it.
pid_t wait_traced(pid_t tid, int* status, int options);

constexpr std::chrono::milliseconds kCallPatience{5000};

class Tracee {
 public:
  // Takes over a thread that is already attached and stopped. `process` names the address space (/proc/PROCESS/mem).
  static Result<Tracee> adopt(pid_t thread, pid_t process);
  // The same for a thread that somebody else stopped and will let go (StoppedProcess): never detached here.
  static Result<Tracee> borrow(pid_t thread, pid_t process);
  // The memory of a process that runs; where a system call is to be made, one thread stands for just that.
  static Result<Tracee> running(pid_t process);
  Tracee(Tracee&& other) noexcept;
  Tracee& operator=(Tracee&& other) noexcept;
  ~Tracee();

  pid_t thread() const { return thread_; }

  Result<user_regs_struct> regs() const;
  Result<void> set_regs(const user_regs_struct& regs) const;
  Result<void> read(Addr at, std::span<uint8_t> into) const;
  // Also into read-only private mappings: the kernel gives the target its own copy of the page.
  Result<void> write(Addr at, std::span<const uint8_t> bytes) const;
  template <class T>
  Result<T> read_as(Addr at) const {
    T value;
    if (auto done = read(at, {reinterpret_cast<uint8_t*>(&value), sizeof value}); !done)
      return std::unexpected(done.error());
    return value;
  }
  template <class T>
  Result<void> write_as(Addr at, const T& value) const {
    return write(at, {reinterpret_cast<const uint8_t*>(&value), sizeof value});
  }

  // Makes a system call in the target, at the `syscall` instruction that lies at `instruction`; registers are as before
  // afterwards. The value is the kernel's: -errno on failure. Signals that arrive meanwhile are delivered later.
  Result<int64_t> system_call(Addr instruction, long number, std::initializer_list<uint64_t> arguments);

  // Calls a function of the target on the stack that ends at `stack_end`, which is nobody's, with all signals blocked;
  // registers and mask are as before afterwards. It returns to `instruction`, a `syscall`, and is stopped by the system
  // calls it makes alone: a trap or a fault would change what the program does with those signals. Other threads run.
  // An error after kCallPatience if it does not return; the thread still is where it was before if it only waited for
  // its first lock, else the error says what was left.
  Result<uint64_t> call(Addr function, std::initializer_list<uint64_t> arguments, Addr stack_end, Addr instruction);

  // Runs until `breakpoint` is reached, with a temporary int3 there; signals are passed on to the target. Value: the
  // exit status if the target ended before.
  Result<std::optional<ExitStatus>> run_to(Addr breakpoint);

  // Bit n - 1 is signal n. A breakpoint takes SIGTRAP out of the mask, by the kernel's rule for forced signals.
  Result<uint64_t> signal_mask() const;
  Result<void> set_signal_mask(uint64_t mask) const;

  // Lets it run on, delivering signals that were held back. A borrowed thread only gets its signals.
  Result<void> detach();

 private:
  Result<bool> run_to_system_call(std::chrono::milliseconds patience);
  Tracee(pid_t thread, pid_t process, int memory) : thread_(thread), process_(process), memory_(memory) {}
  pid_t thread_ = 0, process_ = 0;
  int memory_ = -1;
  bool borrowed_ = false;
  std::vector<int> held_signals_;
};

}  // namespace sonde::host
