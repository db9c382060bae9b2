// The program's view of signals: system calls that the agent carries out leave what the kernel would, handlers see the
// original code, and while traps are in use SIGTRAP is the program's own all the same. Truth: the same code without hooks.
#include <doctest/doctest.h>

#include <errno.h>
#include <execinfo.h>
#include <linux/io_uring.h>
#include <poll.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <spawn.h>
#include <sys/auxv.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/select.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <string>
#include <utility>

#include "tests/probe/programs.h"

using namespace sonde;
using namespace sonde::test;

extern char** environ;

extern "C" {
void call_plain();
void call_by_jump();
void call_by_trap();
extern char call_plain_site[], call_by_jump_site[], call_by_trap_site[], dies_third_ud2[];
extern uint64_t call_before[16], call_after[16], call_red_zone[2];
int stores_first(int*);
int dies_third(int);
long counts_up(long);
}

namespace {

enum Register { rax, rbx, rcx, rdx, rsi, rdi, rbp, r8, r9, r10, r11, r12, r13, r14, r15, flags };

uint64_t seed = 88172645463325252u;
uint64_t random_word() {
  seed ^= seed << 13, seed ^= seed >> 7, seed ^= seed << 17;
  return seed;
}

constexpr uint64_t bit(int signal) { return uint64_t{1} << (signal - 1); }

struct Way {
  const char* name;
  void (*function)();
  char* site;
};
const Way ways[] = {{"plain", call_plain, call_plain_site},
                    {"jump", call_by_jump, call_by_jump_site},
                    {"trap", call_by_trap, call_by_trap_site}};

struct After {
  uint64_t registers[16], red_zone[2];
};

uint64_t word(const void* p) { return reinterpret_cast<uint64_t>(p); }

After make(const Way& way, std::initializer_list<uint64_t> call, uint64_t with_seed = 1) {
  seed = 88172645463325252u + with_seed;
  for (int i = 0; i < 15; i++) call_before[i] = random_word();
  constexpr uint64_t kFlags = 0x8d5 | 0x400 | 0x200000;  // OF SF ZF AF PF CF DF ID
  call_before[flags] = (random_word() & kFlags) | 0x202;
  const int order[] = {rax, rdi, rsi, rdx, r10, r8, r9};
  int i = 0;
  for (uint64_t argument : call) call_before[order[i++]] = argument;
  way.function();
  After after;
  std::memcpy(after.registers, call_after, sizeof after.registers);
  std::memcpy(after.red_zone, call_red_zone, sizeof after.red_zone);
  return after;
}

int64_t result_of(const Way& way, std::initializer_list<uint64_t> call) {
  return static_cast<int64_t>(make(way, call).registers[rax]);
}

// The harness' engine with every system call instruction of libc hooked that a jump can take; and the two of our own.
Harness& engine() {
  static bool ready = [] {
    Harness& harness = the_harness();
    harness.hook_system_call(call_by_jump_site, false);
    uint32_t hooked = harness.hook_system_calls_of("libc.so", false);
    REQUIRE(hooked > 200);
    return true;
  }();
  (void)ready;
  return the_harness();
}
SONDE_HOOKABLE int trapped(int x) {
  asm volatile("" ::: "memory");
  return x + 2;
}
uint32_t trapped_site;
Harness& engine_with_traps() {
  static bool ready = [] {
    Harness& harness = engine();
    harness.use_traps();
    harness.hook_system_call(call_by_trap_site, true);
    REQUIRE(harness.hook_system_calls_of("libc.so", true) > 20);
    trapped_site = harness.hook_by_trap(reinterpret_cast<void*>(trapped));
    return true;
  }();
  (void)ready;
  return the_harness();
}
bool traps_ready() { return the_harness().control()->flags & kControlTraps; }

template <class Function>
int status_of(Function function) {
  pid_t child = fork();
  if (child == 0) _exit(function());
  int status = 0;
  waitpid(child, &status, 0);
  return status;
}
template <class Function>
int exit_of(Function function) {
  int status = status_of(function);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}
// The answer of a forked child that the engine has nothing to do with cannot be had: everything is hooked. What must
// hold is therefore written out, as signal(7), sigaction(2) and POSIX have it.

void nothing(int) {}

void compare_registers(const Way& way) {
  static uint64_t mask, old_mask, action[4], old_action[4], action_out[4];
  static stack_t stack;
  action[0] = word(reinterpret_cast<void*>(nothing)), action[1] = SA_RESTART | 0x04000000, action[3] = 0x10;
  action[2] = 0x1000;
  const std::initializer_list<uint64_t> calls[] = {
      {SYS_rt_sigaction, SIGUSR1, 0, word(old_action), 8},
      {SYS_rt_sigaction, SIGUSR1, word(action), word(action_out), 8},
      {SYS_rt_sigaction, SIGUSR1, word(old_action), 0, 8},
      {SYS_rt_sigaction, SIGKILL, word(action), 0, 8},
      {SYS_rt_sigaction, SIGTRAP, 0, word(action_out), 8},
      {SYS_rt_sigprocmask, SIG_BLOCK, word(&mask), word(&old_mask), 8},
      {SYS_rt_sigprocmask, SIG_SETMASK, 0, word(&old_mask), 8},
      {SYS_rt_sigprocmask, 77, word(&mask), word(&old_mask), 8},
      {SYS_sigaltstack, 0, word(&stack)},
      {SYS_sigaltstack, word(&stack), 0},
      {SYS_getppid},
      {9999},
  };
  mask = 0x800 | (traps_ready() ? 0 : bit(SIGTRAP));  // the plain call would truly block it
  int number = 0;
  for (const auto& call : calls) {
    CAPTURE(way.name);
    CAPTURE(number);
    number++;
    for (uint64_t round = 0; round < 20; round++) {
      struct {
        uint64_t old_mask, action_out[4];
      } seen[2];
      After after[2];
      for (int hooked = 0; hooked < 2; hooked++) {
        stack = {}, stack.ss_flags = SS_DISABLE, old_mask = 99;
        std::memset(action_out, 0x77, sizeof action_out);
        signal(SIGUSR1, SIG_DFL);
        after[hooked] = make(hooked ? way : ways[0], call, round * 1000 + static_cast<uint64_t>(number));
        seen[hooked].old_mask = old_mask;
        std::memcpy(seen[hooked].action_out, action_out, sizeof action_out);
        sigset_t none;
        sigemptyset(&none);
        sigprocmask(SIG_SETMASK, &none, nullptr);
      }
      bool carried_out = after[1].registers[rcx] == word(way.site) + 2;
      if (!carried_out) CHECK(the_harness().is_detour(after[1].registers[rcx]));  // its copy was executed
      after[0].registers[rcx] = after[1].registers[rcx] = 0;
      for (int i = 0; i < 16; i++) {
        CAPTURE(i);
        CHECK(after[0].registers[i] == after[1].registers[i]);
      }
      CHECK(after[1].red_zone[0] == 0x1234567);
      CHECK(after[1].red_zone[1] == 0x7654321);
      CHECK(seen[0].old_mask == seen[1].old_mask);
      // What the plain call sees of the kernel's own state is the engine's: SIGTRAP's action.
      if (number != 5)
        for (int i = 0; i < 4; i++) CHECK(seen[0].action_out[i] == seen[1].action_out[i]);
    }
  }
}

void compare_errors(const Way& way) {
  static uint64_t good[8];
  void* none = mmap(nullptr, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  mprotect(static_cast<char*>(none) + 4096, 4096, PROT_NONE);
  uint64_t edge = word(none) + 4096 - 8, bad = word(none) + 4096, wild = 0x8000000000000000u;
  void* constant = mmap(nullptr, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  uint64_t only_read = word(constant);
  timespec zero{};
  uint64_t pair[2] = {bad, 8}, short_pair[2] = {word(good), 4};
  for (uint64_t signal : {uint64_t{SIGUSR1}, uint64_t{SIGTRAP}, uint64_t{0}, uint64_t{65}, ~uint64_t{0},
                          uint64_t{SIGKILL}, uint64_t{SIGSTOP}}) {
    for (uint64_t action : {uint64_t{0}, word(good), edge, bad, wild})
      for (uint64_t old : {uint64_t{0}, word(good), edge, bad, wild, only_read})
        for (uint64_t bytes : {uint64_t{8}, uint64_t{4}, uint64_t{128}}) {
          CAPTURE(way.name);
          CAPTURE(signal);
          CAPTURE(action);
          CAPTURE(old);
          CAPTURE(bytes);
          std::memset(good, 0, sizeof good);
          // SIGTRAP's truth is that of another signal: its action in the kernel is the engine's, and must stay.
          uint64_t like = signal == SIGTRAP ? uint64_t{SIGUSR1} : signal;
          int64_t plain = result_of(ways[0], {SYS_rt_sigaction, like, action, old, bytes});
          std::memset(good, 0, sizeof good);
          CHECK(result_of(way, {SYS_rt_sigaction, signal, action, old, bytes}) == plain);
        }
  }
  const std::initializer_list<uint64_t> calls[] = {
      {SYS_rt_sigprocmask, 3, word(good), 0, 8},
      {SYS_rt_sigprocmask, 3, 0, word(good), 8},
      {SYS_rt_sigprocmask, 0, bad, word(good), 8},
      {SYS_rt_sigprocmask, 0, wild, 0, 8},
      {SYS_rt_sigprocmask, 0, 0, bad, 8},
      {SYS_rt_sigprocmask, 0, word(good), only_read, 8},
      {SYS_rt_sigprocmask, 0, word(good), 0, 16},
      {SYS_rt_sigprocmask, 0, edge, edge, 8},
      {SYS_rt_sigpending, bad, 8},
      {SYS_rt_sigpending, word(good), 16},
      {SYS_rt_sigpending, word(good), 8},
      {SYS_rt_sigsuspend, bad, 8},
      {SYS_rt_sigsuspend, word(good), 4},
      {SYS_rt_sigtimedwait, bad, 0, word(&zero), 8},
      {SYS_rt_sigtimedwait, word(good), 0, word(&zero), 8},
      {SYS_rt_sigtimedwait, word(good), 0, word(&zero), 4},
      {SYS_ppoll, 0, 0, word(&zero), bad, 8},
      {SYS_ppoll, 0, 0, word(&zero), word(good), 4},
      {SYS_ppoll, 0, 0, word(&zero), word(good), 8},
      {SYS_ppoll, 0, 0, bad, word(good), 8},
      {SYS_pselect6, 0, 0, 0, 0, word(&zero), word(pair)},
      {SYS_pselect6, 0, 0, 0, 0, word(&zero), word(short_pair)},
      {SYS_pselect6, 0, 0, 0, 0, word(&zero), bad},
      {SYS_pselect6, 0, 0, 0, 0, word(&zero), 0},
      {SYS_epoll_pwait, ~uint64_t{0}, word(good), 1, 0, word(good), 8},
      {SYS_epoll_pwait, ~uint64_t{0}, word(good), 1, 0, bad, 8},
      {SYS_sigaltstack, bad, 0},
      {SYS_sigaltstack, 0, bad},
      {SYS_sigaltstack, word(good), 0},
      {SYS_execve, bad, 0, 0},
      {SYS_execve, word("/nowhere"), 0, 0},
  };
  int number = 0;
  for (const auto& call : calls) {
    CAPTURE(way.name);
    CAPTURE(number);
    number++;
    std::memset(good, 0, sizeof good);
    int64_t plain = result_of(ways[0], call);
    std::memset(good, 0, sizeof good);
    CHECK(result_of(way, call) == plain);
  }
  munmap(none, 8192), munmap(constant, 4096);
}

// ---- handlers

volatile sig_atomic_t handled;
void* stack_in_handler[64];
int stack_depth;
ucontext_t seen_context;
siginfo_t seen_info;
void takes_all(int, siginfo_t* info, void* context) {
  handled = handled + 1;
  seen_info = *info;
  std::memcpy(&seen_context, context, sizeof seen_context);
  stack_depth = backtrace(stack_in_handler, 64);
}
struct sigaction installed(int signal) {
  struct sigaction now;
  sigaction(signal, nullptr, &now);
  return now;
}
void install(int signal, void (*handler)(int, siginfo_t*, void*), int flags = 0, uint64_t mask = 0) {
  struct sigaction action{};
  action.sa_sigaction = handler;
  action.sa_flags = SA_SIGINFO | flags;
  std::memcpy(&action.sa_mask, &mask, 8);
  REQUIRE(sigaction(signal, &action, nullptr) == 0);
}
uint64_t mask_now() {
  sigset_t now;
  sigprocmask(SIG_BLOCK, nullptr, &now);
  uint64_t bits;
  std::memcpy(&bits, &now, 8);
  return bits;
}
void set_mask(uint64_t bits) {
  sigset_t set;
  sigemptyset(&set);
  std::memcpy(&set, &bits, 8);
  sigprocmask(SIG_SETMASK, &set, nullptr);
}

std::vector<void*> without_engine() {
  std::vector<void*> left;
  for (int i = 0; i < stack_depth; i++)
    if (!the_harness().is_agent(reinterpret_cast<uint64_t>(stack_in_handler[i]))) left.push_back(stack_in_handler[i]);
  return left;
}

void actions_are_the_programs(int signal) {
  CAPTURE(signal);
  CAPTURE(traps_ready());
  ::signal(signal, SIG_DFL);  // doctest has handlers for some
  install(signal, takes_all, SA_RESTART | SA_NODEFER, bit(SIGUSR2) | bit(SIGTRAP) | bit(SIGKILL));
  struct sigaction now = installed(signal);
  CHECK((now.sa_sigaction == takes_all));
  CHECK((now.sa_flags & ~0x04000000) == (SA_SIGINFO | SA_RESTART | SA_NODEFER));
  uint64_t mask;
  std::memcpy(&mask, &now.sa_mask, 8);
  CHECK(mask == (bit(SIGUSR2) | bit(SIGTRAP)));
  handled = 0;
  raise(signal), raise(signal);
  CHECK(handled == 2);
  CHECK(seen_info.si_signo == signal);
  CHECK(seen_info.si_code == SI_TKILL);
  // Replaced by another, the old one is told.
  void (*was)(int) = ::signal(signal, nothing);
  CHECK(word(reinterpret_cast<void*>(was)) == word(reinterpret_cast<void*>(takes_all)));
  CHECK((installed(signal).sa_handler == nothing));
  // Once only.
  install(signal, takes_all, SA_RESETHAND);
  raise(signal);
  CHECK(handled == 3);
  CHECK((installed(signal).sa_handler == SIG_DFL));
  CHECK(exit_of([=] { return raise(signal), 1; }) == -signal);
  ::signal(signal, SIG_IGN);
  raise(signal);
  CHECK((installed(signal).sa_handler == SIG_IGN));
  // Its mask holds while it runs, and is as before afterwards.
  static uint64_t inside, context_mask;
  auto asks = [](int, siginfo_t*, void* context) {
    inside = mask_now();
    std::memcpy(&context_mask, &static_cast<ucontext_t*>(context)->uc_sigmask, 8);
  };
  install(signal, asks, 0, bit(SIGUSR2));
  raise(signal);
  CHECK(inside == (bit(signal) | bit(SIGUSR2)));
  CHECK(context_mask == 0);
  install(signal, asks, SA_NODEFER, bit(SIGTRAP) | bit(SIGUSR2));
  raise(signal);
  CHECK(inside == (bit(SIGTRAP) | bit(SIGUSR2)));
  CHECK(mask_now() == 0);
  // On its own stack.
  static char alternate[65536], *where;
  stack_t stack{alternate, 0, sizeof alternate};
  sigaltstack(&stack, nullptr);
  install(signal, [](int, siginfo_t*, void*) { where = static_cast<char*>(__builtin_frame_address(0)); }, SA_ONSTACK);
  raise(signal);
  CHECK((where > alternate && where < alternate + sizeof alternate));
  stack.ss_flags = SS_DISABLE;
  sigaltstack(&stack, nullptr);
  ::signal(signal, SIG_DFL);
}

// The same backtrace as before anything was hooked.
__attribute__((noinline)) void raise_here() {
  kill(getpid(), SIGUSR1);
  asm volatile("" ::: "memory");
}

sigjmp_buf back;

}  // namespace

TEST_CASE("handlers: a backtrace in a wrapped handler is that of the unhooked program") {
  void* warm[8];
  backtrace(warm, 8);
  std::vector<void*> truth;
  for (int hooked = 0; hooked < 2; hooked++) {
    if (hooked) engine();
    asm volatile("" : "+r"(hooked));  // one copy of the loop: the same return addresses
    install(SIGUSR1, takes_all);
    raise_here();  // the handler interrupts kill() behind its system call, in the detour
    if (!hooked) truth.assign(stack_in_handler, stack_in_handler + stack_depth);
    else CHECK((without_engine() == truth));
  }
  signal(SIGUSR1, SIG_DFL);
}

TEST_CASE("system calls: registers, results and memory are the kernel's") {
  engine();
  compare_registers(ways[1]);
  compare_errors(ways[1]);
}

TEST_CASE("handlers: actions are the program's own") {
  engine();
  for (int signal : {SIGUSR1, SIGTERM, SIGSEGV, SIGRTMIN + 3, SIGTRAP}) actions_are_the_programs(signal);
}

TEST_CASE("handlers: more than there are entrances still run") {
  engine();
  CHECK(exit_of([] {
          auto* code = static_cast<unsigned char*>(
              mmap(nullptr, 1 << 16, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
          for (int i = 0; i < 2000; i++) {
            unsigned char* one = code + i * 32;
            std::memcpy(one, "\x48\xb8", 2);
            uint64_t at = word(const_cast<sig_atomic_t*>(&handled));
            std::memcpy(one + 2, &at, 8);
            std::memcpy(one + 10, "\xff\x00\xc3", 3);  // incl (%rax); ret
            signal(SIGUSR1, reinterpret_cast<void (*)(int)>(one));
            if (installed(SIGUSR1).sa_handler != reinterpret_cast<void (*)(int)>(one)) return 1;
            handled = 0;
            raise(SIGUSR1);
            if (handled != 1) return 2;
          }
          return 0;
        }) == 0);
}

// ---- every instruction of the way through the agent, by the trap flag

namespace {
std::vector<void*> callers_of_stepped;
std::vector<uint64_t> stepped_at, wrong_at;
void compares_stack(int, siginfo_t*, void* context) {
  void* pcs[64];
  auto pc = static_cast<uint64_t>(static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_RIP]);
  auto count = static_cast<size_t>(backtrace(pcs, 64)), callers = callers_of_stepped.size();
  bool right =
      count > callers && std::equal(callers_of_stepped.begin(), callers_of_stepped.end(), pcs + count - callers);
  stepped_at.push_back(pc);
  if (!right) wrong_at.push_back(pc);
}
__attribute__((noinline)) bool stepped() {
  void* pcs[64];
  callers_of_stepped.assign(pcs + 1, pcs + backtrace(pcs, 64));
  struct sigaction now{};
  asm volatile("pushfq; orq $0x100, (%%rsp); popfq" ::: "memory", "cc");
  int result = sigaction(SIGUSR1, nullptr, &now);
  asm volatile("pushfq; andq $~0x100, (%%rsp); popfq" ::: "memory", "cc");
  return result == 0;
}
}  // namespace

TEST_CASE("system calls: at every instruction of a carried-out call an unwinder finds the callers") {
  Harness& harness = engine();
  stepped_at.reserve(100000), wrong_at.reserve(100000);
  install(SIGTRAP, compares_stack);
  CHECK(stepped());
  signal(SIGTRAP, SIG_DFL);
  CHECK(stepped_at.size() > 200);
  CHECK(wrong_at.size() == 0);
  // All of the way in and of the way out was among them: the instructions lie one behind the other.
  auto seen = [](uint64_t begin, uint64_t bytes) {
    std::vector<uint64_t> there;
    for (uint64_t pc : stepped_at)
      if (pc - begin < bytes) there.push_back(pc);
    std::sort(there.begin(), there.end());
    return static_cast<size_t>(std::unique(there.begin(), there.end()) - there.begin());
  };
  CHECK(seen(harness.agent_symbol("sonde_entry_full"), 96) >= 12);
  CHECK(seen(harness.agent_symbol("sonde_leave_system_call"), 96) == 25);
  for (uint64_t pc : stepped_at) CHECK_FALSE(harness.is_detour(pc));
}

TEST_CASE("handlers: a displaced instruction that faults has its original address") {
  Harness& harness = engine();
  std::vector<void*> truth[2];
  long depth[2];
  for (int hooked = 0; hooked < 2; hooked++) {
    if (hooked) {
      harness.hook_over(reinterpret_cast<void*>(stores_first), {0}, 6);
      harness.hook_over(reinterpret_cast<void*>(dies_third), {0, 1, 3}, 5);
    }
    CAPTURE(hooked);
    // Never comes back.
    static void (*leave)(int, siginfo_t*, void*) = [](int signal, siginfo_t* info, void* context) {
      takes_all(signal, info, context);
      siglongjmp(back, 1);
    };
    install(SIGSEGV, leave, SA_NODEFER);
    if (!sigsetjmp(back, 1)) stores_first(reinterpret_cast<int*>(16));
    CHECK(seen_context.uc_mcontext.gregs[REG_RIP] == reinterpret_cast<long long>(stores_first));
    CHECK(seen_info.si_addr == reinterpret_cast<void*>(16));
    if (!hooked) truth[0] = without_engine();
    else CHECK((without_engine() == truth[0]));
    // Repairs the address, and the same instruction runs again.
    static int stored;
    install(SIGSEGV, [](int, siginfo_t*, void* context) {
      static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_RDI] = reinterpret_cast<long long>(&stored);
    });
    stored = 0;
    CHECK(stores_first(reinterpret_cast<int*>(16)) == 7);
    CHECK(stored == 1);
    // Steps over it, out of the displaced bytes.
    install(SIGSEGV,
            [](int, siginfo_t*, void* context) { static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_RIP] += 6; });
    CHECK(stores_first(reinterpret_cast<int*>(16)) == 7);
    // The third of them; si_addr is the pc.
    install(SIGILL, [](int signal, siginfo_t* info, void* context) {
      takes_all(signal, info, context);
      static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_RIP] += 2;
    });
    CHECK(dies_third(4) == 5);
    CHECK(seen_context.uc_mcontext.gregs[REG_RIP] == reinterpret_cast<long long>(dies_third_ud2));
    CHECK(seen_info.si_addr == dies_third_ud2);
    depth[hooked] = seen_context.uc_mcontext.gregs[REG_RSP];
    if (!hooked) truth[1] = without_engine();
    else CHECK((without_engine() == truth[1]));
    // Back to the second, which is displaced too.
    static int times;
    times = 0;
    install(SIGILL, [](int, siginfo_t*, void* context) {
      auto* registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
      if (times++ < 3) registers[REG_RIP] -= 2, registers[REG_RDI] += 10;
      else registers[REG_RIP] += 2;
    });
    CHECK(dies_third(4) == 35);
    CHECK(times == 4);
    // An exception through the interrupted function.
    install(SIGILL, [](int, siginfo_t*, void*) { throw 7; }, SA_NODEFER);
    int caught = 0;
    try {
      dies_third(1);
    } catch (int x) {
      caught = x;
    }
    CHECK(caught == 7);
  }
  CHECK(depth[0] == depth[1]);
  signal(SIGSEGV, SIG_DFL), signal(SIGILL, SIG_DFL);
  Records records = harness.drain();
  long unwound = 0;
  for (const CallRecord& call : records.calls) unwound += call.kind == ExitKind::unwound;
  CHECK(unwound == 1);
}

