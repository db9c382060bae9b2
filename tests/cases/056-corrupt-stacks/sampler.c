// Linked to the case: each thread gets a signal at 1 kHz of the process's time, on a stack of its own, and calls tick() there.
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/time.h>

__attribute__((noinline)) void tick(void) { __asm__ volatile(""); }
static void on_tick(int number) { (void)number; tick(); __asm__ volatile(""); }

struct start { void *(*function)(void *); void *argument; };
static void *begin(void *given) {
  struct start start = *(struct start *)given;
  stack_t own = {.ss_sp = malloc(1 << 16), .ss_size = 1 << 16};
  sigaltstack(&own, 0);
  return start.function(start.argument);
}
int __real_pthread_create(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*function)(void *), void *argument) {
  struct start *start = malloc(sizeof *start);
  *start = (struct start){function, argument};
  return __real_pthread_create(thread, attributes, begin, start);
}
__attribute__((constructor)) static void start_clock(void) {
  struct sigaction action = {.sa_handler = on_tick, .sa_flags = SA_ONSTACK | SA_RESTART};
  struct itimerval every = {{0, 1000}, {0, 1000}};
  sigaction(SIGPROF, &action, 0);
  setitimer(ITIMER_PROF, &every, 0);
}
