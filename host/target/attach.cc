#include "host/target/attach.h"

#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <limits.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <thread>

#include "host/target/program_file.h"
#include "host/target/target.h"

namespace sonde::host {

namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr auto kPatience = milliseconds(5000), kOnlyWaiting = milliseconds(200), kPauseBetween = milliseconds(2);
constexpr uint64_t kScratchBytes = 256 << 10;  // texts from its beginning, the calls' stack from its end
constexpr uint64_t kTextBytes = 16 << 10;
constexpr unsigned kMostFrames = 10000;

std::string exe_of(pid_t pid) {
  char path[PATH_MAX];
  ssize_t length = readlink(fmt::format("/proc/{}/exe", pid).c_str(), path, sizeof path);
  std::string name(path, length < 0 ? 0 : static_cast<size_t>(length));
  if (name.ends_with(" (deleted)")) name.resize(name.size() - std::strlen(" (deleted)"));
  return name;
}

std::string base_name(const std::string& path) { return path.substr(path.rfind('/') + 1); }

bool is_loader(const Image& image) {
  std::string name = base_name(image.path());
  return name.starts_with("ld-linux") || name.starts_with("ld-2.") || image.soname().starts_with("ld-linux");
}
bool is_c_library(const Image& image) { return image.soname() == "libc.so.6"; }

// Who is in one of these holds a lock of the allocator or the loader, or changes what they keep.
bool holds_locks(std::string_view function) {
  static constexpr std::array<std::string_view, 12> kParts = {"alloc",      "free",    "dlopen", "dlclose",
                                                              "dlsym",      "dlmopen", "_dl_",   "memalign",
                                                              "dl_iterate", "fork",    "arena",  "tcache"};
  return std::ranges::any_of(kParts, [&](std::string_view part) { return function.find(part) != function.npos; });
}

// Calls that wait for something outside. Neither allocator nor loader ever make them; a futex is a lock's as well. What a stop
// interrupted is called restart_syscall later if it has a limit of time, which locks have not.
bool waits_outside(uint64_t call) {
  static constexpr std::array<uint64_t, 35> kCalls = {
      SYS_read,           SYS_write,           SYS_readv,    SYS_writev,          SYS_recvfrom,       SYS_sendto,
      SYS_recvmsg,        SYS_sendmsg,         SYS_recvmmsg, SYS_accept,          SYS_accept4,        SYS_connect,
      SYS_poll,           SYS_ppoll,           SYS_select,   SYS_pselect6,        SYS_epoll_wait,     SYS_epoll_pwait,
      SYS_epoll_pwait2,   SYS_nanosleep,       SYS_wait4,    SYS_clock_nanosleep, SYS_waitid,         SYS_pause,
      SYS_rt_sigsuspend,  SYS_rt_sigtimedwait, SYS_flock,    SYS_pread64,         SYS_pwrite64,       SYS_io_getevents,
      SYS_io_uring_enter, SYS_semtimedop,      SYS_msgrcv,   SYS_semop,           SYS_restart_syscall};
  return std::ranges::find(kCalls, call) != kCalls.end();
}

enum class Place : uint8_t { bad, computes, waits };

// Where the thread stands, from its whole stack. Anything but a proof is bad.
Place judge(const StackTarget& images, const ThreadStack& stack, const user_regs_struct& regs) {
  if (!is_reliable(stack.result.reason)) return Place::bad;
  bool waits = static_cast<int64_t>(regs.orig_rax) >= 0 && waits_outside(regs.orig_rax);
  bool in_futex = static_cast<int64_t>(regs.orig_rax) == SYS_futex, on_condition = false;
  for (size_t i = 0; i < stack.frames.size(); i++) {
    const Frame& frame = stack.frames[i];
    const LoadedImage* loaded = images.image_at(frame.code().lookup());
    if (!is_reliable(frame) || !loaded) return Place::bad;
    if (i && frame.source == Source::regs_pc) return Place::bad;  // a signal handler, of whatever it interrupted
    const Image& image = *loaded->image;
    if (is_loader(image)) return Place::bad;
    auto hit = image.find(loaded->to_image(frame.code().lookup()));
    std::string_view name = hit ? std::string_view(hit->function->name) : "";
    if (holds_locks(name)) return Place::bad;
    on_condition |= name.starts_with("pthread_cond_") || name.starts_with("__pthread_cond_") ||
                    name.starts_with("sem_") || name.find("pthread_join") != name.npos ||
                    name.find("pthread_timedjoin") != name.npos || name.starts_with("__pthread_clockjoin");
    if (i == 0 && is_c_library(image) && !waits && !in_futex) return Place::bad;
  }
  if (waits || (in_futex && on_condition)) return Place::waits;
  return in_futex ? Place::bad : Place::computes;
}

Result<Addr> find_system_call(const StackTarget& images) {
  static constexpr uint8_t kSyscall[] = {0x0f, 0x05};
  for (const LoadedImage& loaded : images.images()) {
    if (!is_loader(*loaded.image)) continue;
    for (const Segment& segment : loaded.image->segments()) {
      if (!segment.executable) continue;
      auto code = loaded.image->bytes(segment.range);
      auto found = std::search(code.begin(), code.end(), std::begin(kSyscall), std::end(kSyscall));
      if (found != code.end()) return loaded.to_target(segment.range.begin + (found - code.begin()));
    }
  }
  return fail("no system call instruction found in the program's loader");
}

Result<int> open_theirs(pid_t pid, int fd) {
  std::string path = fmt::format("/proc/{}/fd/{}", pid, fd);
  int ours = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (ours < 0) return fail_errno("open " + path);
  return ours;
}

// A memory file of the program's process, empty.
Result<int> make_memory_file(LentThread& lent, const char* name) {
  Addr text = SONDE_TRY(lent.put(name));
  int64_t fd = SONDE_TRY(lent.tracee().system_call(lent.syscall_instruction(), SYS_memfd_create,
                                                   {text.value, MFD_CLOEXEC | MFD_ALLOW_SEALING}));
  if (fd < 0) return fail(fmt::format("the program can make no memory file: {}", std::strerror(static_cast<int>(-fd))));
  return static_cast<int>(fd);
}

bool same_file(const std::string& a, const std::string& b) {
  struct stat x, y;
  return stat(a.c_str(), &x) == 0 && stat(b.c_str(), &y) == 0 && x.st_dev == y.st_dev && x.st_ino == y.st_ino;
}

// As the program's process sees it: the file itself, or (in another mount namespace) a copy in a memory file `*fd`.
Result<std::string> agent_for(pid_t pid, const AgentFile& agent, LentThread& lent, int* fd) {
  if (same_file(fmt::format("/proc/{}/root{}", pid, agent.path), agent.path)) return agent.path;
  *fd = SONDE_TRY(make_memory_file(lent, "libsonde-agent.so"));
  int to = SONDE_TRY(open_theirs(pid, *fd)), from = open(agent.path.c_str(), O_RDONLY | O_CLOEXEC);
  bool copied = from >= 0;
  std::array<char, 65536> buffer;
  for (ssize_t n; copied && (n = read(from, buffer.data(), buffer.size())) != 0;)
    copied = n > 0 && write(to, buffer.data(), static_cast<size_t>(n)) == n;
  int error = errno;
  close(to);
  if (from >= 0) close(from);
  if (!copied) return fail(fmt::format("the agent cannot be copied into the program: {}", std::strerror(error)));
  return fmt::format("/proc/self/fd/{}", *fd);
}

}  // namespace

