#include "tests/step/tracee.h"

#include <Zydis/Zydis.h>
#include <elf.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <string.h>
#include <sys/personality.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <thread>

#include "core/isa/code.h"
#include "host/target/threads.h"

namespace sonde::stepping {
namespace {

constexpr int kRoundsToCompare = 4;  // of a repeated instruction

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

double processor_time(pid_t pid) {
  clockid_t clock;
  timespec t{};
  if (clock_getcpuclockid(pid, &clock) != 0 || clock_gettime(clock, &t) != 0) return 0;
  return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) / 1e9;
}

}  // namespace

Insn Tracee::classify(std::span<const uint8_t> bytes) const {
  static const ZydisDecoder decoder = [] {
    ZydisDecoder d;
    ZydisDecoderInit(&d, ZYDIS_MACHINE_MODE_LONG_64, ZYDIS_STACK_WIDTH_64);
    return d;
  }();
  ZydisDecodedInstruction i;
  ZydisDecodedOperand operands[ZYDIS_MAX_OPERAND_COUNT];
  Insn insn;
  if (!ZYAN_SUCCESS(ZydisDecoderDecodeFull(&decoder, bytes.data(), bytes.size(), &i, operands))) return insn;
  insn.length = i.length;
  insn.repeats = i.attributes & (ZYDIS_ATTRIB_HAS_REP | ZYDIS_ATTRIB_HAS_REPE | ZYDIS_ATTRIB_HAS_REPNE);
  switch (i.mnemonic) {
    case ZYDIS_MNEMONIC_CALL: insn.effect = Effect::call; return insn;
    case ZYDIS_MNEMONIC_RET:
      insn.effect = Effect::ret;
      insn.repeats = false;
      return insn;
    case ZYDIS_MNEMONIC_SYSCALL: insn.effect = Effect::system_call; return insn;
    case ZYDIS_MNEMONIC_JMP:
      if (operands[0].type != ZYDIS_OPERAND_TYPE_IMMEDIATE) insn.effect = Effect::jump_indirect;
      return insn;
    case ZYDIS_MNEMONIC_MOV:
    case ZYDIS_MNEMONIC_XCHG:
    case ZYDIS_MNEMONIC_LEA:
    case ZYDIS_MNEMONIC_POP:
    case ZYDIS_MNEMONIC_LEAVE:
      for (int o = 0; o < i.operand_count_visible; o++)
        if (operands[o].type == ZYDIS_OPERAND_TYPE_REGISTER && operands[o].reg.value == ZYDIS_REGISTER_RSP &&
            (operands[o].actions & ZYDIS_OPERAND_ACTION_MASK_WRITE))
          insn.effect = Effect::sets_sp;
      return insn;
    default: return insn;
  }
}

host::Result<std::unique_ptr<Tracee>> Tracee::launch(const Command& command) {
  std::vector<std::string> words = command.words;
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  pid_t pid = fork();
  if (pid == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    setsid();  // without a terminal, whose settings might stop everybody here
    int in = open(command.input.empty() ? "/dev/null" : command.input.c_str(), O_RDONLY),
        out = open("/dev/null", O_WRONLY);
    dup2(in, 0), dup2(out, 1), dup2(out, 2);
    for (int fd = 3; fd < 256; fd++) close(fd);
    personality(ADDR_NO_RANDOMIZE);  // two runs of a program are alike
    ptrace(PTRACE_TRACEME, 0, nullptr, nullptr);
    execvp(argv[0], argv.data());
    _exit(127);
  }
  std::unique_ptr<Tracee> tracee(new Tracee(pid));
  if (!tracee->wait()) return host::fail(fmt::format("{}: {}", words[0], tracee->end_));
  ptrace(PTRACE_SETOPTIONS, pid, nullptr, PTRACE_O_EXITKILL);
  tracee->file_ = std::filesystem::read_symlink(fmt::format("/proc/{}/exe", pid));
  tracee->get_regs();
  tracee->reload();
  return tracee;
}

Tracee::~Tracee() {
  if (!end_.empty()) return;
  kill(pid_, SIGKILL);
  waitpid(pid_, nullptr, __WALL);
}

