#include <pthread.h>
#include <stdio.h>
#include <unistd.h>
#define NI __attribute__((noinline))
static int cleaned, blocked[2];
static volatile int after, ready;
static void clean(void *p) { __atomic_fetch_add(&cleaned, *(int *)p, __ATOMIC_RELAXED); }
NI int exits(int n) {
  int one = 1;
  pthread_cleanup_push(clean, &one);
  if (n == 0) pthread_exit((void *)7);
  after = exits(n - 1);
  pthread_cleanup_pop(0);
  return n;
}
NI int blocks(int n) {
  char c;
  int one = 1;
  pthread_cleanup_push(clean, &one);
  if (n == 0) { ready = 1; while (read(blocked[0], &c, 1) == 1) {} }
  after = blocks(n - 1);
  pthread_cleanup_pop(0);
  return n;
}
static void *exiting(void *p) { exits(5); return p; }
static void *blocking(void *p) { blocks(5); return p; }
int main(void) {
  if (pipe(blocked)) return 1;
  int exited = 0, cancelled = 0;
  for (int i = 0; i < 50; i++) {
    pthread_t t;
    void *r;
    pthread_create(&t, 0, exiting, 0);
    pthread_join(t, &r);
    exited += r == (void *)7;
    ready = 0;
    pthread_create(&t, 0, blocking, 0);
    while (!ready) usleep(100);
    pthread_cancel(t);
    pthread_join(t, &r);
    cancelled += r == PTHREAD_CANCELED;
  }
  printf("%d %d %d\n", exited, cancelled, cleaned);
}