TEST_CASE("handlers: at random times no pc is in a detour, and the program's result is right") {
  Harness& harness = engine();
  harness.hook_over(reinterpret_cast<void*>(counts_up), {0, 4, 8}, 11);
  static long in_detours, in_agent, in_displaced, signals;
  in_detours = in_agent = in_displaced = signals = 0;
  install(SIGALRM, [](int, siginfo_t*, void* context) {
    auto pc = static_cast<uint64_t>(static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_RIP]);
    signals++;
    in_detours += the_harness().is_detour(pc);
    in_agent += the_harness().is_agent(pc);
    in_displaced += pc - word(reinterpret_cast<void*>(counts_up)) <= 11;
    counts_up(1);
  });
  const char* wanted = getenv("SONDE_SIGNALS");
  long limit = wanted ? atol(wanted) : 10000, wrong = 0, rounds = 0;
  itimerval timer{{0, 100}, {0, 100}};
  setitimer(ITIMER_REAL, &timer, nullptr);
  for (; signals < limit; rounds++) {
    wrong += counts_up(rounds) != (3 * (rounds + 1) ^ rounds);
    if (rounds % 4096 == 0) harness.drain();
  }
  timer = {};
  setitimer(ITIMER_REAL, &timer, nullptr);
  signal(SIGALRM, SIG_DFL);
  CHECK(wrong == 0);
  CHECK(in_detours == 0);
  CHECK(in_agent > 0);
  CHECK(in_displaced > 0);
  MESSAGE(signals, " signals, ", in_displaced, " at displaced instructions, ", in_agent, " in the agent");
}