Result<LentThread> LentThread::find(pid_t pid) {
  auto images = std::make_shared<StackTarget>(SONDE_TRY(StackTarget::of_images(pid)));
  Addr syscall = SONDE_TRY(find_system_call(*images));
  auto begin = steady_clock::now();
  for (;;) {
    auto waited = steady_clock::now() - begin;
    auto threads = live_threads(pid);
    if (threads.empty()) return fail(fmt::format("process {} has ended", pid));
    for (pid_t tid : threads) {
      auto still = SONDE_TRY(StillThread::hold(pid, tid));
      if (!still) continue;
      Tracee tracee = SONDE_TRY(Tracee::borrow(tid, pid));
      auto regs = SONDE_TRY(tracee.regs());
      auto stack = SONDE_TRY(images->walk_now(still->thread(), {.max_frames = kMostFrames, .reliable_only = true}));
      Place place = judge(*images, stack, regs);
      if (place == Place::waits || (place == Place::computes && waited > kOnlyWaiting))
        return LentThread(std::move(*still), std::move(tracee), images, syscall);
    }
    if (waited > kPatience) break;
    std::this_thread::sleep_for(kPauseBetween);
  }
  return fail(
      fmt::format("no thread of process {} came to a place where it can load a library: each was in the "
                  "allocator, the loader, a signal handler, or its stack cannot be walked reliably (sonde stack -p "
                  "{} shows them)",
                  pid, pid));
}

