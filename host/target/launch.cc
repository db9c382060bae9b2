#include "host/target/launch.h"

#include <elf.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <cstring>
#include <map>

#include "host/image/maps.h"
#include "host/target/program_file.h"
#include "host/target/threads.h"

namespace sonde::host {

namespace {

constexpr uint64_t kPageBytes = 4096;
constexpr uint64_t kScratchBytes = 64 << 10;  // agent path, or a copy of the dynamic section

struct Pipe {
  int read_end = -1, write_end = -1;
  Pipe() {
    int fds[2];
    if (pipe2(fds, O_CLOEXEC) == 0) read_end = fds[0], write_end = fds[1];
  }
  ~Pipe() { close_read(), close_write(); }
  void close_read() {
    if (read_end >= 0) close(std::exchange(read_end, -1));
  }
  void close_write() {
    if (write_end >= 0) close(std::exchange(write_end, -1));
  }
};

// The child's half: waits until it is seized, then becomes the program. Says errno on `failed` if it cannot.
[[noreturn]] void become_program(const LaunchRequest& request, Pipe& go, Pipe& failed) {
  go.close_write();
  char byte;
  if (read(go.read_end, &byte, 1) != 1) _exit(127);  // the parent gave up
  for (int fd : request.inherited) fcntl(fd, F_SETFD, 0);
  std::vector<char*> argv;
  for (const std::string& word : request.command) argv.push_back(const_cast<char*>(word.c_str()));
  argv.push_back(nullptr);
  execvp(argv[0], argv.data());
  int error = errno;
  (void)!write(failed.write_end, &error, sizeof error);
  _exit(127);
}

std::unexpected<Error> exec_failed(const std::string& program, int error) {
  return fail(fmt::format("cannot run '{}': {}", program, std::strerror(error)), error == ENOENT ? 127 : 126);
}

// Once the old program is gone, exec has no other way to fail. The status is what a shell shows then.
std::unexpected<Error> killed_by_exec(const std::string& program, int signal) {
  return fail(fmt::format("cannot run '{}': the kernel ended it by signal {} ({}) before its first instruction, as it "
                          "does when a file is cut off or damaged, or too large for memory; see readelf -l '{}'",
                          program, signal, strsignal(signal), program),
              128 + signal);
}

// Waits for the stop at exec.
Result<void> wait_for_exec(pid_t pid, const std::string& program, Pipe& failed) {
  for (;;) {
    int status;
    if (waitpid(pid, &status, __WALL) < 0) {
      if (errno == EINTR) continue;
      return fail_errno("wait for the program");
    }
    if (WIFEXITED(status) || WIFSIGNALED(status)) {
      int error = 0;
      if (read(failed.read_end, &error, sizeof error) == sizeof error) return exec_failed(program, error);
      if (WIFSIGNALED(status)) return killed_by_exec(program, WTERMSIG(status));
      return fail(fmt::format("'{}' ended before it started", program));
    }
    if (status >> 8 == (SIGTRAP | PTRACE_EVENT_EXEC << 8)) return {};
    int deliver = status >> 16 == 0 ? WSTOPSIG(status) : 0;
    if (ptrace(PTRACE_CONT, pid, nullptr, reinterpret_cast<void*>(static_cast<intptr_t>(deliver))) != 0)
      return fail_errno("continue the program");
  }
}

Result<std::map<uint64_t, uint64_t>> read_auxv(pid_t pid) {
  std::string path = fmt::format("/proc/{}/auxv", pid);
  int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return fail_errno("open " + path);
  std::map<uint64_t, uint64_t> values;
  Elf64_auxv_t entry;
  while (read(fd, &entry, sizeof entry) == sizeof entry && entry.a_type != AT_NULL)
    values[entry.a_type] = entry.a_un.a_val;
  close(fd);
  return values;
}

Result<std::vector<uint8_t>> read_bytes(const Tracee& tracee, Addr at, size_t size) {
  std::vector<uint8_t> bytes(size);
  SONDE_TRY_VOID(tracee.read(at, bytes));
  return bytes;
}

Result<Addr> find_syscall_instruction(const Tracee& tracee, pid_t pid, Addr inside) {
  for (const Mapping& mapping : SONDE_TRY(read_maps(pid))) {
    if (!mapping.executable || !mapping.range.contains(inside)) continue;
    auto bytes = SONDE_TRY(read_bytes(tracee, mapping.range.begin, mapping.range.size()));
    static constexpr uint8_t kSyscall[] = {0x0f, 0x05};
    auto found = std::search(bytes.begin(), bytes.end(), std::begin(kSyscall), std::end(kSyscall));
    if (found != bytes.end()) return mapping.range.begin + (found - bytes.begin());
  }
  return fail("no system call instruction found in the program's loader");
}

// Makes the loader load one more library, last of the program's own: undo() takes the traces of that back.
class ExtraNeeded {
 public:
  ExtraNeeded(Tracee& tracee, Addr syscall_instruction) : tracee_(tracee), syscall_(syscall_instruction) {}

