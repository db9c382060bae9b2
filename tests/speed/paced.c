// Threads that call leaf() at a given rate and keep their own account of it: how many calls they made, and when they
// could not go on for more than a few milliseconds. Prints "done" and ends with status 3; the account goes to a file:
//
//   calls N              of all threads
//   gap BEGIN END        CLOCK_MONOTONIC ns, one line for each time that a call came late
//
//   paced THREADS CALLS_PER_SECOND SECONDS ACCOUNT
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <x86intrin.h>

enum { MOST_THREADS = 16, MOST_GAPS = 4096 };

struct thread {
  pthread_t id;
  long calls, gaps;
  long long begin[MOST_GAPS], end[MOST_GAPS];
};

static struct thread threads[MOST_THREADS];
static double ticks_per_ns, seconds, rate;

static long long now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
}

__attribute__((noinline)) void leaf(long x) { __asm__ volatile("" ::"r"(x)); }

static void* run(void* argument) {
  struct thread* me = argument;
  unsigned long long step = (unsigned long long)(ticks_per_ns * 1e9 / rate), late = (unsigned long long)(ticks_per_ns * 5e6);
  unsigned long long now = __rdtsc(), end = now + (unsigned long long)(ticks_per_ns * seconds * 1e9), next = now, last;
  while (now < end) {
    leaf(me->calls++);
    last = now;
    now = __rdtsc();
    if (now - last > late && me->gaps < MOST_GAPS) {
      me->end[me->gaps] = now_ns();
      me->begin[me->gaps] = me->end[me->gaps] - (long long)((double)(now - last) / ticks_per_ns);
      me->gaps++;
    }
    next = next + step > now ? next + step : now;
    while (now < next) now = __rdtsc();
  }
  return 0;
}

int main(int argc, char** argv) {
  if (argc != 5) return 2;
  int count = atoi(argv[1]);
  rate = atof(argv[2]);
  seconds = atof(argv[3]);
  if (count < 1 || count > MOST_THREADS) return 2;
  long long ns = now_ns();
  unsigned long long ticks = __rdtsc();
  while (now_ns() - ns < 50000000) {
  }
  ticks_per_ns = (double)(__rdtsc() - ticks) / (double)(now_ns() - ns);
  for (int i = 0; i < count; i++) pthread_create(&threads[i].id, 0, run, &threads[i]);
  long calls = 0;
  for (int i = 0; i < count; i++) pthread_join(threads[i].id, 0), calls += threads[i].calls;
  FILE* account = fopen(argv[4], "w");
  if (!account) return 4;
  fprintf(account, "calls %ld\n", calls);
  for (int i = 0; i < count; i++)
    for (long g = 0; g < threads[i].gaps; g++)
      fprintf(account, "gap %lld %lld\n", threads[i].begin[g], threads[i].end[g]);
  fclose(account);
  puts("done");
  return 3;
}
