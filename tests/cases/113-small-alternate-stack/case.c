// Handlers on alternate stacks with room for little more than one signal frame, and threads with the smallest stack that
// libc allows. The program asks where its alternate stack is and reads what lies below it.
#define _GNU_SOURCE
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#define NI __attribute__((noinline))
static volatile int s; static volatile long inside, wrong; static __thread char *stack_begin, *stack_end;
NI int tiny(int x) { return x; }
NI int leaf(int x) { s++; return x + 1; }
NI int mid(int x) { int r = leaf(x) + tiny(x); s++; return r; }
static void on_sig(int g) {
  char here; stack_t now; sigaltstack(NULL, &now); s++;
  if (&here < stack_begin || &here >= stack_end || now.ss_sp != stack_begin || now.ss_flags != SS_ONSTACK || mid(g) != 2 * g + 1) wrong++; else inside++;
}
NI void set_stack(size_t size) {
  char *m = mmap(NULL, size + 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  memset(m, 0x5a, 4096); mprotect(m + 4096 + (size + 4095) / 4096 * 4096, 0, PROT_NONE);
  stack_begin = m + 4096; stack_end = stack_begin + size;
  stack_t ss = { .ss_sp = stack_begin, .ss_size = size }, back; if (sigaltstack(&ss, NULL)) abort();
  sigaltstack(NULL, &back); if (back.ss_sp != stack_begin || back.ss_size != size || back.ss_flags) wrong++;
}
NI void check_below(void) { for (int i = 1; i <= 4096; i++) if (stack_begin[-i] != 0x5a) { wrong++; break; } }
NI void storm(void) { for (int i = 0; i < 200; i++) { pthread_kill(pthread_self(), SIGUSR1); mid(i); } }
static void *thread(void *a) { set_stack((size_t)a); storm(); check_below(); return NULL; }
int main(void) {
  struct sigaction a = { .sa_handler = on_sig, .sa_flags = SA_ONSTACK }; sigaction(SIGUSR1, &a, NULL);
  size_t least = (size_t)sysconf(_SC_MINSIGSTKSZ);                   // one frame of this processor, and what a handler needs
  set_stack(least + 512); storm(); check_below();
  printf("%ld inside, %ld wrong\n", inside, wrong);
  pthread_attr_t attr; pthread_attr_init(&attr); pthread_attr_setstacksize(&attr, (size_t)sysconf(_SC_THREAD_STACK_MIN));
  for (size_t more = 512; more <= 4096; more *= 2) { pthread_t t; if (pthread_create(&t, &attr, thread, (void *)(least + more))) abort(); pthread_join(t, NULL); }
  printf("%ld inside, %ld wrong\nok\n", inside, wrong);
}