// ---- with traps in use: from here on SIGTRAP is never blocked, and the program is not told.

namespace {

// Truly blocked in the calling thread, by the kernel's own account.
bool kernel_blocks_trap() {
  char line[256];
  bool blocked = false;
  FILE* status = fopen("/proc/thread-self/status", "r");
  while (fgets(line, sizeof line, status))
    if (strncmp(line, "SigBlk:", 7) == 0) blocked = strtoull(line + 7, nullptr, 16) & bit(SIGTRAP);
  fclose(status);
  return blocked;
}

uint64_t pending_now() {
  sigset_t set;
  sigpending(&set);
  uint64_t bits;
  std::memcpy(&bits, &set, 8);
  return bits;
}

constexpr uint64_t kAll = ~uint64_t{0} & ~bit(SIGKILL) & ~bit(SIGSTOP) & ~(uint64_t{3} << 31);  // libc keeps 32 and 33

volatile sig_atomic_t traps_taken;
siginfo_t trap_info;
uint64_t trap_context_mask, trap_pc, mask_in_trap;
void takes_trap(int, siginfo_t* info, void* context) {
  traps_taken = traps_taken + 1;
  trap_info = *info;
  auto* interrupted = static_cast<ucontext_t*>(context);
  std::memcpy(&trap_context_mask, &interrupted->uc_sigmask, 8);
  trap_pc = static_cast<uint64_t>(interrupted->uc_mcontext.gregs[REG_RIP]);
  mask_in_trap = mask_now();
  trapped(1);
}

// What a program started now finds: its blocked and ignored signals.
std::string inherited(bool spawn) {
  int out[2];
  REQUIRE(pipe(out) == 0);
  const char* arguments[] = {"sed", "-n", "s/^Sig[BI][lg][kn]:[[:space:]]*//p", "/proc/self/status", nullptr};
  auto* argv = const_cast<char**>(arguments);
  pid_t child;
  if (spawn) {
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, out[1], 1);
    REQUIRE(posix_spawn(&child, "/bin/sed", &actions, nullptr, argv, environ) == 0);
    posix_spawn_file_actions_destroy(&actions);
  } else if ((child = fork()) == 0) {
    dup2(out[1], 1);
    execv("/nowhere/sed", argv);  // fails first
    execv("/bin/sed", argv);
    _exit(99);
  }
  close(out[1]);
  char text[256];
  std::string all;
  for (ssize_t got; (got = read(out[0], text, sizeof text)) > 0;) all.append(text, static_cast<size_t>(got));
  close(out[0]);
  int status;
  waitpid(child, &status, 0);
  REQUIRE(status == 0);
  return all;
}
// spawn: libc ignores its own two signals in what it spawns.
std::string masks(bool spawn, uint64_t blocked, uint64_t ignored) {
  if (spawn) ignored |= bit(32) | bit(33);
  char text[64];
  snprintf(text, sizeof text, "%016lx\n%016lx\n", static_cast<unsigned long>(blocked),
           static_cast<unsigned long>(ignored));
  return text;
}

