// Threads that block every signal and go on calling functions; the program asks for its mask in every way it has, and a
// child that it starts inherits it. A trap in such a thread kills the process whatever handler is installed.
#define _GNU_SOURCE
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>
#define NI __attribute__((noinline))
extern char **environ;
static volatile int s;
static _Atomic int usr1;
NI int tiny(int x) { return x; }
NI int inner(int x) { s++; return x + 1; }
NI int outer(int x) { int r = inner(x) + tiny(x); s++; return r; }
NI int run_all(void) { int t = 0; for (int i = 0; i < 1000; i++) t += outer(i); return t; }
NI int blocked_of(const sigset_t *set) { int n = 0; for (int i = 1; i < 65; i++) n += sigismember(set, i) == 1; return n; }
NI int blocked_now(void) { sigset_t now; pthread_sigmask(SIG_BLOCK, NULL, &now); return blocked_of(&now); }
static void on_usr1(int g) { usr1 += outer(g) > 0; }
static void *blocks_all(void *a) {
  sigset_t all, before; sigfillset(&all); pthread_sigmask(SIG_SETMASK, &all, &before);
  long r = run_all(); r += blocked_now(); pthread_sigmask(SIG_SETMASK, &before, NULL); r += run_all();
  return (void *)(r + (long)a);
}
static void *waits(void *a) {                                        // everything blocked, signals taken one by one
  sigset_t all; sigfillset(&all); pthread_sigmask(SIG_SETMASK, &all, NULL);
  sigset_t some; sigemptyset(&some); sigaddset(&some, SIGUSR2);
  int got = 0; sigwait(&some, &got); return (void *)(long)(got == SIGUSR2 && outer(1) == 3 && a == NULL);
}
NI void child_sees(const char *when) {                               // what a started program inherits
  fflush(stdout); pid_t p; char *av[] = { "sed", "-n", "s/^SigBlk:[[:space:]]*//p", "/proc/self/status", NULL };
  if (posix_spawn(&p, "/bin/sed", NULL, NULL, av, environ)) exit(1);
  int st; waitpid(p, &st, 0); printf("%s child %d\n", when, st);
}
int main(void) {
  signal(SIGUSR1, on_usr1);
  pthread_t t[4]; long sum = 0;
  for (long i = 0; i < 4; i++) pthread_create(&t[i], NULL, blocks_all, (void *)i);
  for (int i = 0; i < 4; i++) { void *r; pthread_join(t[i], &r); sum += (long)r; }
  printf("%ld\n", sum);
  sigset_t usr2; sigemptyset(&usr2); sigaddset(&usr2, SIGUSR2); sigprocmask(SIG_BLOCK, &usr2, NULL);
  pthread_create(&t[0], NULL, waits, NULL); pthread_kill(t[0], SIGUSR2); void *ok; pthread_join(t[0], &ok); sigprocmask(SIG_UNBLOCK, &usr2, NULL); printf("waited %ld\n", (long)ok);
  child_sees("open");
  sigset_t all, none; sigfillset(&all); sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &all, NULL); printf("blocked %d %d\n", blocked_now(), run_all());
  child_sees("blocked");
  raise(SIGUSR1); sigset_t pending; sigpending(&pending); printf("pending %d handled %d\n", blocked_of(&pending), usr1);
  struct timespec z = { 0, 0 }; ppoll(NULL, 0, &z, &none); printf("in ppoll %d\n", usr1);
  raise(SIGUSR1); sigset_t but_one = all; sigdelset(&but_one, SIGUSR1); sigsuspend(&but_one); printf("in sigsuspend %d, then %d\n", usr1, blocked_now());
  int fd = signalfd(-1, &usr2, SFD_NONBLOCK); raise(SIGUSR2);
  struct signalfd_siginfo info; printf("signalfd %d\n", read(fd, &info, sizeof info) == sizeof info && info.ssi_signo == SIGUSR2);
  pid_t p = fork(); if (!p) _exit(run_all() == 1000000 && blocked_now() == 60 ? 5 : 6);
  int st; waitpid(p, &st, 0); printf("forked %d\n", WIFEXITED(st) ? WEXITSTATUS(st) : -1);
  sigprocmask(SIG_SETMASK, &none, NULL); printf("open %d %d\nok\n", blocked_now(), run_all());
}
