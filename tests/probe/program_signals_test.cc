// The program's view of signals: system calls that the agent carries out leave what the kernel would, handlers see the
// original code, and while traps are in use SIGTRAP is the program's own all the same. Truth: the same code without hooks.
#include <doctest/doctest.h>

#include <errno.h>
#include <execinfo.h>
#include <poll.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <spawn.h>
#include <sys/auxv.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/select.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <ucontext.h>
#include <unistd.h>

#include <cstring>
#include <functional>
#include <string>

#include "tests/probe/programs.h"

using namespace sonde;
using namespace sonde::test;

extern char** environ;

extern "C" {
void call_plain();
void call_by_jump();
void call_by_trap();
extern char call_plain_site[], call_by_jump_site[], call_by_trap_site[], dies_third_goes_on[];
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
  mask = 0x10 | 0x800;
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
  for (uint64_t signal : {uint64_t{SIGUSR1}, uint64_t{SIGTRAP}, uint64_t{0}, uint64_t{65}, ~uint64_t{0}, uint64_t{SIGKILL},
                          uint64_t{SIGSTOP}}) {
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
  struct sigaction action {};
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
constexpr uint64_t bit(int signal) { return uint64_t{1} << (signal - 1); }

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
  install(signal, [](int, siginfo_t*, void*) { char here; where = &here; }, SA_ONSTACK);
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
  for (volatile int hooked = 0; hooked < 2; hooked = hooked + 1) {
    if (hooked) engine();
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
    install(SIGSEGV, [](int, siginfo_t*, void* context) {
      static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_RIP] += 6;
    });
    CHECK(stores_first(reinterpret_cast<int*>(16)) == 7);
    // The third of them; si_addr is the pc.
    install(SIGILL, [](int signal, siginfo_t* info, void* context) {
      takes_all(signal, info, context);
      static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_RIP] += 2;
    });
    CHECK(dies_third(4) == 5);
    CHECK(seen_context.uc_mcontext.gregs[REG_RIP] == reinterpret_cast<long long>(dies_third_goes_on - 2));
    CHECK(seen_info.si_addr == dies_third_goes_on - 2);
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
