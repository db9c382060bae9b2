# record -p: into a program that runs, and out of it again.
load common
bats_require_minimum_version 1.5.0

teardown() {
  [ -z "$pid" ] || kill "$pid" 2>/dev/null || true
}

# Four threads that throw through hooked functions and recurse, until the file `stop` is there; prints what went wrong.
build_busy() {
  cat >busy.cc <<'CODE'
#include <dlfcn.h>
#include <unistd.h>
#include <atomic>
#include <cstdio>
#include <stdexcept>
#include <thread>
#include <vector>
std::atomic<bool> stop;
std::atomic<long> wrong;
#define APART __attribute__((noinline, noclone))
APART int leaf(int x) {
  if (x % 97 == 0) throw std::runtime_error("97");
  asm volatile("" : "+r"(x));
  return x * 2;
}
APART int outer(int x) {
  try {
    int r = leaf(x);
    return r + 1;
  } catch (std::exception &) {
    return -1;
  }
}
APART int deep(int n) {
  if (n == 0) return usleep(50);
  int r = deep(n - 1);
  asm volatile("" : "+r"(r));
  return r + 1;
}
void work() {
  for (int i = 1; !stop; i++) {
    if (outer(i) != (i % 97 ? 2 * i + 1 : -1)) wrong++;
    if (i % 500 == 0 && deep(40) != 40) wrong++;
  }
}
int main(int argc, char **argv) {
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; i++) threads.emplace_back(work);
  puts("runs"), fflush(stdout);
  while (access("stop", F_OK) != 0) {
    usleep(1000);
    if (argc > 1 && access("load", F_OK) == 0) {
      void *library = dlopen(argv[1], RTLD_NOW);
      auto late = library ? (int (*)(int))dlsym(library, "late") : nullptr;
      if (!late || late(20) != 21) wrong++;
    }
  }
  stop = true;
  for (auto &thread : threads) thread.join();
  printf("%ld wrong\n", wrong.load());
}
CODE
  g++ -O2 -pthread -o busy busy.cc
}

# start COMMAND...: sets pid, waits for its first line.
start() {
  rm -f stop
  "$@" >out 2>err </dev/null &
  pid=$!
  for i in {1..500}; do [ -s out ] && return 0; sleep 0.01; done
  return 1
}

# Its end is that of the untraced program.
ends_well() {
  touch stop
  wait "$pid"
  pid=
  [ "$(tail -1 out)" = "0 wrong" ]
  [ ! -s err ]
}

# Only what is mapped from files and the code's bytes: a heap may have grown. Nothing else of the recorder is left.
state() {
  grep -E ' r-xp ' /proc/$pid/maps | grep -v vdso | while read -r range rest; do
    echo "$range $rest" "$(dd if=/proc/$pid/mem bs=4096 iflag=skip_bytes,count_bytes skip=$((16#${range%-*})) \
      count=$((16#${range#*-} - 16#${range%-*})) 2>/dev/null | md5sum)"
  done
  ls -l /proc/$pid/fd | awk '{print $9, $10, $11}'
  grep -E '^(SigCgt|SigIgn|SigBlk)' /proc/$pid/status
  ! grep -E 'sonde|memfd' /proc/$pid/maps
}

@test "attach: calls of a program that runs are counted, and it is left as it was, again and again" {
  build_busy
  start ./busy
  state >before
  for i in {1..5}; do
    "$SONDE" record -q -o trace -s -p $pid -- sleep 0.3
    [ "$(calls_of leaf)" -gt 100 ]
    [ "$(calls_of deep)" -gt 40 ]
    "$SONDE" report trace | grep -q '^unreliable stacks: 0.0 %'
    state >after
    diff before after
  done
  ends_well
}

@test "attach: every function of every library, under sums and drops too" {
  build_busy
  start ./busy
  state >before
  for options in '' --sum --drop; do
    "$SONDE" record -q -o trace $options -f '*:*' -p $pid -- sleep 0.3
    [ "$(calls_of leaf)" -gt 10 ]
    [ "$(calls_of usleep)" -gt 0 ]
    state >after
    diff before after
  done
  ends_well
}

@test "attach: a library that is loaded meanwhile is armed, and taken back" {
  build_busy
  echo 'int late(int x) { return x + 1; }' >late.c
  gcc -O1 -shared -fPIC -o late.so late.c
  start ./busy ./late.so
  "$SONDE" record -q -o trace -f ./late.so:late -f leaf -p $pid -- sh -c 'touch load; sleep 0.5'
  [ "$(calls_of late)" -gt 10 ]
  ! grep sonde /proc/$pid/maps
  ends_well
}

