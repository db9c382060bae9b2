// Case 050's program with handlers for SIGUSR1 and, on a stack of its own, SIGUSR2. Whoever steps it sends them.
#include <signal.h>
#include <time.h>
static void handler(int number);
#define main main_of_case_050
#include "../cases/050-step-every-instruction/target.c"
#undef main
static volatile int handled;
NI static int count(int n) { handled += n; return handled; }
static void handler(int number) { s += count(number != SIGUSR1); }
int main(void) {
  static char stack[1 << 16];
  stack_t alternate = {.ss_sp = stack, .ss_size = sizeof stack};
  struct sigaction action = {.sa_handler = handler};
  sigaltstack(&alternate, 0);
  sigaction(SIGUSR1, &action, 0);
  action.sa_flags = SA_ONSTACK;
  sigaction(SIGUSR2, &action, 0);
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);  // the vDSO
  return main_of_case_050();
}