  Result<void> apply(const std::map<uint64_t, uint64_t>& auxv, const std::string& library) {
    SONDE_TRY_VOID(find_dynamic(auxv));
    scratch_ = Addr(static_cast<uint64_t>(SONDE_TRY(tracee_.system_call(
        syscall_, SYS_mmap, {0, kScratchBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, ~0ull, 0}))));
    if (scratch_.value > -4096ull) return fail("no memory in the program for its preparation");
    std::vector<uint8_t> name(library.begin(), library.end());
    name.push_back(0);
    SONDE_TRY_VOID(tracee_.write(scratch_, name));

    auto null = std::find_if(dynamic_.begin(), dynamic_.end(), [](const auto& d) { return d.d_tag == DT_NULL; });
    auto strtab = std::find_if(dynamic_.begin(), null, [](const auto& d) { return d.d_tag == DT_STRTAB; });
    if (null == dynamic_.end() || strtab == null) return fail("the program's dynamic section is damaged");
    Elf64_Dyn needed{};
    needed.d_tag = DT_NEEDED;
    needed.d_un.d_val = scratch_.value - (bias_ + strtab->d_un.d_ptr);
    if (null + 1 != dynamic_.end() && (null + 1)->d_tag == DT_NULL) {
      borrowed_ = dynamic_addr_ + (null - dynamic_.begin()) * static_cast<int64_t>(sizeof(Elf64_Dyn));
      return tracee_.write_as(borrowed_, needed);
    }
    return move_dynamic(needed, static_cast<size_t>(null - dynamic_.begin()));
  }

  Result<void> undo() {
    if (borrowed_) {
      SONDE_TRY_VOID(tracee_.write_as(borrowed_, Elf64_Dyn{}));
      SONDE_TRY(tracee_.system_call(syscall_, SYS_munmap, {scratch_.value, kScratchBytes}));
      return {};
    }
    // The loader keeps using the copy. Debuggers look for DT_DEBUG in the section's own place.
    auto copy = SONDE_TRY(read_bytes(tracee_, copy_, dynamic_.size() * sizeof(Elf64_Dyn)));
    SONDE_TRY_VOID(tracee_.write_as(phdr_vaddr_, dynamic_vaddr_));
    for (size_t i = 0; i < dynamic_.size(); i++) {
      Elf64_Dyn entry;
      std::memcpy(&entry, copy.data() + i * sizeof entry, sizeof entry);
      if (entry.d_tag == DT_DEBUG)
        SONDE_TRY_VOID(tracee_.write_as(dynamic_addr_ + static_cast<int64_t>(i * sizeof entry), entry));
    }
    return {};
  }

 private:
  Result<void> find_dynamic(const std::map<uint64_t, uint64_t>& auxv) {
    Addr phdr(auxv.at(AT_PHDR));
    auto bytes = SONDE_TRY(read_bytes(tracee_, phdr, auxv.at(AT_PHNUM) * sizeof(Elf64_Phdr)));
    std::optional<Elf64_Phdr> dynamic;
    size_t dynamic_index = 0;
    for (size_t i = 0; i * sizeof(Elf64_Phdr) < bytes.size(); i++) {
      Elf64_Phdr header;
      std::memcpy(&header, bytes.data() + i * sizeof header, sizeof header);
      if (header.p_type == PT_PHDR) bias_ = phdr.value - header.p_vaddr;
      if (header.p_type == PT_DYNAMIC) dynamic = header, dynamic_index = i;
    }
    if (!dynamic) return fail("the program has no dynamic section");
    phdr_vaddr_ = phdr + static_cast<int64_t>(dynamic_index * sizeof(Elf64_Phdr) + offsetof(Elf64_Phdr, p_vaddr));
    dynamic_vaddr_ = dynamic->p_vaddr;
    dynamic_addr_ = Addr(bias_ + dynamic->p_vaddr);
    auto section = SONDE_TRY(read_bytes(tracee_, dynamic_addr_, dynamic->p_memsz));
    dynamic_.resize(section.size() / sizeof(Elf64_Dyn));
    std::memcpy(dynamic_.data(), section.data(), dynamic_.size() * sizeof(Elf64_Dyn));
    return {};
  }