struct Masked {
  explicit Masked(uint64_t bits) { set_mask(bits); }
  ~Masked() { set_mask(0); }
};

}  // namespace

TEST_CASE("traps: registers, results and errors of system calls, by jump and by trap") {
  engine_with_traps();
  compare_registers(ways[1]);
  compare_registers(ways[2]);
  compare_errors(ways[1]);
  compare_errors(ways[2]);
  CHECK_FALSE(kernel_blocks_trap());
}

TEST_CASE("traps: actions are the program's own, SIGTRAP's too") {
  engine_with_traps();
  for (int signal : {SIGUSR1, SIGTERM, SIGRTMIN + 3, SIGTRAP}) actions_are_the_programs(signal);
  // A child that the engine's handler would keep alive dies as it should.
  CHECK(exit_of([] { return raise(SIGTRAP), 1; }) == -SIGTRAP);
  CHECK(exit_of([] {
          asm volatile("int3");
          return 1;
        }) == -SIGTRAP);
  signal(SIGTRAP, SIG_IGN);
  CHECK(exit_of([] { return raise(SIGTRAP), 1; }) == 1);
  CHECK(exit_of([] {
          asm volatile("int3");
          return 1;
        }) == -SIGTRAP);
  signal(SIGTRAP, SIG_DFL);
}

TEST_CASE("traps: threads that block everything are hit, and read the mask they set") {
  Harness& harness = engine_with_traps();
  harness.drain();
  Masked all(~uint64_t{0});
  CHECK(mask_now() == kAll);
  CHECK_FALSE(kernel_blocks_trap());
  for (int i = 0; i < 100; i++) CHECK(trapped(i) == i + 2);
  CHECK(harness.drain().calls.size() == 100);
  sigset_t some, before;
  sigemptyset(&some), sigaddset(&some, SIGTRAP), sigaddset(&some, SIGUSR1);
  sigprocmask(SIG_UNBLOCK, &some, &before);
  CHECK(sigismember(&before, SIGTRAP) == 1);
  CHECK(mask_now() == (kAll & ~bit(SIGTRAP) & ~bit(SIGUSR1)));
  sigprocmask(SIG_BLOCK, &some, &before);
  CHECK(sigismember(&before, SIGTRAP) == 0);
  CHECK(mask_now() == kAll);
  // Inherited by a thread, and its own from then on.
  pthread_t thread;
  static uint64_t in_thread[2];
  pthread_create(
      &thread, nullptr,
      [](void*) -> void* {
        in_thread[0] = mask_now();
        set_mask(0);
        in_thread[1] = mask_now();
        trapped(1);
        return nullptr;
      },
      nullptr);
  pthread_join(thread, nullptr);
  CHECK(in_thread[0] == kAll);
  CHECK(in_thread[1] == 0);
  CHECK(mask_now() == kAll);
  // By a forked child.
  CHECK(exit_of([] {
          if (mask_now() != kAll) return 2;
          for (int i = 0; i < 100; i++)
            if (trapped(i) != i + 2) return 3;
          set_mask(0);
          return mask_now() == 0 ? 42 : 4;
        }) == 42);
  // A vfork child changes only its own.
  pid_t child = vfork();
  if (child == 0) {
    set_mask(0);
    _exit(mask_now() == 0 && trapped(3) == 5 ? 43 : 1);
  }
  int status;
  waitpid(child, &status, 0);
  CHECK(WEXITSTATUS(status) == 43);
  CHECK(mask_now() == kAll);
}

namespace {
// In a thread that never had to do with masks before.
void* has_a_child_that_blocks(void* from_child) {
  pid_t child = vfork();
  if (child == 0) {
    set_mask(~uint64_t{0});
    *static_cast<uint64_t*>(from_child) = mask_now();
    _exit(0);
  }
  waitpid(child, nullptr, 0);
  return reinterpret_cast<void*>(mask_now());
}
}  // namespace

