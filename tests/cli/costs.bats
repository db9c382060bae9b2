# What a probe must not cost, measured by the program itself. The bounds are far from both the right and the wrong figure.
load common

@test "stacks near the end of a thread's stack take no system call each" {
  cat >calls.c <<'C'
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <sys/resource.h>
#include <unistd.h>
__attribute__((noinline)) long add(long x) { __asm__ volatile(""); return x + 1; }
static void *work(void *unused) {
  struct rusage before, after;
  getrusage(RUSAGE_THREAD, &before);
  long n = 0;
  while (n < 100000) n = add(n);
  getrusage(RUSAGE_THREAD, &after);
  double spent = (after.ru_stime.tv_sec - before.ru_stime.tv_sec) + (after.ru_stime.tv_usec - before.ru_stime.tv_usec) / 1e6;
  fprintf(spent > 1 ? stdout : stderr, "%.3f s in the kernel\n", spent);
  return unused;
}
static void *wait(void *unused) { pause(); return unused; }
int main(void) {
  pthread_t first, second;  // the second's stack ends at the guard page of the first's
  pthread_create(&first, 0, wait, 0);
  pthread_create(&second, 0, work, 0);
  pthread_join(second, 0);
}
C
  gcc -O2 -pthread calls.c -o calls
  "$SONDE" record -q -s -o trace -- ./calls >out 2>err
  cat out
  [ ! -s out ]
  [ "$(calls_of add)" -eq 100000 ]
}