Result<void> LentThread::make_scratch() {
  if (scratch_) return {};
  int64_t at = SONDE_TRY(tracee_.system_call(
      syscall_, SYS_mmap, {0, kScratchBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, ~0ull, 0}));
  if (at < 0 && at > -4096)
    return fail(
        fmt::format("the program cannot map {} bytes: {}", kScratchBytes, std::strerror(static_cast<int>(-at))));
  scratch_ = Addr(static_cast<uint64_t>(at));
  return {};
}

LentThread::~LentThread() {
  if (scratch_ && tracee_.thread()) (void)tracee_.system_call(syscall_, SYS_munmap, {scratch_.value, kScratchBytes});
}

Result<Addr> LentThread::put(const std::string& text) {
  SONDE_TRY_VOID(make_scratch());
  if (used_ + text.size() + 1 > kTextBytes) used_ = 0;
  if (text.size() + 1 > kTextBytes) return fail("a name is too long: " + text.substr(0, 100));
  Addr at = scratch_ + static_cast<int64_t>(used_);
  std::vector<uint8_t> bytes(text.begin(), text.end());
  bytes.push_back(0);
  used_ += bytes.size();
  SONDE_TRY_VOID(tracee_.write(at, bytes));
  return at;
}

Result<std::string> LentThread::read_text(Addr at) {
  std::string text;
  while (text.size() < 1000) {
    char c = static_cast<char>(SONDE_TRY(tracee_.read_as<uint8_t>(at + static_cast<int64_t>(text.size()))));
    if (!c) break;
    text += c;
  }
  return text;
}

Result<uint64_t> LentThread::call(const std::string& function, std::initializer_list<uint64_t> arguments) {
  SONDE_TRY_VOID(make_scratch());
  for (const LoadedImage& loaded : images_->images()) {
    std::string_view soname = loaded.image->soname();
    if (soname != "libc.so.6" && soname != "libdl.so.2") continue;
    if (auto at = loaded.image->symbol(function))
      return tracee_.call(loaded.to_target(*at), arguments, scratch_ + static_cast<int64_t>(kScratchBytes), syscall_);
  }
  return fail(fmt::format("the program's C library has no {}", function));
}

