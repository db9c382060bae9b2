# What a program that is recorded with -p, and its recorder killed, could notice of it: handlers, stacks, what is left behind.
load common
load attach
bats_require_minimum_version 1.5.0

# Handlers that look at where they interrupted the program and at who handled a signal before; prints what was wrong.
build_handlers() {
  cat >handlers.cc <<'CODE'
#include <signal.h>
#include <string.h>
#include <sys/time.h>
#include <ucontext.h>
#include <unistd.h>
#include <atomic>
#include <cstdio>
#include <thread>
#include <vector>
std::atomic<bool> stop;
std::atomic<long> wrong, faults, ticks, flips;
struct Range { unsigned long begin, end; };
Range code[64];
int ranges;
constexpr int kRestorer = 0x04000000;  // the kernel shows what glibc adds
extern "C" int fault_first(const int *at);
asm(".text\n.globl fault_first\n.type fault_first,@function\nfault_first: mov (%rdi),%eax\nadd $1,%eax\nret\n"
    ".size fault_first,.-fault_first");
#define APART __attribute__((noinline, noclone))
APART int small(int x) { asm volatile("" : "+r"(x)); return x * 3 + 1; }
void complain(const char *what, unsigned long value) {
  char text[100];
  int n = snprintf(text, sizeof text, "%s %#lx\n", what, value);
  if (wrong++ < 10) (void)!write(2, text, n);
}
void on_fault(int, siginfo_t *info, void *context) {
  auto &regs = ((ucontext_t *)context)->uc_mcontext.gregs;
  faults++;
  if (regs[REG_RIP] != (long)fault_first) complain("fault at", regs[REG_RIP]);
  if (info->si_addr != (void *)16) complain("address", (unsigned long)info->si_addr);
  regs[REG_RIP] = (long)fault_first + 2, regs[REG_RAX] = 41;
}
void on_tick(int, siginfo_t *, void *context) {
  unsigned long pc = ((ucontext_t *)context)->uc_mcontext.gregs[REG_RIP];
  ticks++;
  for (int i = 0; i < ranges; i++) if (pc >= code[i].begin && pc < code[i].end) return;
  // In the agent's own code it may be, which unwinders can walk.
  FILE *maps = fopen("/proc/self/maps", "r");
  bool agent = false;
  for (char line[500]; fgets(line, sizeof line, maps);) {
    Range r;
    if (sscanf(line, "%lx-%lx", &r.begin, &r.end) == 2 && pc >= r.begin && pc < r.end) agent = strstr(line, "libsonde-agent.so");
  }
  fclose(maps);
  if (!agent) complain("tick at", pc);
}
void one(int) { flips++; }
void other(int) { flips++; }
void flip() {
  struct sigaction a{}, b{}, old{};
  a.sa_handler = one, b.sa_handler = other, a.sa_flags = SA_RESTART, b.sa_flags = SA_NODEFER;
  sigaction(SIGUSR1, &a, nullptr);
  while (!stop) {
    sigaction(SIGUSR1, &b, &old);
    if (old.sa_handler != one || (old.sa_flags & ~kRestorer) != SA_RESTART) complain("before b", (unsigned long)old.sa_handler);
    raise(SIGUSR1);
    sigaction(SIGUSR1, &a, &old);
    if (old.sa_handler != other || (old.sa_flags & ~kRestorer) != SA_NODEFER) complain("before a", (unsigned long)old.sa_handler);
    for (int i = 0; i < 20; i++) {
      sigaction(SIGSEGV, nullptr, &old);
      if (old.sa_sigaction != on_fault || (old.sa_flags & ~kRestorer) != (SA_SIGINFO | SA_ONSTACK)) complain("query", (unsigned long)old.sa_handler);
    }
  }
}
void work() {
  for (int i = 1; !stop; i++) {
    if (small(i) != i * 3 + 1) complain("small", i);
    if (i % 64 == 0 && fault_first((int *)16) != 42) complain("fault_first", i);
  }
}
int main() {
  FILE *maps = fopen("/proc/self/maps", "r");
  for (char line[500]; fgets(line, sizeof line, maps);) {
    Range r;
    char rights[8];
    if (sscanf(line, "%lx-%lx %7s", &r.begin, &r.end, rights) == 3 && rights[2] == 'x') code[ranges++] = r;
  }
  fclose(maps);
  struct sigaction action{};
  action.sa_sigaction = on_fault, action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &action, nullptr);
  action.sa_sigaction = on_tick, action.sa_flags = SA_SIGINFO | SA_RESTART;
  sigaction(SIGPROF, &action, nullptr);
  itimerval often{{0, 1000}, {0, 1000}};
  setitimer(ITIMER_PROF, &often, nullptr);
  std::vector<std::thread> threads;
  threads.emplace_back(flip);
  for (int i = 0; i < 2; i++) threads.emplace_back(work);
  puts("runs"), fflush(stdout);
  while (access("stop", F_OK) != 0) usleep(1000);
  stop = true;
  for (auto &thread : threads) thread.join();
  if (faults < 100 || ticks < 100 || flips < 100) printf("%ld %ld %ld\n", faults.load(), ticks.load(), flips.load());
  printf("%ld wrong\n", wrong.load());
}
CODE
  g++ -O2 -pthread -o handlers handlers.cc
}

