// usage: case BYTES jump|return [blocked|thread]
// Three faults, handled on an alternate stack of BYTES more than one signal frame needs, with a guard page below it; the
// handler calls two functions, then jumps or returns. blocked: SIGTRAP is blocked all the while, and one is pending; thread:
// on a thread with the smallest stack of libc, which was made with everything blocked, as libc does.
// Linked for binding at start: a first call through the linker takes more stack than all the rest.
#define _GNU_SOURCE
#include <limits.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <unistd.h>
#define NI __attribute__((noinline))
static volatile int calls, inside, traps; static int jumps, blocks; static size_t size;
static char *volatile page; static char *stack; static sigjmp_buf back;
NI int tiny(int x) { return x; }
NI int leaf(int x) { calls++; return x + 1; }
static void on_trap(int g) { (void)g; traps++; }
static void on_fault(int g) {
  char here; inside += &here >= stack && &here < stack + size && tiny(leaf(g)) == g + 1;
  if (jumps) siglongjmp(back, 1);
  mprotect(page, 4096, PROT_READ | PROT_WRITE);
}
NI int fault(void) {
  mprotect(page, 4096, PROT_NONE);
  if (!sigsetjmp(back, 1)) *page = 1;
  sigset_t now; sigprocmask(SIG_BLOCK, NULL, &now);
  return sigismember(&now, SIGTRAP) == blocks && !sigismember(&now, SIGSEGV);
}
static void *work(void *unused) {
  (void)unused;
  char *m = mmap(NULL, 4096 + size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  mprotect(m, 4096, PROT_NONE); stack = m + 4096;
  stack_t ss = { .ss_sp = stack, .ss_size = size }; if (sigaltstack(&ss, NULL)) abort();
  page = mmap(NULL, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  sigset_t trap, pending; sigemptyset(&trap); sigaddset(&trap, SIGTRAP);
  if (blocks) pthread_sigmask(SIG_BLOCK, &trap, NULL), raise(SIGTRAP);
  int right = 0; for (int i = 0; i < 3; i++) right += fault();
  sigpending(&pending);
  printf("%d times inside, mask right %d times, %d pending, %d SIGTRAPs", inside, right, sigismember(&pending, SIGTRAP), traps);
  pthread_sigmask(SIG_UNBLOCK, &trap, NULL);
  printf(", then %d\n", traps);
  return NULL;
}
int main(int c, char **v) {
  size = getauxval(AT_MINSIGSTKSZ) + (size_t)atoi(v[1]); jumps = v[2][0] == 'j'; blocks = c > 3 && v[3][0] == 'b';
  struct sigaction a = { .sa_handler = on_fault, .sa_flags = SA_ONSTACK }; sigaction(SIGSEGV, &a, NULL);
  signal(SIGTRAP, on_trap);
  if (c <= 3 || blocks) return work(NULL), 5;
  pthread_attr_t attr; pthread_attr_init(&attr); pthread_attr_setstacksize(&attr, (size_t)sysconf(_SC_THREAD_STACK_MIN));
  pthread_t t; if (pthread_create(&t, &attr, work, NULL)) abort();
  pthread_join(t, NULL);
  return 5;
}
