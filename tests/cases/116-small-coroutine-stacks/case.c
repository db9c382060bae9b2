// usage: case BYTES. A coroutine on a stack of so many bytes, with a guard page below it.
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <ucontext.h>
#define NI __attribute__((noinline))
static volatile int sum; static ucontext_t mine, other;
NI int tiny(int x) { return x; }
NI int leaf(int x) { sum++; return x + 1; }
static void work(void) { for (int i = 0; i < 3; i++) { sum += tiny(leaf(i)); swapcontext(&other, &mine); } }
int main(int c, char **v) {
  (void)c; size_t size = (size_t)atoi(v[1]);
  char *m = mmap(NULL, 4096 + size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  mprotect(m, 4096, PROT_NONE);
  getcontext(&other); other.uc_stack.ss_sp = m + 4096; other.uc_stack.ss_size = size; other.uc_link = &mine;
  makecontext(&other, work, 0);
  for (int i = 0; i < 4; i++) swapcontext(&mine, &other);
  printf("%d\n", sum);
}
