// Started with SIGTRAP ignored, as by a shell's `trap '' TRAP`: the program sees that, passes it on to children, and a
// real breakpoint kills all the same.
#define _GNU_SOURCE
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>
#define NI __attribute__((noinline))
static volatile int s;
NI int inner(int x) { s++; return x + 1; }
NI int outer(int x) { int r = inner(x); s++; return r; }
NI int is_ignored(void) { struct sigaction a; sigaction(SIGTRAP, NULL, &a); return a.sa_handler == SIG_IGN; }
NI int child_dies(void) { fflush(stdout); pid_t p = fork(); if (!p) { __asm__ volatile("int3"); _exit(9); } int st; waitpid(p, &st, 0); return WIFSIGNALED(st) ? WTERMSIG(st) : -WEXITSTATUS(st); }
int main(void) {
  int t = 0; for (int i = 0; i < 1000; i++) t += outer(i);
  printf("%d ignored %d\n", t, is_ignored());
  raise(SIGTRAP); printf("a child dies by %d\n", child_dies());
  fflush(stdout); if (system("sed -n 's/^SigIgn:.*\\(.\\).$/signals 5 to 8: \\1/p' /proc/self/status")) return 1;
  for (int i = 0; i < 1000; i++) t += outer(i);
  printf("%d ignored %d\nok\n", t, is_ignored());
}
