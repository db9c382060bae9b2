#include "host/target/tracee.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <utility>

#include "host/target/threads.h"

namespace sonde::host {

namespace {
constexpr uint8_t kInt3 = 0xcc;

bool is_group_stop(int status) { return status >> 16 == PTRACE_EVENT_STOP; }

void* as_data(int signal) { return reinterpret_cast<void*>(static_cast<intptr_t>(signal)); }
}  // namespace

pid_t wait_traced(pid_t tid, int* status, int options) {
  siginfo_t seen{};
  auto id = static_cast<id_t>(tid);
  if (waitid(P_PID, id, &seen, WEXITED | WSTOPPED | WNOWAIT | __WALL | options) != 0) return -1;
  if (seen.si_pid == 0) return 0;
  bool ended = seen.si_code == CLD_EXITED || seen.si_code == CLD_KILLED || seen.si_code == CLD_DUMPED;
  if (!ended || status_field(tid, "Tgid") != std::to_string(tid) ||
      status_field(tid, "PPid") != std::to_string(getpid()))
    return waitpid(tid, status, __WALL | options);
  *status = seen.si_code == CLD_EXITED ? W_EXITCODE(seen.si_status, 0) : W_EXITCODE(0, seen.si_status);
  return tid;
}

Result<Tracee> Tracee::adopt(pid_t thread, pid_t process) {
  std::string path = fmt::format("/proc/{}/mem", process);
  int memory = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (memory < 0) return fail_errno("open " + path);
  return Tracee(thread, process, memory);
}

Result<Tracee> Tracee::borrow(pid_t thread, pid_t process) {
  Tracee tracee = SONDE_TRY(adopt(thread, process));
  tracee.borrowed_ = true;
  return tracee;
}

Result<Tracee> Tracee::running(pid_t process) { return borrow(0, process); }

Tracee::Tracee(Tracee&& other) noexcept
    : thread_(std::exchange(other.thread_, 0)),
      process_(other.process_),
      memory_(std::exchange(other.memory_, -1)),
      borrowed_(other.borrowed_),
      held_signals_(std::move(other.held_signals_)) {}

Tracee& Tracee::operator=(Tracee&& other) noexcept {
  std::swap(thread_, other.thread_);
  std::swap(process_, other.process_);
  std::swap(memory_, other.memory_);
  std::swap(borrowed_, other.borrowed_);
  std::swap(held_signals_, other.held_signals_);
  return *this;
}

Tracee::~Tracee() {
  (void)detach();
  if (memory_ >= 0) close(memory_);
}

Result<user_regs_struct> Tracee::regs() const {
  user_regs_struct regs;
  if (ptrace(PTRACE_GETREGS, thread_, nullptr, &regs) != 0)
    return fail_errno(fmt::format("read the registers of thread {}", thread_));
  return regs;
}

Result<void> Tracee::set_regs(const user_regs_struct& regs) const {
  if (ptrace(PTRACE_SETREGS, thread_, nullptr, &regs) != 0)
    return fail_errno(fmt::format("write the registers of thread {}", thread_));
  return {};
}

Result<void> Tracee::read(Addr at, std::span<uint8_t> into) const {
  for (size_t done = 0; done < into.size();) {
    ssize_t n = pread(memory_, into.data() + done, into.size() - done, static_cast<off_t>(at.value + done));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return fail_errno(fmt::format("read {} bytes of the target at {:#x}", into.size(), at.value));
    done += static_cast<size_t>(n);
  }
  return {};
}

Result<void> Tracee::write(Addr at, std::span<const uint8_t> bytes) const {
  for (size_t done = 0; done < bytes.size();) {
    ssize_t n = pwrite(memory_, bytes.data() + done, bytes.size() - done, static_cast<off_t>(at.value + done));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return fail_errno(fmt::format("write {} bytes to the target at {:#x}", bytes.size(), at.value));
    done += static_cast<size_t>(n);
  }
  return {};
}

namespace {
bool is_syscall_stop(pid_t thread, int status) {
  if ((WSTOPSIG(status) & ~0x80) != SIGTRAP || status >> 16 != 0) return false;
  siginfo_t signal{};
  return WSTOPSIG(status) & 0x80 || (ptrace(PTRACE_GETSIGINFO, thread, nullptr, &signal) == 0 &&
                                     (signal.si_code == SIGTRAP || signal.si_code == (SIGTRAP | 0x80)));
}
}  // namespace

// Runs to the next entry or exit of a system call. Not a single step: that raises SIGTRAP by force, which takes an ignored
// or blocked SIGTRAP of the program back to its default. False: it did not come within `patience`.
Result<bool> Tracee::run_to_system_call(std::chrono::milliseconds patience) {
  auto deadline = std::chrono::steady_clock::now() + patience;
  bool unlimited = patience == std::chrono::milliseconds::max();
  bool runs = false;
  for (unsigned turn = 0;; turn++) {
    if (!runs && ptrace(PTRACE_SYSCALL, thread_, nullptr, nullptr) != 0)
      return fail_errno("make a system call in the target");
    runs = true;
    int status;
    pid_t waited = wait_traced(thread_, &status, unlimited ? 0 : WNOHANG);
    if (waited < 0 && errno == EINTR) continue;
    if (waited == 0) {
      if (std::chrono::steady_clock::now() > deadline) return false;
      if (turn > 100) usleep(100);
      continue;
    }
    if (waited != thread_) return fail_errno("wait for the target");
    if (!WIFSTOPPED(status)) {
      thread_ = 0;
      return fail("the target ended while it was being prepared");
    }
    if (is_syscall_stop(thread_, status)) return true;
    runs = false;
    if (!is_group_stop(status)) held_signals_.push_back(WSTOPSIG(status));
  }
}

Result<int64_t> Tracee::system_call(Addr instruction, long number, std::initializer_list<uint64_t> arguments) {
  if (!thread_ && borrowed_) {
    for (pid_t tid : live_threads(process_)) {
      auto still = SONDE_TRY(StillThread::hold(process_, tid));
      if (!still) continue;
      return SONDE_TRY(borrow(tid, process_)).system_call(instruction, number, arguments);
    }
    return fail(fmt::format("no thread of process {} stops", process_));
  }
  user_regs_struct saved = SONDE_TRY(regs());
  user_regs_struct call = saved;
  unsigned long long* registers[] = {&call.rdi, &call.rsi, &call.rdx, &call.r10, &call.r8, &call.r9};
  size_t i = 0;
  for (uint64_t argument : arguments) *registers[i++] = argument;
  call.rax = static_cast<unsigned long long>(number);
  call.orig_rax = static_cast<unsigned long long>(-1);  // not inside a system call: nothing to restart
  call.rip = instruction.value;
  SONDE_TRY_VOID(set_regs(call));
  for (int stops = 0; stops < 2; stops++)  // its entry, then its exit
    SONDE_TRY(run_to_system_call(std::chrono::milliseconds::max()));
  user_regs_struct after = SONDE_TRY(regs());
  SONDE_TRY_VOID(set_regs(saved));
  if (after.rip != instruction.value + 2)
    return fail(fmt::format("system call {} in the target did not run to its end", number));
  return static_cast<int64_t>(after.rax);
}

Result<uint64_t> Tracee::call(Addr function, std::initializer_list<uint64_t> arguments, Addr stack_end,
                              Addr instruction) {
  user_regs_struct saved = SONDE_TRY(regs()), call = saved;
  uint64_t mask = SONDE_TRY(signal_mask());
  SONDE_TRY_VOID(set_signal_mask(~uint64_t{0}));
  unsigned long long* registers[] = {&call.rdi, &call.rsi, &call.rdx, &call.rcx, &call.r8, &call.r9};
  size_t i = 0;
  for (uint64_t argument : arguments) *registers[i++] = argument;
  call.rsp = (stack_end.value & ~uint64_t{15}) - 8;
  call.rax = 0;
  call.rip = function.value;
  call.orig_rax = static_cast<unsigned long long>(-1);
  call.eflags &= ~uint64_t{0x400};  // the direction flag: as the ABI wants it
  SONDE_TRY_VOID(write_as(Addr(call.rsp), instruction.value));
  SONDE_TRY_VOID(set_regs(call));
  auto restore = [&]() -> Result<void> {
    SONDE_TRY_VOID(set_regs(saved));
    return set_signal_mask(mask);
  };
  for (bool entry = true, first = true;; entry = !entry) {
    if (!SONDE_TRY(run_to_system_call(kCallPatience))) {
      if (ptrace(PTRACE_INTERRUPT, thread_, nullptr, nullptr) != 0) return fail_errno("interrupt the target");
      int status;
      while (wait_traced(thread_, &status, 0) < 0 && errno == EINTR) {
      }
      if (first && !entry) {  // in the first system call that it made, which is that of a lock
        SONDE_TRY_VOID(restore());
        return fail(
            "the program holds a lock that loading a library needs (it is loading or forking itself); try again");
      }
      return fail(
          "a function called in the program does not return; the thread that made the call cannot be given back");
    }
    user_regs_struct now = SONDE_TRY(regs());
    if (!entry) first = false;
    if (!entry || now.rip != instruction.value + 2 || now.rsp != call.rsp + 8) continue;
    // It has returned, and what looks like a system call is none.
    uint64_t value = now.orig_rax;
    now.orig_rax = static_cast<unsigned long long>(-1);
    SONDE_TRY_VOID(set_regs(now));
    SONDE_TRY(run_to_system_call(std::chrono::milliseconds::max()));
    SONDE_TRY_VOID(restore());
    return value;
  }
}

Result<std::optional<ExitStatus>> Tracee::run_to(Addr breakpoint) {
  uint8_t original = SONDE_TRY(read_as<uint8_t>(breakpoint));
  SONDE_TRY_VOID(write_as(breakpoint, kInt3));
  int deliver = 0;
  for (;;) {
    if (ptrace(PTRACE_CONT, thread_, nullptr, as_data(deliver)) != 0) return fail_errno("continue the target");
    int status;
    pid_t waited = waitpid(thread_, &status, __WALL);
    if (waited < 0 && errno == EINTR) continue;
    if (waited != thread_) return fail_errno("wait for the target");
    if (WIFEXITED(status) || WIFSIGNALED(status)) {
      thread_ = 0;
      return ExitStatus{status};
    }
    deliver = 0;
    if (status >> 16 != 0) continue;  // group stops and exec's own event are not signals
    if (WSTOPSIG(status) == SIGTRAP) {
      user_regs_struct at = SONDE_TRY(regs());
      if (at.rip == breakpoint.value + 1) {
        at.rip = breakpoint.value;
        SONDE_TRY_VOID(set_regs(at));
        SONDE_TRY_VOID(write_as(breakpoint, original));
        return std::nullopt;
      }
    }
    deliver = WSTOPSIG(status);
  }
}

Result<uint64_t> Tracee::signal_mask() const {
  uint64_t mask = 0;
  if (ptrace(PTRACE_GETSIGMASK, thread_, reinterpret_cast<void*>(sizeof mask), &mask) != 0)
    return fail_errno("read the target's signal mask");
  return mask;
}

Result<void> Tracee::set_signal_mask(uint64_t mask) const {
  if (ptrace(PTRACE_SETSIGMASK, thread_, reinterpret_cast<void*>(sizeof mask), &mask) != 0)
    return fail_errno("restore the target's signal mask");
  return {};
}

Result<void> Tracee::detach() {
  if (thread_ == 0) return {};
  pid_t thread = std::exchange(thread_, 0);
  // The first goes with the detach, the others are sent anew: their order among each other is not defined anyway.
  int first = held_signals_.empty() || borrowed_ ? 0 : held_signals_.front();
  for (size_t i = first ? 1 : 0; i < held_signals_.size(); i++) syscall(SYS_tkill, thread, held_signals_[i]);
  held_signals_.clear();
  if (borrowed_) return {};
  if (ptrace(PTRACE_DETACH, thread, nullptr, as_data(first)) != 0)
    return fail_errno(fmt::format("detach from thread {}", thread));
  return {};
}

}  // namespace sonde::host
