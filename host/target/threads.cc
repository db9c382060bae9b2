#include "host/target/threads.h"

#include <dirent.h>
#include <fmt/format.h>
#include <sched.h>
#include <signal.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <fstream>
#include <sstream>
#include <thread>
#include <utility>

#include "host/target/hurry.h"
#include "host/target/tracee.h"

namespace sonde::host {

std::string status_field(pid_t tid, std::string_view field) {
  std::ifstream in(fmt::format("/proc/{}/status", tid));
  for (std::string line; std::getline(in, line);)
    if (line.starts_with(field) && line.size() > field.size() && line[field.size()] == ':') {
      auto at = line.find_first_not_of(" \t", field.size() + 1);
      return at == std::string::npos ? "" : line.substr(at);
    }
  return "";
}

namespace {

std::vector<pid_t> all_threads(pid_t pid) {
  std::vector<pid_t> tids;
  DIR* dir = opendir(fmt::format("/proc/{}/task", pid).c_str());
  if (!dir) return tids;
  while (dirent* entry = readdir(dir))
    if (pid_t tid = std::atoi(entry->d_name)) tids.push_back(tid);
  closedir(dir);
  return tids;
}

}  // namespace

std::vector<pid_t> live_threads(pid_t pid) {
  auto tids = all_threads(pid);
  std::erase_if(tids, [](pid_t tid) { return status_field(tid, "State").starts_with("Z"); });
  return tids;
}

namespace {

std::string thread_name(pid_t pid, pid_t tid) {
  std::ifstream in(fmt::format("/proc/{}/task/{}/comm", pid, tid));
  std::string name;
  std::getline(in, name);
  return name;
}

bool is_zombie(pid_t tid) { return status_field(tid, "State").starts_with("Z"); }

// Flags of /proc/PID/stat, the sixth word behind the name (which may hold anything): PF_KTHREAD, linux/sched.h.
bool is_kernel_thread(pid_t pid) {
  constexpr unsigned long kKernelThread = 0x00200000;
  std::ifstream in(fmt::format("/proc/{}/stat", pid));
  std::string text, word;
  std::getline(in, text, '\0');
  std::istringstream behind(text.substr(std::min(text.rfind(')'), text.size() - 1) + 1));
  for (int i = 0; i < 7; i++) behind >> word;
  return std::strtoul(word.c_str(), nullptr, 10) & kKernelThread;
}

std::unexpected<Error> seize_error(pid_t pid, int error) {
  if (error == ESRCH) return fail(fmt::format("no process with id {}", pid));
  if (error != EPERM) return fail(fmt::format("stop process {}: {}", pid, std::strerror(error)));
  if (auto checked = check_traceable(pid); !checked) return std::unexpected(std::move(checked).error());
  return std::unexpected(not_permitted(pid));
}

// False: it has ended meanwhile.
Result<bool> seize(pid_t pid, pid_t tid) {
  if (ptrace(PTRACE_SEIZE, tid, nullptr, nullptr) == 0) return true;
  int error = errno;
  if (error == ESRCH && tid != pid) return false;
  if (error == EPERM && is_zombie(tid) && !live_threads(pid).empty()) return false;
  return seize_error(pid, error);
}

// Calls that give up with EINTR when a tracer stops them, though no signal handler runs (signal(7), "Interruption of
// system calls by stop signals"). All others the kernel restarts by itself.
bool gives_up_when_stopped(uint64_t call) {
  constexpr std::array<uint64_t, 10> kCalls = {SYS_epoll_wait,   SYS_epoll_pwait,     SYS_epoll_pwait2, SYS_semop,
                                               SYS_semtimedop,   SYS_rt_sigtimedwait, SYS_msgrcv,       SYS_msgsnd,
                                               SYS_io_getevents, SYS_io_pgetevents};
  return std::ranges::find(kCalls, call) != kCalls.end();
}

constexpr std::chrono::milliseconds kPatience{5000}, kLastPatience{200};

}  // namespace

// While a thread stands for it, sonde waits for no other process, where that is permitted (CAP_SYS_NICE); and it sleeps until
// the thread stands, for such a process yields to nobody. The kernel tells of a stop by SIGCHLD, which must be blocked.
class Urgent {
 public:
  Urgent() : policy_(sched_getscheduler(0)) {
    sigset_t child = stops();
    pthread_sigmask(SIG_BLOCK, &child, &mask_);
    sched_param first{.sched_priority = sched_get_priority_min(SCHED_FIFO)};
    changed_ = policy_ == SCHED_OTHER && sched_setscheduler(0, SCHED_FIFO | SCHED_RESET_ON_FORK, &first) == 0;
  }
  ~Urgent() {
    sched_param none{};
    if (changed_) sched_setscheduler(0, policy_, &none);
    pthread_sigmask(SIG_SETMASK, &mask_, nullptr);
  }
  Urgent(const Urgent&) = delete;
  static void sleep_until_stop() {
    constexpr timespec kAtMost{.tv_sec = 0, .tv_nsec = 1'000'000};
    sigset_t child = stops();
    sigtimedwait(&child, nullptr, &kAtMost);
  }

