// A timer at 10 kHz over three functions that do nothing but call each other; its handler takes a backtrace each time.
// Output: how many, and each distinct chain once, how often and the function that was interrupted, then return addresses as FILE+OFFSET.
// usage: timer STACKS
#define _GNU_SOURCE
#include <dlfcn.h>
#include <execinfo.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <ucontext.h>

#define IN(name) __attribute__((noinline, noclone, section(#name)))
extern char __start_leaf_code[], __stop_leaf_code[], __start_branch_code[], __stop_branch_code[], __start_round_code[],
    __stop_round_code[];
enum { kMost = 64, kChains = 256 };

struct chain {
  const char *interrupted;
  int count;
  long times;
  void *callers[kMost];
};
static struct chain chains[kChains];
static int chain_count;
static volatile long taken, elsewhere, outside, too_many;
static volatile int in_round;

static const char *function_at(char *pc) {
  if (pc >= __start_leaf_code && pc < __stop_leaf_code) return "leaf";
  if (pc >= __start_branch_code && pc < __stop_branch_code) return "branch";
  if (pc >= __start_round_code && pc < __stop_round_code) return "round";
  return 0;
}

static void keep(const struct chain *seen) {
  for (int i = 0; i < chain_count; i++)
    if (chains[i].interrupted == seen->interrupted && chains[i].count == seen->count &&
        !memcmp(chains[i].callers, seen->callers, seen->count * sizeof(void *)))
      return (void)chains[i].times++;
  if (chain_count == kChains) too_many++;
  else chains[chain_count] = *seen, chains[chain_count++].times = 1;
}

static void handler(int number, siginfo_t *info, void *context) {
  void *pcs[kMost + 3];
  int count = backtrace(pcs, kMost + 3);  // this function, the signal's return, the interrupted pc, its callers
  Dl_info image;
  (void)number, (void)info;
  if (!in_round) return (void)elsewhere++;
  // The code that was interrupted lies in a file, whatever a recorder has made of it.
  if (!dladdr((void *)((ucontext_t *)context)->uc_mcontext.gregs[REG_RIP], &image)) return (void)outside++;
  taken++;
  struct chain seen = {count > 2 ? function_at(pcs[2]) : 0, count > 3 ? count - 3 : 0, 0, {0}};
  if (!seen.interrupted) seen.interrupted = "nothing known";
  memcpy(seen.callers, pcs + 3, seen.count * sizeof(void *));
  keep(&seen);
}

IN(leaf_code) int leaf(int x) {
  for (int i = 0; i < 40; i++) __asm__ volatile("" ::: "memory");  // about as long as the probes
  return x + 1;
}
IN(branch_code) int branch(int x) { return leaf(x) + leaf(x + 1); }
IN(round_code) long round_of_calls(void) {
  long wrong = 0;
  in_round = 1;
  for (int i = 0; i < 10000; i++) wrong += branch(i) != 2 * i + 3;
  in_round = 0;
  return wrong;
}

int main(int argc, char **argv) {
  long wanted = argc > 1 ? atol(argv[1]) : 1000, wrong = 0;
  void *first[2];
  backtrace(first, 2);  // loads the unwinder, not in a handler
  struct sigaction action;
  memset(&action, 0, sizeof action);
  action.sa_sigaction = handler;
  action.sa_flags = SA_SIGINFO | SA_RESTART;
  sigaction(SIGALRM, &action, 0);
  struct itimerval timer = {{0, 100}, {0, 100}};
  setitimer(ITIMER_REAL, &timer, 0);
  while (taken < wanted) wrong += round_of_calls();
  memset(&timer, 0, sizeof timer);
  setitimer(ITIMER_REAL, &timer, 0);
  printf("wrong results %ld\ntoo many chains %ld\noutside %ld\ntaken %ld\n", wrong, too_many, outside, taken);
  for (int i = 0; i < chain_count; i++) {
    printf("%ld times chain %s", chains[i].times, chains[i].interrupted);
    for (int k = 0; k < chains[i].count; k++) {
      Dl_info image;
      if (dladdr(chains[i].callers[k], &image))
        printf(" %s+%lx", image.dli_fname, (unsigned long)((char *)chains[i].callers[k] - (char *)image.dli_fbase));
      else
        printf(" nowhere");
    }
    printf("\n");
  }
  return 0;
}
