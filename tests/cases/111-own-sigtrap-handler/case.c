// A program with a SIGTRAP handler of its own: installs, asks for, replaces and resets it, traps by int3, by raise and by
// the trap flag, with mask and flags that the handler sees; and it lets a child die by SIGTRAP.
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <sys/wait.h>
#include <ucontext.h>
#include <unistd.h>
#define NI __attribute__((noinline))
static volatile int s, traps, other; static volatile long last_code, mask_in_handler, exact;
extern char after_int3[];
NI int inner(int x) { s++; return x + 1; }
NI int outer(int x) { int r = inner(x); s++; return r; }
NI void work(void) { for (int i = 0; i < 500; i++) outer(i); }
NI void breakpoint(void) { __asm__ volatile("int3\n.globl after_int3\nafter_int3:" ::: "memory"); s++; }
static void first(int g, siginfo_t *i, void *c) {
  traps += g == SIGTRAP; last_code = i->si_code; exact += ((ucontext_t *)c)->uc_mcontext.gregs[REG_RIP] == (long)after_int3;
  sigset_t now; sigprocmask(SIG_BLOCK, NULL, &now); mask_in_handler = sigismember(&now, SIGTRAP) * 10 + sigismember(&now, SIGUSR1); outer(g);
}
static void second(int g) { other += g == SIGTRAP; outer(g); }
NI const char *installed(void) {
  struct sigaction a; sigaction(SIGTRAP, NULL, &a);
  if (a.sa_flags & SA_SIGINFO) return a.sa_sigaction == first ? "first" : "foreign";
  return a.sa_handler == SIG_DFL ? "default" : a.sa_handler == SIG_IGN ? "ignored" : a.sa_handler == second ? "second" : "foreign";
}
NI int child_dies(void) { fflush(stdout); pid_t p = fork(); if (!p) { breakpoint(); _exit(9); } int st; waitpid(p, &st, 0); return WIFSIGNALED(st) ? WTERMSIG(st) : -WEXITSTATUS(st); }
static void *in_thread(void *a) { for (int i = 0; i < 100; i++) { breakpoint(); outer(i); } return a; }
int main(void) {
  work(); printf("%s, a child dies by %d\n", installed(), child_dies());
  struct sigaction a = { .sa_sigaction = first, .sa_flags = SA_SIGINFO }, old; sigaddset(&a.sa_mask, SIGUSR1); sigaction(SIGTRAP, &a, &old);
  printf("was %s, is %s\n", old.sa_handler == SIG_DFL ? "default" : "foreign", installed()); work();
  breakpoint(); printf("int3: %d code %ld exact %ld mask %ld\n", traps, last_code, exact, mask_in_handler);
  raise(SIGTRAP); printf("raise: %d code %ld\n", traps, last_code); work();
  __asm__ volatile("pushfq\n orq $0x100,(%%rsp)\n popfq\n nop\n pushfq\n andq $~0x100,(%%rsp)\n popfq" ::: "memory", "cc"); printf("single steps seen %d\n", traps > 3);
  pthread_t t; int before = traps; pthread_create(&t, NULL, in_thread, NULL); pthread_join(t, NULL); printf("in a thread: %d\n", traps - before);
  void (*was)(int) = signal(SIGTRAP, second); printf("replaced %d, is %s\n", was == (void (*)(int))first, installed()); breakpoint(); work(); printf("second: %d\n", other);
  struct sigaction once = { .sa_handler = second, .sa_flags = SA_RESETHAND }; sigaction(SIGTRAP, &once, NULL); breakpoint(); printf("once: %d, then %s\n", other, installed());
  printf("a child dies by %d\n", child_dies());
  signal(SIGTRAP, SIG_IGN); raise(SIGTRAP); printf("%s\n", installed()); work();
  signal(SIGTRAP, SIG_DFL); work(); printf("%s\nok\n", installed());
}
