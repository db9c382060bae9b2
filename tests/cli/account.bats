# What the last lines of a recording and of a report say: calls, stacks, how it ended, what was left without a record.
load common

setup() {
  cd "$BATS_TEST_TMPDIR" || exit 1
  cat >left.c <<'C'
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <unistd.h>
__attribute__((noinline)) void leave(void* to) { longjmp(*(jmp_buf*)to, 1); }
static void* run(void* a) {
  jmp_buf here;
  if (!setjmp(here)) leave(&here);
  return a;
}
int main(int argc, char** argv) {
  (void)argv;
  for (int i = 0; i < 20; i++) {
    pthread_t t;
    pthread_create(&t, 0, run, 0);
    pthread_join(t, 0);
  }
  usleep(800000);
  if (argc > 1) kill(getpid(), SIGKILL);
  return 0;
}
C
  gcc -O2 left.c -o left -pthread
}

@test "calls that ended threads had left by longjmp are not called in flight at the end of the process" {
  "$SONDE" record -o trace -f leave -- ./left killed 2>err || true
  "$SONDE" report trace >out
  recorded=$(calls_of leave)
  without=$(sed -n 's/^note: \([0-9]*\) calls ended with their threads, without a return.*/\1/p' out)
  [ $((recorded + ${without:-0})) = 20 ]
  [ "${without:-0}" -gt 0 ]
  [ "$(grep -c 'in flight' out)" = 0 ]
  grep -q 'the program was killed by signal 9 (Killed)' out
}

@test "stacks are counted apart from calls" {
  "$SONDE" record -o trace -s -f leave -- ./left 2>err
  grep -q '^sonde: 20 calls and 20 stacks of 1 function (0 refused), 0 lost' err
  "$SONDE" report trace >out
  grep -q '^20 calls and 20 stacks of [0-9]* threads; the program ended with exit status 0' out
  "$SONDE" record -o trace -f leave -- ./left 2>err
  grep -q '^sonde: 20 calls of 1 function' err
}

@test "report -f with a name that is not there names what is near and shows nothing" {
  "$SONDE" record -q -o trace -f leave -- ./left
  status=0
  "$SONDE" report -f leaves trace >out 2>err || status=$?
  [ "$status" = 2 ]
  [ ! -s out ]
  grep -q "no function in trace matches 'leaves'; nearest: leave" err
  "$SONDE" report -f 'l*v?' trace >out
  grep -q leave out
}

# few THREADS AT_ONCE [held]: so many threads call one(), each once; held: those of a batch live until all have called it.
few() {
  cat >few.c <<'C'
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
static pthread_barrier_t all;
static int held;
__attribute__((noinline)) void one(void) { __asm__ volatile(""); }
static void *run(void *a) {
  one();
  if (held) pthread_barrier_wait(&all);
  return a;
}
int main(int argc, char **argv) {
  int threads = atoi(argv[1]), at_once = atoi(argv[2]);
  held = argc > 3;
  pthread_barrier_init(&all, 0, (unsigned)at_once);
  pthread_t *t = calloc((size_t)at_once, sizeof *t);
  for (int done = 0; done < threads; done += at_once) {
    for (int i = 0; i < at_once; i++) if (pthread_create(t + i, 0, run, 0)) return 1;
    for (int i = 0; i < at_once; i++) pthread_join(t[i], 0);
  }
  puts("ok");
}
C
  gcc -O2 -pthread few.c -o few
}

lost_of() {
  "$SONDE" report trace --json | python3 -c 'import json,sys; print(sum(json.load(sys.stdin)["footer"]["lost"].values()))'
}

@test "ten thousand short threads: the default waits for a ring and loses nothing" {
  few
  for at_once in 1 4 200; do
    same_as_untraced -f one -- ./few 10000 $at_once
    [ "$(calls_of one)" -eq 10000 ]
    [ "$(lost_of)" -eq 0 ]
    grep -q '10000 calls of 1 function (0 refused), 0 lost' traced.err.all
  done
  "$SONDE" report trace >out
  grep -q 'new threads waited for a ring: .* ([1-9][0-9]* times)' out
  same_as_untraced --sum -f one -- ./few 10000 4
  [ "$(calls_of one)" -eq 10000 ]
}

@test "ten thousand short threads with --drop: each call is recorded, or lost and said to be" {
  few
  same_as_untraced --drop -f one -- ./few 10000 4
  [ $(($(calls_of one) + $(lost_of))) -eq 10000 ]
  "$SONDE" report trace >out
  [ "$(grep -c 'waited for a ring' out)" = 0 ]
}

