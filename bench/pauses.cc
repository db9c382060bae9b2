// How long threads stand still while `sonde stack` looks at a process (host/target/stack_target.h): a process with threads that
// wait, each 60 frames deep, and some that compute; beside it what stopping all of them at once would be, as debuggers do: from
// before the first is stopped until the last stack is copied.
//
// usage: pauses_bench [THREADS [ROUNDS]]     (50, 20)
#include <fmt/format.h>
#include <pthread.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "host/target/stack_target.h"

using namespace sonde;

namespace {

constexpr int kDepth = 60, kBusy = 2;
volatile long sink;

__attribute__((noinline)) void deep(int n, bool busy) {
  volatile char room[200];
  room[0] = 1;
  if (n > 0) deep(n - 1, busy);
  else
    while (busy) sink = sink + 1;
  while (!busy) pause();
  room[1] = room[0];
}

void* thread(void* busy) {
  deep(kDepth, busy != nullptr);
  return nullptr;
}

[[noreturn]] void target(int threads, int ready) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  for (int i = 1; i < threads; i++) {
    pthread_t id;
    if (pthread_create(&id, nullptr, thread, i < kBusy ? &id : nullptr)) _exit(1);
  }
  if (write(ready, "r", 1) != 1) _exit(1);
  deep(kDepth, false);
  _exit(0);
}

double microseconds(std::chrono::nanoseconds time) { return static_cast<double>(time.count()) / 1000; }

}  // namespace

int main(int argc, char** argv) {
  int threads = argc > 1 ? std::atoi(argv[1]) : 50, rounds = argc > 2 ? std::atoi(argv[2]) : 20;
  int ready[2];
  if (threads < 1 || rounds < 1 || pipe(ready))
    return std::fprintf(stderr, "usage: pauses_bench [THREADS [ROUNDS]]\n"), 2;
  pid_t pid = fork();
  if (pid == 0) target(threads, ready[1]);
  char c;
  if (read(ready[0], &c, 1) != 1) return 1;
  usleep(200000);
  std::vector<double> all, longest, together;
  int status = 0;
  for (int i = 0; i <= rounds && status == 0; i++) {
    auto stacks = host::StackTarget::of_process(pid);
    if (!stacks || static_cast<int>(stacks->threads().size()) != threads) {
      std::fprintf(stderr, "pauses_bench: %s\n", stacks ? "not all threads were seen" : stacks.error().message.c_str());
      status = 1;
      break;
    }
    if (i == 0) continue;  // tables were made
    double sum = 0;
    for (std::chrono::nanoseconds pause : stacks->pauses()) all.push_back(microseconds(pause)), sum += all.back();
    longest.push_back(microseconds(stacks->pauses().back()));
    together.push_back(sum);
  }
  kill(pid, SIGKILL);
  waitpid(pid, nullptr, 0);
  if (status) return status;
  for (auto* v : {&all, &longest, &together}) std::ranges::sort(*v);
  auto middle = [](const std::vector<double>& v) { return v[v.size() / 2]; };
  fmt::print(
      "sonde stack, {} threads, {} of them computing, {} times: a thread stands still for {:.1f} us (median), {:.1f} "
      "us (99 of 100);\n"
      "the longest pause of a process's threads: {:.1f} us (median), {:.1f} us (worst); all of them together {:.0f} "
      "us\n",
      threads, std::min(threads, kBusy) - (threads > 1 ? 1 : 0), rounds, middle(all), all[all.size() * 99 / 100],
      middle(longest), longest.back(), middle(together));
  return 0;
}