bool Tracee::wait() {
  pid_t got;
  do got = waitpid(pid_, &status_, __WALL);
  while (got < 0 && errno == EINTR);
  if (got == pid_ && WIFSTOPPED(status_)) return true;
  if (got == pid_ && WIFEXITED(status_)) end_ = fmt::format("exit status {}", WEXITSTATUS(status_));
  else if (got == pid_) end_ = fmt::format("signal {}", WTERMSIG(status_));
  else end_ = "lost";
  return false;
}

bool Tracee::resume(int request, int signal) {
  ptrace(static_cast<__ptrace_request>(request), pid_, nullptr, static_cast<long>(signal));
  return wait();
}

void Tracee::get_regs() { ptrace(PTRACE_GETREGS, pid_, nullptr, &regs_); }

Registers Tracee::registers() const { return host::regset_of(regs_); }

uint64_t Tracee::entry() const {
  uint64_t pair[2];
  std::ifstream auxv(fmt::format("/proc/{}/auxv", pid_), std::ios::binary);
  while (auxv.read(reinterpret_cast<char*>(pair), sizeof pair))
    if (pair[0] == AT_ENTRY) return pair[1];
  return 0;
}

SystemCall Tracee::system_call() const {
  using Kind = SystemCall::Kind;
  SystemCall call{Kind::other, {regs_.rdi, regs_.rsi, regs_.rdx, regs_.r10}};
  switch (regs_.rax) {
    case SYS_mmap: call.kind = Kind::map; break;
    case SYS_mprotect:
    case SYS_pkey_mprotect: call.kind = Kind::protect; break;
    case SYS_munmap: call.kind = Kind::unmap; break;
    case SYS_mremap: call.kind = Kind::remap; break;
    case SYS_rt_sigaction: call.kind = Kind::action; break;
    case SYS_rt_sigreturn: call.kind = Kind::signal_return; break;
    case SYS_execve:
    case SYS_execveat: call.kind = Kind::execute; break;
  }
  return call;
}

bool Tracee::step(Shadow& shadow) {
  const uint64_t pc = regs_.rip, sp = regs_.rsp;
  const Insn insn = insn_at(pc);
  const SystemCall call = insn.effect == Effect::system_call ? system_call() : SystemCall{};
  const bool changes_code = maps_code(call);
  note_action(call);
  steps_++;
  moved();
  if (!resume(PTRACE_SINGLESTEP, 0)) return false;
  get_regs();
  if (call.kind == SystemCall::Kind::execute && WSTOPSIG(status_) == SIGTRAP && regs_.rax == 0)
    return end_ = "replaced by another program", false;
  if (changes_code) reload();
  if (call.kind == SystemCall::Kind::signal_return) shadow.signal_returned(regs_.rsp);
  else if (WSTOPSIG(status_) == SIGTRAP || regs_.rip != pc || regs_.rsp != sp)
    shadow.stepped(insn, pc, sp, regs_.rip, regs_.rsp);
  while (WSTOPSIG(status_) != SIGTRAP)
    if (!deliver(WSTOPSIG(status_), shadow)) return false;
  repeats_ = insn.repeats && regs_.rip == pc ? repeats_ + 1 : 0;
  if (repeats_ >= kRoundsToCompare) return finish_repeat(insn, shadow);
  return true;
}

// The rest of a repeated instruction at full speed.
bool Tracee::finish_repeat(const Insn& insn, Shadow& shadow) {
  const uint64_t pc = regs_.rip;
  set_breakpoint(pc + insn.length);
  int signal = 0;
  do {
    if (!resume(PTRACE_CONT, 0)) return false;
    get_regs();
    signal = WSTOPSIG(status_);
  } while (signal == SIGSTOP);
  set_breakpoint(0);
  repeats_ = 0;
  while (WSTOPSIG(status_) != SIGTRAP)
    if (!deliver(WSTOPSIG(status_), shadow)) return false;
  return true;
}