@test "more living threads than rings: those without one are not waited for, and counted" {
  few
  same_as_untraced -f one -- ./few 700 700 held
  recorded=$(calls_of one)
  [ "$recorded" -ge 512 ]
  [ "$(lost_of)" -gt 0 ]
  [ $((recorded + $(lost_of))) -eq 700 ]
}

@test "threads that longjmp and end, more than there are rings: none crashes, none hangs" {
  cat >jumps.c <<'C'
#include <pthread.h>
#include <setjmp.h>
#include <stdio.h>
static __thread jmp_buf back;
__attribute__((noinline)) long deeper(long d) {
  if (d == 0) longjmp(back, 1);
  long r = deeper(d - 1);
  __asm__ volatile("");
  return r + 1;
}
static void *jumps(void *a) {
  for (int k = 0; k < 20000; k++)
    if (!setjmp(back)) deeper(k % 20);
  return a;
}
int main(void) {
  for (int r = 0; r < 5; r++) {
    pthread_t t[4];
    for (int i = 0; i < 4; i++) pthread_create(t + i, 0, jumps, 0);
    for (int i = 0; i < 4; i++) pthread_join(t[i], 0);
  }
  puts("ok");
}
C
  gcc -O2 -fno-optimize-sibling-calls -pthread jumps.c -o jumps
  for i in 1 2 3; do same_as_untraced -- ./jumps; done
}

@test "contexts switched by a timer's handler, in the middle of whatever runs: every call is counted, nothing is lost" {
  cat >preempted.c <<'C'
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/time.h>
#include <ucontext.h>
enum { N = 6, ROUNDS = 100000, STACK = 65536 };
static ucontext_t context[N], back;
static volatile int now, running, done[N];
static long sums[N];
#define NI __attribute__((noinline))
NI long f5(long x) { __asm__ volatile(""); return x ^ 5; }
NI long f4(long x) { long r = f5(x) + 1; __asm__ volatile(""); return r; }
NI long f3(long x) { long r = f4(x) + 1; __asm__ volatile(""); return r; }
NI long f2(long x) { long r = f3(x) + 1; __asm__ volatile(""); return r; }
NI long f1(long x) { long r = f2(x) + 1; __asm__ volatile(""); return r; }
static int next(int from) {
  for (int i = 1; i < N; i++) if (!done[(from + i) % N]) return (from + i) % N;
  return -1;
}
static void tick(int signal) {
  int from = now, to = next(from);
  (void)signal;
  if (!running || to < 0) return;
  now = to;
  swapcontext(&context[from], &context[to]);
}
// The signal is blocked until a context has its own stack: swapcontext sets the mask before it switches.
static void mask(int how) {
  sigset_t alarm;
  sigemptyset(&alarm);
  sigaddset(&alarm, SIGALRM);
  sigprocmask(how, &alarm, 0);
}
static void body(int i) {
  mask(SIG_UNBLOCK);
  for (int r = 0; r < ROUNDS; r++) sums[i] += f1(r);
  mask(SIG_BLOCK);
  done[i] = 1;
  int to = next(i);
  if (to >= 0) now = to;
  setcontext(to >= 0 ? &context[to] : &back);
}
int main(void) {
  for (int i = 0; i < N; i++) {
    getcontext(&context[i]);
    context[i].uc_stack.ss_sp = malloc(STACK);
    context[i].uc_stack.ss_size = STACK;
    sigaddset(&context[i].uc_sigmask, SIGALRM);
    makecontext(&context[i], (void (*)(void))body, 1, i);
  }
  struct sigaction action = {.sa_handler = tick, .sa_flags = SA_RESTART};
  sigaction(SIGALRM, &action, 0);
  struct itimerval often = {{0, 200}, {0, 200}}, never = {{0, 0}, {0, 0}};
  setitimer(ITIMER_REAL, &often, 0);
  mask(SIG_BLOCK);
  running = 1;
  swapcontext(&back, &context[0]);
  setitimer(ITIMER_REAL, &never, 0);
  long sum = 0;
  for (int i = 0; i < N; i++) sum += sums[i];
  printf("%ld\n", sum);
}
C
  gcc -O2 -fno-optimize-sibling-calls preempted.c -o preempted
  for i in 1 2 3; do
    same_as_untraced -f 'f?' -- ./preempted
    for f in f1 f2 f3 f4 f5; do [ "$(calls_of $f)" -eq 600000 ]; done
    [ "$(lost_of)" -eq 0 ]
    "$SONDE" report trace >out
    grep -q '^3,000,000 calls of 1 thread' out
    [ "$(grep -c '^note:' out)" = 0 ]
  done
}