  // No spare entry: the program header, in memory, points to a copy with one more.
  Result<void> move_dynamic(const Elf64_Dyn& needed, size_t entries) {
    copy_ = scratch_ + PATH_MAX;
    std::vector<Elf64_Dyn> longer(dynamic_.begin(), dynamic_.begin() + static_cast<int64_t>(entries));
    longer.push_back(needed);
    longer.push_back(Elf64_Dyn{});
    size_t size = longer.size() * sizeof(Elf64_Dyn);
    if (size > kScratchBytes - PATH_MAX) return fail("the program's dynamic section is unreasonably long");
    SONDE_TRY_VOID(tracee_.write(copy_, {reinterpret_cast<uint8_t*>(longer.data()), size}));
    return tracee_.write_as(phdr_vaddr_, copy_.value - bias_);
  }

  Tracee& tracee_;
  Addr syscall_, scratch_, copy_, borrowed_, dynamic_addr_, phdr_vaddr_;
  uint64_t bias_ = 0, dynamic_vaddr_ = 0;
  std::vector<Elf64_Dyn> dynamic_;
};

// glibc's loader starts with `mov %rsp,%rdi; call _dl_start`. Behind the call, at _dl_start_user, all libraries are
// relocated and the constructors come next (sysdeps/x86_64/dl-machine.h, RTLD_START).
Result<Addr> after_dl_start(const Tracee& tracee, Addr loader_entry) {
  auto code = SONDE_TRY(tracee.read_as<std::array<uint8_t, 12>>(loader_entry));
  static constexpr uint8_t kStart[] = {0x48, 0x89, 0xe7, 0xe8};
  for (size_t skip : {size_t{0}, size_t{4}})  // an endbr64 may come first
    if (std::equal(std::begin(kStart), std::end(kStart), code.begin() + static_cast<int64_t>(skip)))
      return loader_entry + static_cast<int64_t>(skip) + 8;
  return fail("the program's loader is not glibc's: programs of other C libraries cannot be recorded yet");
}

Result<void> check_program(pid_t pid, const std::string& program, const std::map<uint64_t, uint64_t>& auxv) {
  std::string exe = fmt::format("/proc/{}/exe", pid);
  auto opened = Image::open(exe);
  if (!opened) {  // as the file that it is
    std::string message = opened.error().message;
    if (size_t at = message.find(exe); at != message.npos) message.replace(at, exe.size(), program);
    return fail(std::move(message), opened.error().exit_status);
  }
  auto image = *std::move(opened);
  if (image->machine() != EM_X86_64) return fail(fmt::format("'{}' is not an x86-64 program", program), 126);
  auto base = auxv.find(AT_BASE);
  if (!image->interpreter() || base == auxv.end() || base->second == 0)
    return fail(fmt::format("'{}' is statically linked: static programs cannot be recorded yet", program), 126);
  return {};
}

// Whether the program was started with SIGTRAP ignored: breakpoints take that back to the default.
Result<bool> ignores_sigtrap(pid_t pid) {
  std::string ignored = status_field(pid, "SigIgn");
  if (ignored.empty()) return fail(fmt::format("/proc/{}/status does not say which signals are ignored", pid));
  return (std::stoull(ignored, nullptr, 16) >> (SIGTRAP - 1) & 1) != 0;
}

Result<void> ignore_sigtrap(Tracee& tracee, Addr syscall_instruction) {
  uint64_t action[4] = {reinterpret_cast<uint64_t>(SIG_IGN), 0, 0, 0};  // the kernel's struct sigaction
  Addr scratch(static_cast<uint64_t>(SONDE_TRY(tracee.system_call(
      syscall_instruction, SYS_mmap, {0, kPageBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, ~0ull, 0}))));
  if (scratch.value > -4096ull) return fail("no memory in the program for its preparation");
  SONDE_TRY_VOID(tracee.write_as(scratch, action));
  if (SONDE_TRY(tracee.system_call(syscall_instruction, SYS_rt_sigaction, {SIGTRAP, scratch.value, 0, 8})) != 0)
    return fail("cannot have the program ignore SIGTRAP again");
  SONDE_TRY(tracee.system_call(syscall_instruction, SYS_munmap, {scratch.value, kPageBytes}));
  return {};
}

Result<void> prepare(Launched& launched, const LaunchRequest& request, std::optional<ExitStatus>* ended) {
  auto auxv = SONDE_TRY(read_auxv(launched.pid));
  SONDE_TRY_VOID(check_program(launched.pid, launched.program, auxv));
  Tracee& tracee = launched.tracee;
  launched.loader_base = Addr(auxv.at(AT_BASE));
  Addr loader_entry(SONDE_TRY(tracee.regs()).rip);
  uint64_t mask = SONDE_TRY(tracee.signal_mask());
  bool ignores = SONDE_TRY(ignores_sigtrap(launched.pid));
  if ((*ended = SONDE_TRY(tracee.run_to(loader_entry)))) return {};  // leaves the exec call itself behind
  launched.syscall_instruction = SONDE_TRY(find_syscall_instruction(tracee, launched.pid, loader_entry));
  Addr ready = SONDE_TRY(after_dl_start(tracee, loader_entry));
  ExtraNeeded extra(tracee, launched.syscall_instruction);
  SONDE_TRY_VOID(extra.apply(auxv, request.agent));
  if ((*ended = SONDE_TRY(tracee.run_to(ready)))) return {};
  SONDE_TRY_VOID(extra.undo());
  if (ignores) SONDE_TRY_VOID(ignore_sigtrap(tracee, launched.syscall_instruction));
  return tracee.set_signal_mask(mask);
}

// set-user-id programs run without their privileges under a tracer: not as untraced.
Result<void> refuse_privileged(pid_t pid) {
  struct stat st;
  std::string exe = fmt::format("/proc/{}/exe", pid);
  if (stat(exe.c_str(), &st) != 0) return fail_errno("stat " + exe);
  bool privileged =
      ((st.st_mode & S_ISUID) && st.st_uid != geteuid()) || ((st.st_mode & S_ISGID) && st.st_gid != getegid());
  if (privileged && geteuid() != 0)
    return fail(
        "the program is set-user-id or set-group-id: under sonde it would run without these rights; run sonde as root",
        126);
  return {};
}

}  // namespace

Result<Launched> launch(const LaunchRequest& request, std::optional<ExitStatus>* ended) {
  SONDE_TRY_VOID(check_program_file(request.command.front()));
  Pipe go, failed;
  if (go.read_end < 0 || failed.read_end < 0) return fail_errno("make a pipe");
  pid_t pid = fork();
  if (pid < 0) return fail_errno("fork");
  if (pid == 0) become_program(request, go, failed);
  go.close_read(), failed.close_write();

  auto start = [&]() -> Result<Launched> {
    if (ptrace(PTRACE_SEIZE, pid, nullptr, PTRACE_O_TRACEEXEC | PTRACE_O_EXITKILL) != 0)
      return fail_errno("trace the program (is ptrace allowed here? see kernel.yama.ptrace_scope and seccomp filters)");
    if (write(go.write_end, "", 1) != 1) return fail_errno("start the program");
    SONDE_TRY_VOID(wait_for_exec(pid, request.command.front(), failed));
    char path[PATH_MAX];
    ssize_t length = readlink(fmt::format("/proc/{}/exe", pid).c_str(), path, sizeof path);
    if (length < 0) return fail_errno("find the program's file");
    SONDE_TRY_VOID(refuse_privileged(pid));
    Launched launched{pid, SONDE_TRY(Tracee::adopt(pid, pid)), Addr(), Addr(),
                      std::string(path, static_cast<size_t>(length))};
    SONDE_TRY_VOID(prepare(launched, request, ended));
    return launched;
  };
  auto launched = start();
  if (!launched) {
    kill(pid, SIGKILL);
    waitpid(pid, nullptr, __WALL);
  }
  return launched;
}

}  // namespace sonde::host