 private:
  static sigset_t stops() {
    sigset_t set;
    sigemptyset(&set), sigaddset(&set, SIGCHLD);
    return set;
  }

  int policy_;
  sigset_t mask_;
  bool changed_;
};

namespace {

// True when it stands or is gone. A thread that waits for a vfork child or a disk stops only when that is over. `urgent`: there is
// an Urgent.
bool wait_until_stopped(HeldThread& held, std::chrono::milliseconds patience, bool urgent = false) {
  auto deadline = std::chrono::steady_clock::now() + patience;
  for (unsigned turn = 0; !held.stopped && !held.gone; turn++) {
    int status;
    pid_t got = wait_traced(held.tid, &status, WNOHANG);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 || (got > 0 && !WIFSTOPPED(status))) {
      held.gone = true;
    } else if (got > 0) {
      held.stopped = true;
      // A signal on its way to the program is passed on; the stop that was asked for carries none.
      if (status >> 16 != PTRACE_EVENT_STOP) held.signal = WSTOPSIG(status);
    } else if (std::chrono::steady_clock::now() > deadline) {
      return false;
    } else if (turn < 200) {
      if (urgent) Urgent::sleep_until_stop();
      else sched_yield();
    } else if (is_zombie(held.tid)) {  // a leader whose threads live is not reported
      held.gone = true;
    } else {
      usleep(50);
    }
  }
  return true;
}

bool has_deliverable_signal(pid_t tid) {
  auto set = [&](const char* field) { return std::strtoull(status_field(tid, field).c_str(), nullptr, 16); };
  return (set("SigPnd") | set("ShdPnd")) & ~set("SigBlk");
}

// The program must not see that it was stopped: a call that gave up because of us alone is made once more.
void restart_interrupted_call(pid_t tid, user_regs_struct& regs) {
  constexpr uint64_t kSyscallLength = 2;
  if (static_cast<int64_t>(regs.rax) != -EINTR || !gives_up_when_stopped(regs.orig_rax) || has_deliverable_signal(tid))
    return;
  regs.rax = std::exchange(regs.orig_rax, ~0ull);
  regs.rip -= kSyscallLength;
  ptrace(PTRACE_SETREGS, tid, nullptr, &regs);
}

// With the call restarted that the stop has ended. Marks the thread as gone if it was killed meanwhile.
Result<RegSet<X86_64>> read_registers(HeldThread& held) {
  user_regs_struct regs;
  if (ptrace(PTRACE_GETREGS, held.tid, nullptr, &regs) != 0) {
    if (errno != ESRCH) return fail_errno(fmt::format("read the registers of thread {}", held.tid));
    held.gone = true;
    return RegSet<X86_64>();
  }
  if (!held.signal) restart_interrupted_call(held.tid, regs);
  return regset_of(regs);
}

void let_go(const HeldThread& held) {
  if (!held.gone) ptrace(PTRACE_DETACH, held.tid, nullptr, static_cast<long>(held.signal));
}

}  // namespace

RegSet<X86_64> regset_of(const user_regs_struct& regs) {
  RegSet<X86_64> set;
  using R = X86_64;
  const std::pair<unsigned, uint64_t> all[] = {
      {R::rax, regs.rax}, {R::rdx, regs.rdx}, {R::rcx, regs.rcx}, {R::rbx, regs.rbx}, {R::rsi, regs.rsi},
      {R::rdi, regs.rdi}, {R::rbp, regs.rbp}, {R::rsp, regs.rsp}, {R::r8, regs.r8},   {R::r9, regs.r9},
      {R::r10, regs.r10}, {R::r11, regs.r11}, {R::r12, regs.r12}, {R::r13, regs.r13}, {R::r14, regs.r14},
      {R::r15, regs.r15}, {R::rip, regs.rip}};
  for (auto [reg, value] : all) set.set(reg, value);
  return set;
}