TEST_CASE("traps: what a vfork child blocked is not blocked in its parent") {
  engine_with_traps();
  uint64_t in_child = 0;
  CHECK(has_a_child_that_blocks(&in_child) == nullptr);
  CHECK(in_child == kAll);
  CHECK(exit_of([] { return mask_now() == 0 ? 42 : 1; }) == 42);
  pthread_t thread;
  in_child = 0;
  pthread_create(&thread, nullptr, has_a_child_that_blocks, &in_child);
  void* result;
  pthread_join(thread, &result);
  CHECK(result == nullptr);
  CHECK(in_child == kAll);
}

TEST_CASE("traps: a SIGTRAP that is blocked is pending, and comes when it is unblocked") {
  engine_with_traps();
  install(SIGTRAP, takes_trap);
  traps_taken = 0;
  set_mask(bit(SIGTRAP) | bit(SIGUSR2));
  CHECK((pending_now() & bit(SIGTRAP)) == 0);
  raise(SIGTRAP), raise(SIGTRAP);
  CHECK(traps_taken == 0);
  CHECK(pending_now() == bit(SIGTRAP));
  CHECK(exit_of([] { return pending_now() == 0 ? 42 : 1; }) == 42);  // a child inherits no pending signal
  set_mask(bit(SIGUSR2));
  CHECK(traps_taken == 1);
  CHECK(trap_info.si_code == SI_TKILL);
  CHECK(trap_info.si_pid == getpid());
  CHECK(trap_context_mask == bit(SIGUSR2));
  CHECK(mask_in_trap == (bit(SIGTRAP) | bit(SIGUSR2)));
  CHECK(pending_now() == 0);
  set_mask(0);
  // Waited for.
  set_mask(bit(SIGTRAP));
  sigset_t trap;
  sigemptyset(&trap), sigaddset(&trap, SIGTRAP);
  timespec zero{}, long_time{20, 0};
  CHECK(sigtimedwait(&trap, nullptr, &zero) == -1);
  CHECK(errno == EAGAIN);
  sigval value;
  value.sival_int = 4711;
  sigqueue(getpid(), SIGTRAP, value);
  siginfo_t info;
  CHECK(sigtimedwait(&trap, &info, &long_time) == SIGTRAP);
  CHECK(info.si_value.sival_int == 4711);
  CHECK(info.si_code == SI_QUEUE);
  CHECK(mask_now() == bit(SIGTRAP));
  CHECK(pending_now() == 0);
  CHECK(traps_taken == 1);
  // sigsuspend and ppoll let it in.
  raise(SIGTRAP);
  sigset_t none;
  sigemptyset(&none);
  CHECK(sigsuspend(&none) == -1);
  CHECK(errno == EINTR);
  CHECK(traps_taken == 2);
  CHECK(mask_now() == bit(SIGTRAP));
  raise(SIGTRAP);
  CHECK(ppoll(nullptr, 0, &long_time, &none) == -1);
  CHECK(errno == EINTR);
  CHECK(traps_taken == 3);
  // Dropped when it is ignored.
  raise(SIGTRAP);
  signal(SIGTRAP, SIG_IGN);
  CHECK(pending_now() == 0);
  install(SIGTRAP, takes_trap);
  set_mask(0);
  CHECK(traps_taken == 3);
  // A trap instruction in a thread that blocks SIGTRAP kills.
  CHECK(exit_of([] {
          set_mask(bit(SIGTRAP));
          asm volatile("int3");
          return 1;
        }) == -SIGTRAP);
  signal(SIGTRAP, SIG_DFL);
}

TEST_CASE("traps: masks while waiting, and what handlers see and leave in their context") {
  engine_with_traps();
  static uint64_t inside, context_mask;
  static bool leaves_blocked, leaves_open;
  leaves_blocked = leaves_open = false;
  install(SIGUSR1, [](int, siginfo_t*, void* context) {
    inside = mask_now();
    auto* interrupted = static_cast<ucontext_t*>(context);
    std::memcpy(&context_mask, &interrupted->uc_sigmask, 8);
    trapped(1);
    if (leaves_blocked) sigaddset(&interrupted->uc_sigmask, SIGTRAP);
    if (leaves_open) sigdelset(&interrupted->uc_sigmask, SIGTRAP);
  });
  constexpr uint64_t both = bit(SIGTRAP) | bit(SIGUSR1), trap = bit(SIGTRAP);
  auto set_of = [](uint64_t bits) {
    sigset_t set;
    sigemptyset(&set);
    std::memcpy(&set, &bits, 8);
    return set;
  };
  timespec long_time{20, 0};
  // {mask before, mask while waiting}
  const uint64_t cases[][2] = {{both, 0}, {both, trap}, {bit(SIGUSR1), trap}, {bit(SIGUSR1), 0}};
  for (auto& c : cases) {
    for (int how = 0; how < 4; how++) {
      CAPTURE(c[0]);
      CAPTURE(c[1]);
      CAPTURE(how);
      set_mask(c[0]);
      raise(SIGUSR1);
      inside = context_mask = 99;
      sigset_t set = set_of(c[1]);
      int result = -2;
      epoll_event event;
      int poller = epoll_create1(0);
      if (how == 0) result = sigsuspend(&set);
      if (how == 1) result = ppoll(nullptr, 0, &long_time, &set);
      if (how == 2) result = pselect(0, nullptr, nullptr, nullptr, &long_time, &set);
      if (how == 3) result = epoll_pwait(poller, &event, 1, 20000, &set);
      CHECK(result == -1);
      CHECK(errno == EINTR);
      close(poller);
      CHECK(inside == (c[1] | bit(SIGUSR1)));
      CHECK(context_mask == c[0]);
      CHECK(mask_now() == c[0]);
      CHECK_FALSE(kernel_blocks_trap());
      CHECK(trapped(1) == 3);
    }
  }
  set_mask(trap);
  raise(SIGUSR1);
  CHECK(inside == both);
  CHECK(context_mask == trap);
  CHECK(mask_now() == trap);
  leaves_open = true;
  raise(SIGUSR1);
  CHECK(mask_now() == 0);
  leaves_open = false, leaves_blocked = true;
  raise(SIGUSR1);
  CHECK(context_mask == 0);
  CHECK(mask_now() == trap);
  CHECK_FALSE(kernel_blocks_trap());
  CHECK(trapped(1) == 3);
  set_mask(0);
  leaves_blocked = false;
  // siglongjmp restores the mask of sigsetjmp.
  install(SIGUSR1, [](int, siginfo_t*, void*) { siglongjmp(back, 1); }, 0, trap);
  for (uint64_t before : {uint64_t{0}, trap}) {
    set_mask(before);
    if (!sigsetjmp(back, 1)) raise(SIGUSR1);
    CHECK(mask_now() == before);
    if (!sigsetjmp(back, 0)) raise(SIGUSR1);
    CHECK(mask_now() == both);
    CHECK(trapped(1) == 3);
  }
  set_mask(0);
  signal(SIGUSR1, SIG_DFL);
}

TEST_CASE("traps: what is started inherits the mask and the disposition that the program set") {
  engine_with_traps();
  for (bool spawn : {false, true}) {
    CAPTURE(spawn);
    CHECK(inherited(spawn) == masks(spawn, 0, 0));
    {
      Masked all(~uint64_t{0});
      CHECK(inherited(spawn) == masks(spawn, kAll, 0));
      CHECK(mask_now() == kAll);
    }
    signal(SIGTRAP, SIG_IGN);
    CHECK(inherited(spawn) == masks(spawn, 0, bit(SIGTRAP)));
    CHECK(trapped(1) == 3);
    install(SIGTRAP, takes_trap);
    set_mask(bit(SIGTRAP));
    CHECK(inherited(spawn) == masks(spawn, bit(SIGTRAP), 0));
    CHECK((installed(SIGTRAP).sa_sigaction == takes_trap));
    set_mask(0);
    signal(SIGTRAP, SIG_DFL);
  }
  // A child that shares the memory changes only its own action.
  install(SIGTRAP, takes_trap);
  pid_t child = vfork();
  if (child == 0) {
    signal(SIGTRAP, SIG_IGN);
    signal(SIGUSR1, SIG_IGN);
    const char* arguments[] = {"sh", "-c", "test $(sed -n 's/^SigIgn:.*\\(...\\)$/\\1/p' /proc/$$/status) = 210",
                               nullptr};
    execv("/bin/sh", const_cast<char**>(arguments));
    _exit(9);
  }
  int status;
  waitpid(child, &status, 0);
  CHECK(status == 0);
  CHECK((installed(SIGTRAP).sa_sigaction == takes_trap));
  CHECK((installed(SIGUSR1).sa_handler == SIG_DFL));
  traps_taken = 0;
  asm volatile("int3");
  CHECK(traps_taken == 1);
  CHECK(trap_info.si_code == SI_KERNEL);
  signal(SIGTRAP, SIG_DFL);
}