@test "attach: handlers that were installed before see the program's own pc, and no handler but theirs" {
  build_handlers
  start ./handlers
  state >before
  for options in '' '-s' "-f *:*" '' ''; do
    "$SONDE" record -q --drop -o trace $options -p $pid -- sleep 0.3
    [ "$(calls_of small)" -gt 100 ]
    [ "$(calls_of fault_first)" -gt 100 ]
    state >after
    diff before after
  done
  ends_well
}

@test "attach: what jumps left on the stack does not keep the agent in" {
  cat >jumps.c <<'CODE'
#include <setjmp.h>
#include <stdio.h>
#include <unistd.h>
static jmp_buf out;
__attribute__((noinline, noclone)) int down(int n) {
  if (n == 0) longjmp(out, 7);
  int r = down(n - 1);
  __asm__ volatile("" : "+r"(r));
  return r + 1;
}
int main(void) {
  puts("runs"), fflush(stdout);
  long wrong = 0;
  while (access("stop", F_OK) != 0) {
    int got = setjmp(out);
    if (!got) down(200);
    wrong += got != 7;
    for (volatile int i = 0; i < 100000; i++) {
    }
  }
  printf("%ld wrong\n", wrong);
}
CODE
  gcc -O1 -o jumps jumps.c
  start ./jumps
  state >before
  for i in {1..5}; do
    "$SONDE" record --drop -o trace -p $pid -- sleep 0.2 2>said
    ! grep -q 'stays in memory' said
    [ "$(calls_of down)" -gt 200 ]
    state >after
    diff before after
  done
  ends_well
}

@test "attach: after a recorder was killed the program goes on, and the agent is taken out, or by the next recording" {
  build_handlers
  start ./handlers
  state >before
  for options in '' '-s' "-f *:* --sum" ''; do
    "$SONDE" record -o trace $options -p $pid 2>said &
    recorder=$!
    for i in {1..1000}; do grep -q 'recording process' said && break; sleep 0.02; done
    run -1 "$SONDE" detach $pid
    [[ "$output" == *"is recorded already, by process $recorder:"* ]]
    sleep 0.2
    kill -9 $recorder
    wait $recorder || true
    sleep 0.2
    grep -q 'libsonde-agent' /proc/$pid/maps
    if [ "$options" = -s ]; then
      "$SONDE" record -o trace -p $pid -- sleep 0.3 2>said
      grep -q "note: an agent that a killed recorder had left in process $pid is out" said
      [ "$(calls_of small)" -gt 100 ]
    else
      "$SONDE" detach $pid
    fi
    state >after
    diff before after
  done
  run -1 "$SONDE" detach $pid
  [[ "$output" == *"process $pid (handlers) has no agent in it: there is nothing to take out" ]]
  ends_well
}