Result<pid_t> check_traceable(pid_t pid) {
  if (pid <= 0) return fail(fmt::format("{} is no process id", pid), 2);
  std::string group = status_field(pid, "Tgid");
  if (group.empty()) return fail(fmt::format("no process with id {}", pid));
  pid = std::atoi(group.c_str());
  std::string name = status_field(pid, "Name");
  if (is_kernel_thread(pid))
    return fail(fmt::format("process {} ({}) is a thread of the kernel: it has no stack of a program", pid, name));
  if (is_zombie(pid) && live_threads(pid).empty())
    return fail(fmt::format("process {} ({}) has ended: it is a zombie that its parent, process {}, has not waited for",
                            pid, name, status_field(pid, "PPid")));
  if (pid_t tracer = std::atoi(status_field(pid, "TracerPid").c_str()))
    return fail(fmt::format("process {} ({}) is already traced by process {} ({}); only one tracer is possible", pid,
                            name, tracer, status_field(tracer, "Name")));
  return pid;
}

Error not_permitted(pid_t pid) {
  std::string process = fmt::format("process {} ({}) may not be looked into: ", pid, status_field(pid, "Name"));
  std::istringstream users(status_field(pid, "Uid"));
  uid_t user = 0;
  users >> user;
  if (user != geteuid() && geteuid() != 0)
    return {fmt::format("{}it belongs to user {}; try as that user or as root", process, user)};
  std::ifstream scope_file("/proc/sys/kernel/yama/ptrace_scope");
  int scope = 0;
  scope_file >> scope;
  constexpr const char* kKnob = "/proc/sys/kernel/yama/ptrace_scope is";
  if (scope >= 3) return {fmt::format("{}{} {}: nobody may trace until the next boot", process, kKnob, scope)};
  if (scope > 0 && geteuid() != 0)
    return {fmt::format("{}{} {}; try as root, or as root: sysctl kernel.yama.ptrace_scope=0", process, kKnob, scope)};
  if (geteuid() == 0)
    return {fmt::format("{}sonde has not the capability CAP_SYS_PTRACE, or a security module forbids it", process)};
  return {
      fmt::format("{}it has protected itself (setuid, file capabilities or PR_SET_DUMPABLE); try as root", process)};
}

Result<Visit> visit_thread(pid_t pid, pid_t tid, const std::function<void(const StoppedThread&)>& visit,
                           std::chrono::nanoseconds* pause) {
  StoppedThread thread{tid, thread_name(pid, tid), {}};
  if (!SONDE_TRY(seize(pid, tid))) return Visit::gone;
  HeldThread held{.tid = tid};
  Urgent urgent;
  auto begin = std::chrono::steady_clock::now();
  if (ptrace(PTRACE_INTERRUPT, tid, nullptr, nullptr) != 0 && errno == ESRCH) return Visit::gone;
  if (!wait_until_stopped(held, kPatience, true)) return Visit::does_not_stop;  // the kernel lets it go when sonde ends
  if (!held.gone) {
    auto regs = read_registers(held);
    if (regs && !held.gone) visit({tid, std::move(thread.name), *regs});
    let_go(held);
    if (!regs) return std::unexpected(std::move(regs).error());
  }
  *pause = std::chrono::steady_clock::now() - begin;
  return held.gone ? Visit::gone : Visit::done;
}

StillThread::StillThread(StillThread&& other) noexcept
    : held_(std::exchange(other.held_, {.tid = 0, .gone = true})), thread_(std::move(other.thread_)) {}

StillThread::~StillThread() {
  if (held_.stopped) let_go(held_);
}

Result<std::optional<StillThread>> StillThread::hold(pid_t pid, pid_t tid) {
  StillThread still;
  if (!SONDE_TRY(seize(pid, tid))) return std::nullopt;
  still.held_.tid = tid;
  if (ptrace(PTRACE_INTERRUPT, tid, nullptr, nullptr) != 0 && errno == ESRCH) return std::nullopt;
  if (!wait_until_stopped(still.held_, kPatience)) return std::nullopt;  // the kernel lets it go when sonde ends
  if (still.held_.gone) return std::nullopt;
  still.thread_ = {tid, thread_name(pid, tid), SONDE_TRY(read_registers(still.held_))};
  if (still.held_.gone) return std::nullopt;
  return std::optional<StillThread>(std::move(still));
}

