// Threads that run all the time through a thousand functions, and look at what each returns, until the file `stop` is there.
#include <pthread.h>
#include <unistd.h>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <utility>
std::atomic<bool> stop;
std::atomic<long> wrong, done;
template <int I>
__attribute__((noinline, noclone)) int step(int x) {
  asm volatile("" : "+r"(x));
  return x * 3 + I;
}
using Step = int (*)(int);
template <int... I>
constexpr void fill(Step* table, std::integer_sequence<int, I...>) {
  ((table[I] = step<I>), ...);
}
constexpr int kSteps = 1000;
Step table[kSteps];
void* work(void* seed) {
  unsigned state = (unsigned)(unsigned long)seed;
  for (long n = 0; !stop; n++) {
    state = state * 1664525 + 1013904223;
    int i = (state >> 8) % kSteps, x = state >> 20;
    if (table[i](x) != x * 3 + i) wrong++;
    if (n % 1000 == 0) done++;
  }
  return nullptr;
}
int main(int, char** argv) {
  int n = atoi(argv[1]);
  fill(table, std::make_integer_sequence<int, kSteps>());
  pthread_t threads[1000];
  for (int i = 0; i < n; i++) pthread_create(&threads[i], nullptr, work, (void*)(long)(i + 1));
  puts("runs"), fflush(stdout);
  while (access("stop", F_OK) != 0) usleep(10000);
  stop = true;
  for (int i = 0; i < n; i++) pthread_join(threads[i], nullptr);
  printf("%ld wrong\n", wrong.load());
}