TEST_CASE("traps: many threads under a storm of signals change masks, trap and start threads") {
  Harness& harness = engine_with_traps();
  harness.drain();
  static volatile bool stop;
  static long wrong;
  wrong = 0;
  stop = false;
  install(
      SIGUSR1,
      [](int, siginfo_t*, void* context) {
        auto pc = static_cast<uint64_t>(static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_RIP]);
        if (the_harness().is_detour(pc)) __atomic_fetch_add(&wrong, 1, __ATOMIC_RELAXED);
        uint64_t before = mask_now();
        set_mask(~uint64_t{0});
        if (trapped(1) != 3) __atomic_fetch_add(&wrong, 1, __ATOMIC_RELAXED);
        set_mask(before);
      },
      SA_RESTART);
  auto work = [](void*) -> void* {
    for (long i = 0; !stop; i++) {
      uint64_t mask = i % 3 ? bit(SIGTRAP) : 0;
      set_mask(mask);
      if (trapped(1) != 3) __atomic_fetch_add(&wrong, 1, __ATOMIC_RELAXED);
      if (mask_now() != mask) __atomic_fetch_add(&wrong, 1, __ATOMIC_RELAXED);
    }
    return nullptr;
  };
  pthread_t threads[3];
  for (pthread_t& thread : threads) pthread_create(&thread, nullptr, work, nullptr);
  for (int i = 0; i < 500; i++) {
    pthread_kill(threads[i % 3], SIGUSR1);
    if (i % 10 == 0) {
      pthread_t brief;
      pthread_create(&brief, nullptr, [](void*) -> void* { return trapped(1) == 3 ? nullptr : &wrong; }, nullptr);
      void* result;
      pthread_join(brief, &result);
      if (result) __atomic_fetch_add(&wrong, 1, __ATOMIC_RELAXED);
    }
    if (i % 100 == 0) {
      if (exit_of([] { return trapped(1) == 3 ? 42 : 1; }) != 42) __atomic_fetch_add(&wrong, 1, __ATOMIC_RELAXED);
      harness.drain();
    }
    usleep(200);
  }
  stop = true;
  for (pthread_t& thread : threads) pthread_join(thread, nullptr);
  CHECK(wrong == 0);
  signal(SIGUSR1, SIG_DFL);
}

TEST_CASE("traps: a thread is cancelled where it waits in a call that the agent makes") {
  engine_with_traps();
  static int cleaned, waiting;
  for (int how = 0; how < 4; how++) {
    CAPTURE(how);
    cleaned = waiting = 0;
    pthread_t thread;
    pthread_create(
        &thread, nullptr,
        [](void* argument) -> void* {
          struct Cleanup {
            ~Cleanup() { cleaned++; }
          } cleanup;
          set_mask(bit(SIGTRAP));
          sigset_t none;
          sigemptyset(&none);
          timespec long_time{60, 0};
          __atomic_store_n(&waiting, 1, __ATOMIC_RELEASE);
          switch (*static_cast<int*>(argument)) {
            case 0: sigsuspend(&none); break;
            case 1: ppoll(nullptr, 0, &long_time, &none); break;
            case 2: pselect(0, nullptr, nullptr, nullptr, &long_time, &none); break;
            case 3: sigtimedwait(&none, nullptr, &long_time); break;
          }
          return nullptr;
        },
        &how);
    while (!__atomic_load_n(&waiting, __ATOMIC_ACQUIRE)) usleep(1000);
    usleep(20000);
    pthread_cancel(thread);
    void* result;
    pthread_join(thread, &result);
    CHECK((result == PTHREAD_CANCELED));
    CHECK(cleaned == 1);
  }
}

TEST_CASE("traps: at random times over masks, waits and children everything is as the program set it") {
  Harness& harness = engine_with_traps();
  static long in_detours, signals, wrong;
  in_detours = signals = wrong = 0;
  install(SIGALRM, [](int, siginfo_t*, void* context) {
    int error = errno;
    auto* interrupted = static_cast<ucontext_t*>(context);
    auto pc = static_cast<uint64_t>(interrupted->uc_mcontext.gregs[REG_RIP]);
    signals++;
    in_detours += the_harness().is_detour(pc);
    wrong += trapped(1) != 3;
    uint64_t inside = mask_now();
    wrong += !(inside & bit(SIGALRM));
    set_mask(~uint64_t{0});
    wrong += trapped(2) != 4;
    set_mask(inside);
    errno = error;
  });
  const char* wanted = getenv("SONDE_SIGNALS");
  long limit = wanted ? atol(wanted) : 10000;
  itimerval timer{{0, 200}, {0, 200}};
  setitimer(ITIMER_REAL, &timer, nullptr);
  timespec short_time{0, 100000};
  sigset_t none;
  sigemptyset(&none);
  for (long i = 0; signals < limit; i++) {
    const volatile uint64_t mask = i % 3 == 0 ? bit(SIGTRAP) : i % 3 == 1 ? bit(SIGTRAP) | bit(SIGUSR1) : bit(SIGUSR1);
    set_mask(mask);
    wrong += mask_now() != mask;
    wrong += trapped(3) != 5;
    ppoll(nullptr, 0, &short_time, &none);
    wrong += mask_now() != mask;
    if (!sigsetjmp(back, 1)) {
      set_mask(mask ^ bit(SIGTRAP));
      siglongjmp(back, 1);
    }
    wrong += mask_now() != mask;
    wrong += (installed(SIGALRM).sa_flags & SA_SIGINFO) == 0;
    if (i % 512 == 0) {
      pid_t child = fork();
      if (child == 0) _exit(mask_now() == mask && trapped(3) == 5 ? 42 : 1);
      int status;
      while (waitpid(child, &status, 0) < 0) {
      }
      wrong += WEXITSTATUS(status) != 42;
      harness.drain();
    }
  }
  timer = {};
  setitimer(ITIMER_REAL, &timer, nullptr);
  set_mask(0);
  signal(SIGALRM, SIG_DFL);
  CHECK(wrong == 0);
  CHECK(in_detours == 0);
}

// ---- the agent takes the traps out by itself. In forked children: they stay in the test.

namespace {
uint32_t disarmed(DisarmCause cause) { return the_harness().session()->disarmed[static_cast<unsigned>(cause)]; }
bool trap_stands(void* function) { return *static_cast<volatile unsigned char*>(function) == 0xcc; }
SONDE_HOOKABLE int locks_in(int how) {
  if (how == 0) return prctl(PR_SET_SECCOMP, 1, 0, 0, 0);
  if (how == 1) return static_cast<int>(syscall(SYS_seccomp, 0, 0, nullptr));
  return prctl(PR_SET_TSC, PR_TSC_SIGSEGV, 0, 0, 0);
}
bool trap_stands() { return trap_stands(reinterpret_cast<void*>(trapped)) && trap_stands(call_by_trap_site); }
}  // namespace