namespace {

// Who has the session of the agent in `maps` mapped, and is not a target itself, as forked children are: those have the page of
// presence too. 0: nobody that we may look into.
pid_t recorder_of(const std::vector<Mapping>& maps) {
  auto is_session = [](const Mapping& m) { return m.path.starts_with("/memfd:sonde") && m.shared && m.writable; };
  auto session = std::ranges::find_if(maps, is_session);
  if (session == maps.end()) return 0;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc", error)) {
    pid_t other = std::atoi(entry.path().filename().c_str());
    auto theirs = other > 0 ? read_maps(other) : Result<std::vector<Mapping>>(std::vector<Mapping>());
    if (!theirs) continue;
    bool maps_it = std::ranges::any_of(*theirs, [&](const Mapping& m) {
      return m.inode == session->inode && m.device == session->device && is_session(m);
    });
    bool is_target = std::ranges::any_of(
        *theirs, [](const Mapping& m) { return m.path.starts_with("/memfd:sonde") && m.shared && !m.readable; });
    if (maps_it && !is_target) return other;
  }
  return 0;
}

}  // namespace

Result<pid_t> check_attachable(pid_t pid, const AgentFile& agent, bool* left) {
  *left = false;
  pid = SONDE_TRY(check_traceable(pid));
  std::string name = status_field(pid, "Name");
  auto refuse = [&](std::string why) { return fail(fmt::format("process {} ({}) {}", pid, name, why)); };
  if (pid == getpid()) return refuse("is sonde itself");
  auto maps = read_maps(pid);
  if (!maps || maps->empty()) return std::unexpected(not_permitted(pid));
  std::string exe = fmt::format("/proc/{}/exe", pid);
  auto image = Image::open(exe);
  if (!image) return refuse("cannot be read: " + image.error().message);
  if ((*image)->machine() != EM_X86_64) return refuse("is not an x86-64 program");
  if (!(*image)->interpreter()) return refuse("is statically linked: static programs cannot be recorded yet");
  if (status_field(pid, "Seccomp") != "0")
    return refuse("runs under a seccomp filter, which might end it for what attaching needs");
  bool c_library = false;
  for (const LoadedImage& loaded : SONDE_TRY(loaded_images(pid, nullptr))) {
    c_library |= is_c_library(*loaded.image);
    bool same = loaded.image->build_id() == agent.image->build_id();
    if (!same && base_name(loaded.image->path()) != base_name(agent.path)) continue;
    if (pid_t recorder = recorder_of(*maps))
      return refuse(fmt::format("is recorded already, by process {}: end that recording first", recorder));
    if (!same)
      return refuse("has the agent of another sonde in it, whose recorder is gone: `sonde detach` of that one");
    *left = true;
  }
  if (!c_library) return refuse("has no glibc: programs of other C libraries cannot be recorded yet");
  return pid;
}

Result<std::string> take_out_left(pid_t pid, const AgentFile& agent) {
  Target target = SONDE_TRY(Target::recover(pid, agent));
  std::chrono::nanoseconds pause{0};
  return target.detach(pid, &pause);
}

Result<Attached> attach(pid_t pid, const AgentFile& agent, LentThread& lent) {
  Attached attached;
  attached.pid = pid;
  attached.program = exe_of(pid);
  attached.their_session_fd = SONDE_TRY(make_memory_file(lent, "sonde"));
  attached.their_presence_fd = SONDE_TRY(make_memory_file(lent, "sonde"));
  attached.session_fd = SONDE_TRY(open_theirs(pid, attached.their_session_fd));
  attached.presence_fd = SONDE_TRY(open_theirs(pid, attached.their_presence_fd));
  int copy = -1;
  std::string path = SONDE_TRY(agent_for(pid, agent, lent, &copy));
  uint64_t handle = SONDE_TRY(lent.call("dlopen", {SONDE_TRY(lent.put(path)).value, RTLD_NOW}));
  if (copy >= 0)
    SONDE_TRY(lent.tracee().system_call(lent.syscall_instruction(), SYS_close, {static_cast<uint64_t>(copy)}));
  if (!handle) {
    uint64_t why = SONDE_TRY(lent.call("dlerror", {}));
    return fail(fmt::format("the program cannot load the agent: {}",
                            why ? SONDE_TRY(lent.read_text(Addr(why))) : std::string("dlopen does not say why")));
  }
  attached.agent_handle = Addr(handle);
  return attached;
}

}  // namespace sonde::host