@test "calls that a coroutine begins in one thread and ends in another are not called in flight" {
  cat >migrating.c <<'C'
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <ucontext.h>
enum { N = 20, STACK = 65536 };
static ucontext_t fiber[N];
static int done[N];
static __thread ucontext_t scheduler;
static __thread int current;
#define NI __attribute__((noinline))
NI ucontext_t *this_scheduler(void) { return &scheduler; }
NI int this_fiber(void) { return current; }
NI void yields(void) { swapcontext(&fiber[this_fiber()], this_scheduler()); __asm__ volatile(""); }
NI void works(void) { yields(); __asm__ volatile(""); }
static void body(int i) {
  works();
  done[i] = 1;
  setcontext(this_scheduler());
}
static void *turn(void *a) {
  for (int i = 0; i < N; i++) {
    current = i;
    if (!done[i]) swapcontext(this_scheduler(), &fiber[i]);
  }
  return a;
}
int main(void) {
  for (int i = 0; i < N; i++) {
    getcontext(&fiber[i]);
    fiber[i].uc_stack.ss_sp = malloc(STACK);
    fiber[i].uc_stack.ss_size = STACK;
    makecontext(&fiber[i], (void (*)(void))body, 1, i);
  }
  pthread_t t;
  pthread_create(&t, 0, turn, 0);
  pthread_join(t, 0);
  turn(0);
  puts("ok");
}
C
  gcc -O2 -pthread migrating.c -o migrating
  same_as_untraced -f works -f yields -- ./migrating
  [ "$(calls_of works)" -eq 20 ]
  [ "$(calls_of yields)" -eq 20 ]
  "$SONDE" report trace >out
  [ "$(grep -c '^note:' out)" = 0 ]
}

@test "calls that ended with their threads count without a duration" {
  cat >quits.c <<'C'
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>
__attribute__((noinline)) void quit(int now) { if (now) syscall(SYS_exit, 0); usleep(1000); }
static void *run(void *a) { quit(0); quit(1); return a; }
int main(void) {
  pthread_t t[3];
  for (int i = 0; i < 3; i++) pthread_create(t + i, 0, run, 0);
  for (int i = 0; i < 3; i++) pthread_join(t[i], 0);
  usleep(400000);
  return 0;
}
C
  gcc -O2 -pthread quits.c -o quits
  for how in "" --sum; do
    same_as_untraced $how -f quit -- ./quits
    "$SONDE" report --stats --json trace | python3 -c '
import json, sys
quit, = json.load(sys.stdin)["functions"]
assert quit["calls"] == 6 and quit["returned"] == 3 and quit["thread_ended"] == 3, quit
assert 3e6 <= quit["total_ns"] < 3e8, quit
assert 1e6 <= quit["avg_ns"] < 1e8 and 1e6 <= quit["min_ns"] <= quit["max_ns"] < 1e8, quit'
  done
  same_as_untraced -f quit -- ./quits
  "$SONDE" report --calls trace >out
  [ "$(grep -c ' us          - *quit  \[thread ended\]$' out)" = 3 ]
  [ "$(grep -c 'quit$' out)" = 3 ]
  "$SONDE" report --calls --json trace | python3 -c '
import json, sys
for call in json.load(sys.stdin)["calls"]: assert (call["duration_ns"] is None) == (call["exit"] == "thread ended"), call'
}

@test "a call open across fork() is one call, and in the child only the caller of others" {
  cat >inherits.c <<'C'
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>
__attribute__((noinline)) int leaf(int i) { __asm__ volatile(""); return i + 1; }
__attribute__((noinline)) int in_child(int i) { return leaf(i) + leaf(i + 1); }
__attribute__((noinline)) int forks(int i) {
  pid_t p = fork();
  if (!p) { in_child(i); return -1; }  // returns in the child, too
  int s;
  waitpid(p, &s, 0);
  return i;
}
__attribute__((noinline)) int loop(void) {
  for (int i = 0; i < 5; i++) if (forks(i) < 0) { if (i % 2) return -1; _exit(0); }  // ends within, or returns farther
  return 0;
}
int main(void) { if (loop() < 0) _exit(1); leaf(0); puts("done"); return 0; }
C
  gcc -O2 -fno-optimize-sibling-calls inherits.c -o inherits
  for how in "" -s --sum --force-trap; do
    same_as_untraced $how -f leaf -f in_child -f forks -f loop -f main -- ./inherits
    [ "$(calls_of main)" -eq 1 ]
    [ "$(calls_of loop)" -eq 1 ]
    [ "$(calls_of forks)" -eq 5 ]
    [ "$(calls_of in_child)" -eq 5 ]
    [ "$(calls_of leaf)" -eq 11 ]
    "$SONDE" report --folded --counts trace >folded
    printf '%s\n' 'main 1' 'main;leaf 1' 'main;loop 1' 'main;loop;forks 5' 'main;loop;forks;in_child 5' \
      'main;loop;forks;in_child;leaf 10' | diff - <(sort folded)
    "$SONDE" report trace >out
    grep -q '^23 calls' out
    [ "$(grep -c -e '^note:' -e 'still running' out)" = 0 ]
  done
  same_as_untraced -f forks -f in_child -- ./inherits
  "$SONDE" report --calls trace >out
  [ "$(grep -c '  forks  \[began before the fork\]$' out)" = 5 ]
  [ "$(grep -c '    in_child$' out)" = 5 ]
}