TEST_CASE("disarming: an alternate stack without room for a second frame") {
  engine_with_traps();
  CHECK(trap_stands());
  uint32_t before = disarmed(DisarmCause::small_stack);
  CHECK(exit_of([] {
          static char memory[65536];
          stack_t large{memory, 0, sizeof memory}, small{memory, 0, 8192}, off{nullptr, SS_DISABLE, 0};
          sigaltstack(&large, nullptr);
          if (!trap_stands()) return 1;
          sigaltstack(&off, nullptr);
          if (!trap_stands()) return 2;
          sigaltstack(&small, nullptr);
          if (trap_stands(reinterpret_cast<void*>(trapped)) || trap_stands(call_by_trap_site)) return 3;
          stack_t now;
          sigaltstack(nullptr, &now);
          if (now.ss_sp != memory || now.ss_size != 8192) return 4;
          return trapped(1) == 3 ? 42 : 5;
        }) == 42);
  CHECK(disarmed(DisarmCause::small_stack) == before + 1);
  CHECK(trap_stands());
  unsigned long said = getauxval(AT_MINSIGSTKSZ);
  auto* asked = reinterpret_cast<uint64_t (*)()>(the_harness().agent_symbol("_ZN5sonde18signal_frame_bytesEv"));
  REQUIRE(the_harness().is_agent(word(reinterpret_cast<void*>(asked))));
  CHECK(asked() >= said);
  CHECK(asked() <= said + 1024);
}

namespace {
SONDE_HOOKABLE int libraries_changed(int x) {
  asm volatile("" ::: "memory");
  return x + 4;
}
}  // namespace

TEST_CASE("disarming: a forked child that loads a library") {
  Harness& harness = engine_with_traps();
  static bool hooked = harness.hook(reinterpret_cast<void*>(libraries_changed), kSiteLoader | kSiteSilent);
  (void)hooked;
  auto* session = harness.session();
  uint64_t timeout = session->heartbeat_timeout_ticks;
  session->heartbeat_timeout_ticks = 1000;  // no host answers here
  static uint64_t consistent[5];  // a struct r_debug
  uint64_t debug = std::exchange(harness.control()->loader_debug, word(consistent));
  uint32_t before = disarmed(DisarmCause::child_loads);
  CHECK(libraries_changed(1) == 5);
  CHECK(trap_stands());
  CHECK(exit_of([] {
          if (!trap_stands()) return 1;
          pid_t child = vfork();  // shares the memory: it is not its own to change
          if (child == 0) _exit(libraries_changed(2) == 6 && trap_stands() ? 42 : 1);
          int status;
          waitpid(child, &status, 0);
          if (status != 42 << 8 || !trap_stands()) return 2;
          if (libraries_changed(3) != 7 || trap_stands(reinterpret_cast<void*>(trapped))) return 3;
          return trapped(1) == 3 ? 42 : 4;
        }) == 42);
  CHECK(disarmed(DisarmCause::child_loads) == before + 1);
  CHECK(trap_stands());
  session->heartbeat_timeout_ticks = timeout;
  harness.control()->loader_debug = debug;
}

namespace {
// io_uring_enter by a hooked instruction: submits what stands in the ring's queue, waits for one more than that gives.
struct Ring {
  io_uring_params parameters{};
  int fd = static_cast<int>(syscall(SYS_io_uring_setup, 4, &parameters));
  char *queue = nullptr, *entries = nullptr;
  bool map() {
    if (fd < 0) return false;
    auto pages = [&](uint64_t bytes, uint64_t offset) {
      return static_cast<char*>(
          mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, static_cast<off_t>(offset)));
    };
    if (!(parameters.features & IORING_FEAT_SINGLE_MMAP)) return false;
    queue = pages(std::max<uint64_t>(parameters.sq_off.array + 4 * sizeof(uint32_t),
                                     parameters.cq_off.cqes + parameters.cq_entries * sizeof(io_uring_cqe)),
                  IORING_OFF_SQ_RING);
    entries = pages(4 * sizeof(io_uring_sqe), IORING_OFF_SQES);
    return queue != MAP_FAILED && entries != MAP_FAILED;
  }
  void put_nop() {
    uint32_t& tail = *reinterpret_cast<uint32_t*>(queue + parameters.sq_off.tail);
    reinterpret_cast<io_uring_sqe*>(entries)[tail % 4] = io_uring_sqe{};  // IORING_OP_NOP
    reinterpret_cast<uint32_t*>(queue + parameters.sq_off.array)[tail % 4] = tail % 4;
    __atomic_store_n(&tail, tail + 1, __ATOMIC_RELEASE);
  }
  void take_all() {
    auto* tail = reinterpret_cast<uint32_t*>(queue + parameters.cq_off.tail);
    auto* head = reinterpret_cast<uint32_t*>(queue + parameters.cq_off.head);
    __atomic_store_n(head, __atomic_load_n(tail, __ATOMIC_ACQUIRE), __ATOMIC_RELEASE);
  }
  ~Ring() {
    if (fd >= 0) close(fd);
  }
};
}  // namespace

TEST_CASE("traps: io_uring_enter waits with the mask it is given, and submits whatever comes") {
  engine_with_traps();
  Ring ring;
  if (!ring.map()) {
    MESSAGE("SKIPPED: no io_uring here");
    return;
  }
  install(SIGTRAP, takes_trap);
  uint64_t blocks = bit(SIGTRAP), nothing_blocked = 0, fd = static_cast<uint64_t>(ring.fd);
  timespec soon{0, 20000000};
  io_uring_getevents_arg structure{};
  structure.sigmask = word(&nothing_blocked), structure.sigmask_sz = 8, structure.ts = word(&soon);
  uint64_t waits = IORING_ENTER_GETEVENTS, extended = waits | IORING_ENTER_EXT_ARG;
  for (bool by_structure : {false, true}) {
    CAPTURE(by_structure);
    auto enter = [&](uint64_t submit, uint64_t& mask) {
      structure.sigmask = word(&mask);
      uint64_t at = by_structure ? word(&structure) : word(&mask), length = by_structure ? sizeof structure : 8;
      return result_of(ways[1], {SYS_io_uring_enter, fd, submit, 100, by_structure ? extended : waits, at, length});
    };
    // Held: it ends the wait, and what was to be submitted is.
    Masked masked(bit(SIGTRAP));
    traps_taken = 0;
    raise(SIGTRAP);
    CHECK(traps_taken == 0);
    CHECK(enter(0, nothing_blocked) == -EINTR);
    CHECK(traps_taken == 1);
    raise(SIGTRAP);
    ring.put_nop();
    CHECK(enter(1, nothing_blocked) == 1);
    CHECK(traps_taken == 2);
    CHECK(mask_now() == bit(SIGTRAP));
    ring.take_all();  // else no wait is interrupted
    // Blocked by the mask alone: it comes when the wait is over. The kernel itself blocks nothing meanwhile.
    set_mask(0);
    static pid_t waiter;
    static bool kernel_blocked;
    waiter = gettid(), kernel_blocked = false;
    pthread_t other;
    pthread_create(
        &other, nullptr,
        [](void*) -> void* {
          usleep(100000);
          char path[64], line[256];
          snprintf(path, sizeof path, "/proc/self/task/%d/status", waiter);
          FILE* status = fopen(path, "r");
          while (fgets(line, sizeof line, status))
            if (strncmp(line, "SigBlk:", 7) == 0) kernel_blocked = strtoull(line + 7, nullptr, 16) & bit(SIGTRAP);
          fclose(status);
          syscall(SYS_tgkill, getpid(), waiter, SIGTRAP);
          usleep(100000);
          syscall(SYS_tgkill, getpid(), waiter, SIGUSR1);
          return nullptr;
        },
        nullptr);
    install(SIGUSR1, [](int, siginfo_t*, void*) { trap_info.si_signo = static_cast<int>(traps_taken); });
    soon = {5, 0};
    CHECK(enter(0, blocks) == -EINTR);
    pthread_join(other, nullptr);
    CHECK(trap_info.si_signo == SIGTRAP);  // SIGTRAP's handler came last
    CHECK(traps_taken == 3);
    CHECK_FALSE(kernel_blocked);
    CHECK(mask_now() == 0);
  }
  signal(SIGTRAP, SIG_DFL), signal(SIGUSR1, SIG_DFL);
}

