// Two stacks to look at: six functions deep in the first thread, a thousand activations of one function in the second. At each
// leaf the usual in-process unwinders print what they see, then the thread waits in pause() for readers from outside.
// Output: lines `inside READER THREAD PC...`, the lines of /proc/self/maps, `ready`.
#define _GNU_SOURCE
#define UNW_LOCAL_ONLY
#include <dlfcn.h>
#include <libunwind.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdio.h>
#include <unistd.h>
#include <unwind.h>

#define NOINLINE __attribute__((noinline, noclone))
#define NOT_A_TAIL_CALL __asm__ volatile("" ::: "memory")
enum { kMost = 4096, kDepth = 1000 };

static void *pcs[kMost];
static int count;
static sem_t deep_is_there;

static _Unwind_Reason_Code keep(struct _Unwind_Context *context, void *unused) {
  (void)unused;
  if (count == kMost) return _URC_END_OF_STACK;
  pcs[count++] = (void *)_Unwind_GetIP(context);
  return _URC_NO_REASON;
}

NOINLINE void by_gnu_libunwind(void) {
  unw_context_t context;
  unw_cursor_t cursor;
  unw_getcontext(&context);
  unw_init_local(&cursor, &context);
  for (count = 0; count < kMost;) {
    unw_word_t pc;
    unw_get_reg(&cursor, UNW_REG_IP, &pc);
    pcs[count++] = (void *)pc;
    if (unw_step(&cursor) <= 0) break;
  }
}

static void print(const char *reader, const char *thread) {
  printf("inside %s %s", reader, thread);
  for (int i = 0; i < count; i++) printf(" %lx", (unsigned long)pcs[i]);
  printf("\n");
}

NOINLINE void look(const char *thread) {
  // GNU libunwind has a function of the same name and, linked in front of libc, takes its place.
  int (*glibc_backtrace)(void **, int) = (int (*)(void **, int))dlsym(dlopen("libc.so.6", RTLD_LAZY), "backtrace");
  count = glibc_backtrace(pcs, kMost);
  print("backtrace", thread);
  count = unw_backtrace(pcs, kMost);
  print("unw_backtrace", thread);
  count = 0;
  _Unwind_Backtrace(keep, 0);
  print("_Unwind_Backtrace", thread);
  by_gnu_libunwind();
  print("unw_step", thread);
}

NOINLINE void look_and_wait(const char *thread, int last) {
  look(thread);
  if (last) {
    char line[4096];
    FILE *maps = fopen("/proc/self/maps", "r");
    while (fgets(line, sizeof line, maps)) fputs(line, stdout);
    fclose(maps);
    puts("ready");
    fflush(stdout);
  } else {
    sem_post(&deep_is_there);
  }
  for (;;) pause();
}

NOINLINE int deep(int left) {
  volatile int below = left;
  if (left > 1) below = deep(left - 1);
  else look_and_wait("deep", 0);
  return below + 1;
}
static void *deep_thread(void *unused) {
  deep(kDepth);
  return unused;
}

NOINLINE void sixth(int x) {
  volatile char room[100];
  room[x] = 1;
  look_and_wait("chain", 1);
  NOT_A_TAIL_CALL;
}
NOINLINE void fifth(int x) { sixth(x); NOT_A_TAIL_CALL; }
NOINLINE void fourth(int x) {
  volatile char room[50 + 8 * (x & 3)];  // a frame found by its frame pointer
  room[0] = 1;
  fifth(x + room[0]);
  NOT_A_TAIL_CALL;
}
NOINLINE void third(int x) { fourth(x + 1); NOT_A_TAIL_CALL; }
NOINLINE void second(int x) { third(x + 1); NOT_A_TAIL_CALL; }
NOINLINE void first(int x) { second(x + 1); NOT_A_TAIL_CALL; }

int main(void) {
  pthread_t thread;
  sem_init(&deep_is_there, 0, 0);
  pthread_create(&thread, 0, deep_thread, 0);
  sem_wait(&deep_is_there);
  first(1);
  return 0;
}