@test "a program that forbids itself the time stamp counter: both kinds of probes say the same of what is missing" {
  cat >strict.c <<'C'
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>
__attribute__((noinline)) int f(int a) { __asm__ volatile(""); return a + 1; }
int main(void) {
  int x = 0;
  for (int i = 0; i < 1000; i++) x = f(x);
  prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT);
  for (int i = 0; i < 3000; i++) x = f(x);
  syscall(SYS_exit, x == 4000 ? 5 : 6);
}
C
  gcc -O1 strict.c -o strict
  note='note: 1 process forbade itself the time stamp counter (strict seccomp, PR_SET_TSC): nothing of it was recorded from then on'
  for options in '-f f' '-f f --force-trap'; do
    same_as_untraced $options -- ./strict
    [ "$(calls_of f)" -eq 1000 ]
    grep -qF "sonde: $note" traced.err.all
    "$SONDE" report trace | grep -qF "$note"
  done
  same_as_untraced -f f -- ./strict
  "$SONDE" report trace | grep -q '^lost: 3,000 no state left for the thread;'
}

@test "forks in threads, and many children that end at once: each call stands under the one that it came from" {
  cat >threads.c <<'C'
#include <pthread.h>
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>
#define NI __attribute__((noinline))
NI int leaf(int i) { __asm__ volatile(""); return i + 1; }
NI int deep(int n) { if (n) return deep(n - 1) + 1; pid_t p = fork(); if (!p) { leaf(1); return 0; } int s; waitpid(p, &s, 0); return 0; }
NI void *waits(void *a) { int fd = *(int *)a; char c; read(fd, &c, 1); leaf(2); return 0; }
NI void *forker(void *a) { pid_t me = getpid(); deep(5); if (getpid() != me) _exit(leaf(3)); return a; }
int main(void) {
  int fd[2]; pipe(fd); pthread_t t[8], f[4];
  for (int i = 0; i < 8; i++) pthread_create(t + i, 0, waits, fd);
  usleep(50000);
  for (int i = 0; i < 4; i++) pthread_create(f + i, 0, forker, 0);
  for (int i = 0; i < 4; i++) pthread_join(f[i], 0);
  pid_t me = getpid(); deep(2); if (getpid() != me) { deep(1); _exit(0); }
  write(fd[1], "xxxxxxxx", 8);
  for (int i = 0; i < 8; i++) pthread_join(t[i], 0);
  puts("ok"); return 0; }
C
  cat >many.c <<'C'
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>
__attribute__((noinline)) int leaf(int i) { __asm__ volatile(""); return i + 1; }
__attribute__((noinline)) int child(int fd) { char c; leaf(1); read(fd, &c, 1); return leaf(2); }
int main(void) { int fd[2]; pipe(fd); for (int i = 0; i < 100; i++) if (!fork()) close(fd[1]), _exit(child(fd[0]) & 0); close(fd[1]); int n = 0, s; while (wait(&s) > 0) n += !s; printf("%d\n", n); return 0; }
C
  gcc -O1 -fno-optimize-sibling-calls -pthread threads.c -o threads
  gcc -O1 many.c -o many
  for how in "" -s --sum --force-trap; do
    same_as_untraced $how -f leaf -f deep -f waits -f forker -f main -- ./threads
    "$SONDE" report --folded --counts trace >folded
    d6='deep;deep;deep;deep;deep;deep'
    printf '%s\n' 'forker 4' "forker;$d6 4" "forker;$d6;leaf 4" 'forker;leaf 4' 'main 1' 'main;deep 2' 'main;deep;deep 2' \
      'main;deep;deep;deep 1' 'main;deep;deep;deep;leaf 1' 'main;deep;deep;leaf 1' 'waits 8' 'waits;leaf 8' |
      diff - <(grep -v '^forker\(;deep\)\{1,5\} ' folded | sort)
    same_as_untraced $how -f leaf -f child -f main -- ./many
    "$SONDE" report --folded --counts trace >folded
    printf '%s\n' 'main 1' 'main;child 100' 'main;child;leaf 200' | diff - <(sort folded)
  done
}