StoppedProcess::StoppedProcess() = default;
StoppedProcess::~StoppedProcess() { resume(); }
StoppedProcess::StoppedProcess(StoppedProcess&& other) noexcept
    : urgent_(std::move(other.urgent_)),
      begin_(other.begin_),
      longest_pause_(std::exchange(other.longest_pause_, nullptr)),
      held_(std::exchange(other.held_, {})),
      threads_(std::exchange(other.threads_, {})) {}

Result<bool> StoppedProcess::seize_new_threads(pid_t pid) {
  bool any = false;
  for (pid_t tid : all_threads(pid)) {
    if (std::ranges::any_of(held_, [&](const HeldThread& h) { return h.tid == tid; })) continue;
    if (!SONDE_TRY(seize(pid, tid))) continue;
    held_.push_back({.tid = tid});
    any = true;
  }
  return any;
}

bool StoppedProcess::interrupt(HeldThread& held) {
  if (ptrace(PTRACE_INTERRUPT, held.tid, nullptr, nullptr) != 0 && errno == ESRCH) held.gone = true;
  return !held.gone;
}

Result<StoppedProcess> StoppedProcess::stop(pid_t pid, std::chrono::nanoseconds* longest_pause) {
  StoppedProcess process;
  pid_t group = SONDE_TRY(check_traceable(pid));
  // What takes time comes before the first of them stands.
  SONDE_TRY(process.seize_new_threads(group));
  std::vector<std::pair<pid_t, std::string>> names;
  for (const HeldThread& held : process.held_) names.emplace_back(held.tid, thread_name(group, held.tid));
  process.urgent_ = std::make_unique<Urgent>();
  process.longest_pause_ = longest_pause;
  process.begin_ = std::chrono::steady_clock::now();
  // A thread that runs may make others until it stands: repeat until a whole look at the list finds nobody new.
  size_t interrupted = 0;
  do {
    for (size_t i = interrupted; i < process.held_.size(); i++) process.interrupt(process.held_[i]);
    for (; interrupted < process.held_.size(); interrupted++)
      if (HeldThread& held = process.held_[interrupted]; !wait_until_stopped(held, kPatience, true))
        return fail(
            fmt::format("thread {} of process {} does not stop: it waits in the kernel for a vfork child or a device "
                        "(state {}); try again later",
                        held.tid, group, status_field(held.tid, "State")));
  } while (SONDE_TRY(process.seize_new_threads(group)));
  for (HeldThread& held : process.held_) {
    if (held.gone) continue;
    auto regs = SONDE_TRY(read_registers(held));
    if (held.gone) continue;
    auto name = std::ranges::find(names, held.tid, &std::pair<pid_t, std::string>::first);
    process.threads_.push_back({held.tid, name == names.end() ? thread_name(group, held.tid) : name->second, regs});
  }
  if (process.threads_.empty()) return fail(fmt::format("process {} ended while it was being stopped", pid));
  return process;
}

Result<bool> StoppedProcess::let_run(pid_t tid, std::chrono::microseconds moment) {
  auto held = std::ranges::find(held_, tid, &HeldThread::tid);
  auto thread = std::ranges::find(threads_, tid, &StoppedThread::tid);
  if (held == held_.end() || held->gone || thread == threads_.end()) return false;
  Hurry hurry(tid, 20);  // it must get a processor now, whoever else wants one
  if (ptrace(PTRACE_CONT, tid, nullptr, static_cast<long>(std::exchange(held->signal, 0))) != 0) return false;
  held->stopped = false;
  std::this_thread::sleep_for(moment);
  bool stands = !interrupt(*held) || wait_until_stopped(*held, kPatience, true);
  if (!stands) return fail(fmt::format("thread {} does not stop any more; try again later", tid));
  if (!held->gone) thread->regs = SONDE_TRY(read_registers(*held));
  return !held->gone;
}

void StoppedProcess::resume() {
  for (HeldThread& held : held_) {
    // After an error some may not stand yet, and only who stands can be let go; the kernel does it when sonde ends.
    if (wait_until_stopped(held, kLastPatience)) let_go(held);
  }
  if (longest_pause_)
    *longest_pause_ = std::max<std::chrono::nanoseconds>(*longest_pause_, std::chrono::steady_clock::now() - begin_);
  longest_pause_ = nullptr;
  held_.clear();
  urgent_.reset();
}

}  // namespace sonde::host