@test "attach: Ctrl-C ends it, and so does the program's end" {
  build_busy
  start ./busy
  env --default-signal=INT "$SONDE" record -o trace -p $pid 2>said &
  recorder=$!
  for i in {1..500}; do grep -q 'recording process' said && break; sleep 0.01; done
  kill -INT $recorder
  wait $recorder
  grep -q ' calls of ' said
  "$SONDE" record -o trace -p $pid 2>said &
  recorder=$!
  for i in {1..500}; do grep -q 'recording process' said && break; sleep 0.01; done
  ends_well
  wait $recorder
  "$SONDE" report trace | grep -q '^note: process .* ended while it was recorded'
}

@test "attach: the exit status is the command's" {
  build_busy
  start ./busy
  run -3 "$SONDE" record -q -o trace -p $pid -- sh -c 'exit 3'
  run -127 "$SONDE" record -q -o trace -p $pid -- ./there-is-none
  ! grep sonde /proc/$pid/maps
  ends_well
}

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

@test "attach: children that are forked meanwhile are recorded and set free" {
  cat >forks.c <<'CODE'
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>
__attribute__((noinline, noclone)) int child_work(int n) { return usleep(1000), n; }
int main(void) {
  puts("runs"), fflush(stdout);
  long wrong = 0;
  while (access("stop", F_OK) != 0) {
    int status;
    pid_t child = fork();
    if (!child) {
      for (int i = 0; i < 300; i++)
        if (child_work(i) != i) _exit(1);
      _exit(0);
    }
    waitpid(child, &status, 0);
    wrong += status != 0;
  }
  printf("%ld wrong\n", wrong);
}
CODE
  gcc -O1 -o forks forks.c
  start ./forks
  for i in {1..4}; do
    "$SONDE" record -q -o trace -p $pid -- sleep 0.5
    [ "$(calls_of child_work)" -gt 10 ]
  done
  ! grep sonde /proc/$pid/maps
  ends_well
}

@test "attach: in another mount namespace, where the agent's file is not" {
  [ "$(id -u)" = 0 ] || skip "only root may make mount namespaces"
  build_busy
  agent=$(dirname "$SONDE")
  rm -f stop
  unshare -m sh -c "mount -t tmpfs none '$agent' && exec ./busy" >out 2>err </dev/null &
  pid=$!
  for i in {1..500}; do [ -s out ] && break; sleep 0.01; done
  [ "$(cat out)" = runs ] || skip "no mount namespaces here"
  [ ! -e "/proc/$pid/root$SONDE" ]
  "$SONDE" record -q -o trace -p $pid -- sleep 0.3
  [ "$(calls_of leaf)" -gt 100 ]
  ! grep -E 'sonde|memfd' /proc/$pid/maps
  ends_well
}

@test "attach: what cannot be recorded is refused with its reason and stays as it is" {
  run -1 "$SONDE" record -o trace -p 4194303
  [[ "$output" == "sonde: no process with id 4194303" ]]
  run -2 "$SONDE" record -o trace -p x
  run -2 "$SONDE" record -o trace --force-trap -p 1
  run -2 "$SONDE" record -o trace
  [[ "$output" == *"-p PID"* ]]
  echo 'int main(void) { for (;;) sleep(1); }' >waits.c
  gcc -w -static -o static waits.c
  gcc -w -o waits waits.c
  refused() {
    "$@" &
    pid=$!
    sleep 0.3
    before=$(cat /proc/$pid/maps)
    run -1 "$SONDE" record -o trace -p $pid -- true
    [[ "$output" == *"process $pid ($(basename "$1"))"* ]]
    [ "$before" = "$(cat /proc/$pid/maps)" ]
    kill $pid
    wait $pid || true
    pid=
    said=$output
  }
  refused ./static
  [[ "$said" == *"statically linked"* ]]
  ./waits &
  pid=$!
  sleep 0.2
  run -2 "$SONDE" record -o trace -f no_such_function -p $pid -- true
  [[ "$output" == *"no function matches 'no_such_function'"* ]]
  ! grep -E 'sonde|memfd' /proc/$pid/maps
  "$SONDE" record -q -o first -p $pid -- sleep 2 &
  other=$!
  sleep 1
  run -1 "$SONDE" record -o trace -p $pid -- true
  [[ "$output" == *"is recorded already"* ]]
  wait $other
  gdb -p $pid -batch -ex 'shell sleep 2' >/dev/null 2>&1 &
  other=$!
  sleep 1
  run -1 "$SONDE" record -o trace -p $pid -- true
  [[ "$output" == *"already traced by process"*"(gdb)"* ]]
  wait $other
}