// Gives the thread a signal that it was about to get. It stands at its handler's first instruction then, or one
// instruction further if it has no handler.
bool Tracee::deliver(int signal, Shadow& shadow) {
  const uint64_t pc = regs_.rip, sp = regs_.rsp;
  const Insn insn = insn_at(pc);
  if (signal == SIGSTOP) signal = 0;
  if (!resume(PTRACE_SINGLESTEP, signal)) return false;
  get_regs();
  // The restorer's address, then the kernel's struct ucontext (core/isa/code.h).
  constexpr int kSp = 1 + Code<X86_64>::signal_register(X86_64::rsp) / 8,
                kPc = 1 + Code<X86_64>::signal_register(X86_64::rip) / 8;
  uint64_t words[kPc + 1] = {};
  read_now(Addr(regs_.rsp), {reinterpret_cast<uint8_t*>(words), sizeof words});
  if (signal && words[kSp] == sp && words[kPc] == pc && regs_.rdi == static_cast<uint64_t>(signal)) {
    signals_++;
    shadow.interrupted(pc, sp, regs_.rsp, words[0]);
  } else {
    shadow.stepped(insn, pc, sp, regs_.rip, regs_.rsp);
  }
  return true;
}

void Tracee::set_breakpoint(uint64_t pc) {
  ptrace(PTRACE_POKEUSER, pid_, offsetof(struct user, u_debugreg[7]), 0L);
  if (!pc) return;
  ptrace(PTRACE_POKEUSER, pid_, offsetof(struct user, u_debugreg[0]), pc);
  ptrace(PTRACE_POKEUSER, pid_, offsetof(struct user, u_debugreg[7]), 1L);
}

bool Tracee::run_for(double seconds) {
  moved();
  const double until = processor_time(pid_) + seconds;
  const auto begin = std::chrono::steady_clock::now();
  int signal = 0;
  for (;;) {
    ptrace(PTRACE_CONT, pid_, nullptr, static_cast<long>(signal));
    for (;;) {
      pid_t got = waitpid(pid_, &status_, __WALL | WNOHANG);
      if (got == pid_) break;
      if (got < 0) return end_ = "lost", false;
      double left = until - processor_time(pid_);
      if (left <= 0 || seconds_since(begin) > 20 * seconds + 60) {
        kill(pid_, SIGSTOP);
        if (!wait()) return false;
        break;
      }
      std::this_thread::sleep_for(std::chrono::duration<double>(std::clamp(left / 2, 0.0005, 0.05)));
    }
    if (!WIFSTOPPED(status_)) return end_ = "it ended before it was to be stepped", false;
    signal = WSTOPSIG(status_);
    if (signal == SIGSTOP) break;
    if (signal == SIGTRAP) signal = 0;
  }
  get_regs();
  // A system call that was interrupted is begun anew: only then does the thread stand at an instruction.
  constexpr int64_t kRestart = -516, kRestartLast = -512;
  while (static_cast<int64_t>(regs_.rax) >= kRestart && static_cast<int64_t>(regs_.rax) <= kRestartLast) {
    if (!resume(PTRACE_SINGLESTEP, 0)) return false;
    get_regs();
  }
  reload();
  return true;
}

bool Tracee::run_to(uint64_t pc, double seconds) {
  moved();
  set_breakpoint(pc);
  const auto begin = std::chrono::steady_clock::now();
  int signal = 0;
  bool there = false, out_of_time = false;
  while (!there) {
    ptrace(PTRACE_CONT, pid_, nullptr, static_cast<long>(signal));
    for (;;) {
      pid_t got = waitpid(pid_, &status_, __WALL | WNOHANG);
      if (got == pid_) break;
      if (got < 0) return end_ = "lost", false;
      if (!out_of_time && seconds_since(begin) > seconds) out_of_time = true, kill(pid_, SIGSTOP);
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    if (!WIFSTOPPED(status_)) {
      end_ = WIFEXITED(status_) ? fmt::format("exit status {}", WEXITSTATUS(status_))
                                : fmt::format("signal {}", WTERMSIG(status_));
      return false;
    }
    get_regs();
    signal = WSTOPSIG(status_);
    there = signal == SIGTRAP && regs_.rip == pc;
    if (signal == SIGSTOP && out_of_time) break;
    if (signal == SIGTRAP || signal == SIGSTOP) signal = 0;
  }
  set_breakpoint(0);
  if (there) {
    reload();
    return true;
  }
  reload();
  return false;
}

}  // namespace sonde::stepping
