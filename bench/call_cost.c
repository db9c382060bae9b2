// Measures what a probed call costs: calls a 2 ns function CALLS times on each of THREADS threads and prints the wall
// nanoseconds per call of the slowest thread. `direct` calls work(); `floor` goes through the hand-written minimum of
// floor.S; DEPTH > 0 puts that many frames below the caller, for stacks.
//
//   call_cost direct|floor CALLS THREADS DEPTH
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#ifdef __clang__
#define XRAY_ALWAYS __attribute__((xray_always_instrument))
#define XRAY_NEVER __attribute__((xray_never_instrument))
#else
#define XRAY_ALWAYS
#define XRAY_NEVER
#endif
#define NOINLINE __attribute__((noinline))

// About 2 ns: a chain of dependent multiplications. Its first instructions are what compilers emit for real functions.
NOINLINE XRAY_ALWAYS long work(long x) {
  asm volatile("imul $3, %0, %0\n\timul $5, %0, %0" : "+r"(x));
  return x + 1;
}
#ifdef WITH_FLOOR
long floor_work(long x);
#endif

static long calls;
static int use_floor, depth;
static pthread_barrier_t barrier;
static volatile long sink;

static XRAY_NEVER double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1e9 + t.tv_nsec;
}

static NOINLINE XRAY_NEVER void loop(void) {
  long x = 1;
#ifdef WITH_FLOOR
  if (use_floor)
    for (long i = 0; i < calls; i++) x = floor_work(x);
  else
#endif
    for (long i = 0; i < calls; i++) x = work(x);
  sink = x;
}

static NOINLINE XRAY_NEVER void deeper(int n) {
  if (n > 0) deeper(n - 1);
  else loop();
  sink++;
}

static XRAY_NEVER void* thread(void* result) {
  pthread_barrier_wait(&barrier);
  double start = now();
  deeper(depth);
  *(double*)result = (now() - start) / (double)calls;
  return 0;
}

XRAY_NEVER int main(int argc, char** argv) {
  if (argc != 5) return fprintf(stderr, "usage: call_cost direct|floor CALLS THREADS DEPTH\n"), 2;
  use_floor = !strcmp(argv[1], "floor");
  calls = atol(argv[2]);
  int threads = atoi(argv[3]);
  depth = atoi(argv[4]);
  if (threads < 1 || threads > 64) return 2;
  pthread_barrier_init(&barrier, 0, (unsigned)threads);
  pthread_t id[64];
  double per_call[64], slowest = 0;
  for (int i = 0; i < threads; i++) pthread_create(&id[i], 0, thread, &per_call[i]);
  for (int i = 0; i < threads; i++) pthread_join(id[i], 0);
  for (int i = 0; i < threads; i++) slowest = per_call[i] > slowest ? per_call[i] : slowest;
  printf("%.3f\n", slowest);
}