TEST_CASE("disarming: a process that asks to be traced") {
  engine_with_traps();
  uint32_t before = disarmed(DisarmCause::traced);
  // Its tracer sees the stop that it sends itself, and none before or after.
  int status = 0, stops = 0;
  pid_t child = fork();
  if (child == 0) {
    ptrace(PTRACE_TRACEME, 0, nullptr, nullptr);
    if (trap_stands(reinterpret_cast<void*>(trapped))) _exit(2);
    for (int i = 0; i < 100; i++)
      if (trapped(i) != i + 2) _exit(3);
    raise(SIGUSR1);
    _exit(42);
  }
  while (waitpid(child, &status, 0) == child && WIFSTOPPED(status)) {
    CHECK(WSTOPSIG(status) == SIGUSR1);
    stops++;
    ptrace(PTRACE_CONT, child, nullptr, nullptr);
  }
  CHECK(stops == 1);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 42);
  CHECK(disarmed(DisarmCause::traced) == before + 1);
}

TEST_CASE("disarming: a seccomp filter that allows no more than it must") {
  engine_with_traps();
  uint32_t before = disarmed(DisarmCause::seccomp);
  // Everything but what the child does afterwards kills it: no rt_sigreturn, no gettid, nothing of the agent's.
  CHECK(exit_of([] {
          struct Filter {
            uint16_t code;
            uint8_t yes, no;
            uint32_t k;
          } filter[] = {{0x20, 0, 0, 0},
                        {0x15, 2, 0, SYS_exit_group},
                        {0x15, 1, 0, SYS_rt_sigprocmask},
                        {0x06, 0, 0, 0x80000000},
                        {0x06, 0, 0, 0x7fff0000}};
          struct {
            uint16_t length;
            Filter* filter;
          } program{5, filter};
          set_mask(bit(SIGTRAP));
          prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
          if (prctl(PR_SET_SECCOMP, 2, &program, 0, 0)) return 1;
          if (trap_stands(reinterpret_cast<void*>(trapped))) return 2;
          if (mask_now() != bit(SIGTRAP)) return 3;
          for (int i = 0; i < 100; i++)
            if (trapped(i) != i + 2) return 4;
          return 42;
        }) == 42);
  CHECK(disarmed(DisarmCause::seccomp) == before + 1);
}

TEST_CASE("disarming: strict mode and PR_SET_TSC, inside a hooked call") {
  Harness& harness = engine_with_traps();
  harness.hook(reinterpret_cast<void*>(locks_in));
  for (int how = 0; how < 3; how++) {
    CAPTURE(how);
    uint32_t before = disarmed(DisarmCause::no_ticks);
    harness.drain();
    int status = status_of([&] {
      trapped(1);
      int result = locks_in(how);
      int sum = 0;
      for (int i = 0; i < 100; i++) sum += trapped(i) == i + 2;
      syscall(SYS_exit, result == 0 && sum == 100 ? 42 : 1);
      return 0;
    });
    CHECK((WIFEXITED(status) && WEXITSTATUS(status) == 42));
    CHECK(disarmed(DisarmCause::no_ticks) == before + 1);
    size_t calls = harness.drain().calls.size();
    CHECK(calls >= 1);
    CHECK(calls <= 2);
  }
}

namespace {
uint64_t mask_in_handler;
bool truly_in_handler;
void notes_mask(int, siginfo_t*, void*) {
  mask_in_handler = mask_now();
  truly_in_handler = kernel_blocks_trap();
}
char small_stack[8192];
void set_small_stack() {
  stack_t small{small_stack, 0, sizeof small_stack};
  sigaltstack(&small, nullptr);
}
// By the kernel's account as well as by the program's.
bool blocks_trap(bool wanted) { return kernel_blocks_trap() == wanted && mask_now() == (wanted ? bit(SIGTRAP) : 0); }
int pipe_to_thread[2];
void* blocks_trap_meanwhile(void* pipe) {
  set_mask(bit(SIGTRAP));
  char c;
  if (write(static_cast<int*>(pipe)[1], "", 1) != 1 || read(pipe_to_thread[0], &c, 1) != 1) return nullptr;
  uint64_t mask = 0;  // asked for where it is seen: libc's own instruction may have been hooked by a trap
  result_of(ways[1], {SYS_rt_sigprocmask, SIG_BLOCK, 0, word(&mask), 8});
  bool before = mask == bit(SIGTRAP) && blocks_trap(true);
  set_mask(0);
  return before && blocks_trap(false) ? pipe : nullptr;
}
}  // namespace

TEST_CASE("disarming: SIGTRAP is blocked and pending in the kernel then, where the program blocks it") {
  engine_with_traps();
  install(SIGTRAP, takes_trap);
  install(SIGUSR1, notes_mask, 0, bit(SIGTRAP));
  traps_taken = 0;
  CHECK(exit_of([] {
          set_mask(bit(SIGTRAP));
          raise(SIGTRAP);
          if (kernel_blocks_trap() || mask_now() != bit(SIGTRAP)) return 1;
          set_small_stack();
          if (!blocks_trap(true) || pending_now() != bit(SIGTRAP) || traps_taken) return 2;
          set_mask(0);
          if (!blocks_trap(false) || traps_taken != 1) return 3;
          // Handlers from before, handlers from now on, and SIGTRAP's own.
          for (int now = 0; now < 2; now++) {
            if (now) install(SIGUSR1, notes_mask, 0, bit(SIGTRAP));
            mask_in_handler = 0;
            raise(SIGUSR1);
            if (mask_in_handler != (bit(SIGTRAP) | bit(SIGUSR1)) || !truly_in_handler || !blocks_trap(false)) return 4;
            uint64_t mask;
            struct sigaction action = installed(SIGUSR1);
            std::memcpy(&mask, &action.sa_mask, 8);
            if (mask != bit(SIGTRAP) || action.sa_sigaction != notes_mask) return 5;
          }
          raise(SIGTRAP);
          asm volatile("int3");
          if (traps_taken != 3 || mask_in_trap != bit(SIGTRAP) || !blocks_trap(false)) return 6;
          install(SIGTRAP, takes_trap, SA_NODEFER);
          raise(SIGTRAP);
          if (traps_taken != 4 || mask_in_trap != 0) return 7;
          // Waiting with a mask, and who inherits it.
          set_mask(bit(SIGTRAP));
          raise(SIGTRAP);
          timespec zero{};
          sigset_t none;
          sigemptyset(&none);
          if (ppoll(nullptr, 0, &zero, &none) != -1 || errno != EINTR || traps_taken != 5 || !blocks_trap(true))
            return 8;
          raise(SIGTRAP);
          sigset_t trap;
          sigemptyset(&trap), sigaddset(&trap, SIGTRAP);
          if (sigtimedwait(&trap, nullptr, &zero) != SIGTRAP || pending_now()) return 9;
          if (inherited(false) != masks(false, bit(SIGTRAP), 0) || inherited(true) != masks(true, bit(SIGTRAP), 0))
            return 10;
          return exit_of([] { return blocks_trap(true) ? 42 : 11; });
        }) == 42);
  // Disarmed by another thread; and inside a handler that was entered while there were traps, whose context has the mask.
  CHECK(exit_of([] {
          int from_thread[2];
          char c;
          pthread_t thread;
          void* right = nullptr;
          if (pipe(pipe_to_thread) || pipe(from_thread)) return 1;
          pthread_create(&thread, nullptr, blocks_trap_meanwhile, from_thread);
          if (read(from_thread[0], &c, 1) != 1) return 2;
          static void (*disarms)(int, siginfo_t*, void*) = [](int, siginfo_t*, void*) {
            set_small_stack();
            raise(SIGTRAP);
            truly_in_handler = kernel_blocks_trap();
          };
          install(SIGUSR2, disarms, 0, bit(SIGTRAP));
          traps_taken = 0;
          set_mask(bit(SIGTRAP) | bit(SIGHUP));
          raise(SIGUSR2);
          if (!truly_in_handler || traps_taken || !kernel_blocks_trap()) return 3;
          if (mask_now() != (bit(SIGTRAP) | bit(SIGHUP)) || !(pending_now() & bit(SIGTRAP))) return 4;
          set_mask(0);
          if (traps_taken != 1) return 5;
          if (write(pipe_to_thread[1], "", 1) != 1) return 6;
          pthread_join(thread, &right);
          return right ? 42 : 7;
        }) == 42);
  signal(SIGTRAP, SIG_DFL), signal(SIGUSR1, SIG_DFL);
  CHECK_FALSE(kernel_blocks_trap());
}
