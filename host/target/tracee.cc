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
  return Tracee(thread, memory);
}

Result<Tracee> Tracee::borrow(pid_t thread, pid_t process) {
  Tracee tracee = SONDE_TRY(adopt(thread, process));
  tracee.borrowed_ = true;
  return tracee;
}

Tracee::Tracee(Tracee&& other) noexcept
    : thread_(std::exchange(other.thread_, 0)),
      memory_(std::exchange(other.memory_, -1)),
      borrowed_(other.borrowed_),
      held_signals_(std::move(other.held_signals_)) {}

Tracee& Tracee::operator=(Tracee&& other) noexcept {
  std::swap(thread_, other.thread_);
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

Result<int64_t> Tracee::system_call(Addr instruction, long number, std::initializer_list<uint64_t> arguments) {
  user_regs_struct saved = SONDE_TRY(regs());
  user_regs_struct call = saved;
  unsigned long long* registers[] = {&call.rdi, &call.rsi, &call.rdx, &call.r10, &call.r8, &call.r9};
  size_t i = 0;
  for (uint64_t argument : arguments) *registers[i++] = argument;
  call.rax = static_cast<unsigned long long>(number);
  call.orig_rax = static_cast<unsigned long long>(-1);  // not inside a system call: nothing to restart
  call.rip = instruction.value;
  SONDE_TRY_VOID(set_regs(call));
  // Its entry stop, then its exit stop. Not a single step: that raises SIGTRAP by force, which takes an ignored or blocked
  // SIGTRAP of the program back to its default.
  for (int stops = 0; stops < 2;) {
    if (ptrace(PTRACE_SYSCALL, thread_, nullptr, nullptr) != 0) return fail_errno("make a system call in the target");
    int status;
    pid_t waited = wait_traced(thread_, &status, 0);
    if (waited < 0 && errno == EINTR) continue;
    if (waited != thread_) return fail_errno("wait for the target");
    if (!WIFSTOPPED(status)) {
      thread_ = 0;
      return fail("the target ended while it was being prepared");
    }
    if (is_group_stop(status)) continue;
    siginfo_t signal{};
    bool syscall_stop =
        (WSTOPSIG(status) & ~0x80) == SIGTRAP && status >> 16 == 0 &&
        (WSTOPSIG(status) & 0x80 || (ptrace(PTRACE_GETSIGINFO, thread_, nullptr, &signal) == 0 &&
                                     (signal.si_code == SIGTRAP || signal.si_code == (SIGTRAP | 0x80))));
    if (syscall_stop) stops++;
    else held_signals_.push_back(WSTOPSIG(status));
  }
  user_regs_struct after = SONDE_TRY(regs());
  SONDE_TRY_VOID(set_regs(saved));
  if (after.rip != instruction.value + 2)
    return fail(fmt::format("system call {} in the target did not run to its end", number));
  return static_cast<int64_t>(after.rax);
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
