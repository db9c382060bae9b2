#include "host/target/trap_cost.h"

#include <signal.h>

#include <algorithm>
#include <array>
#include <chrono>

namespace sonde::host {

double measure_trap_ns() {
  constexpr int kEach = 16;
  struct sigaction before, action{};
  action.sa_handler = [](int) {};
  sigset_t trap, mask;
  sigemptyset(&trap);
  sigaddset(&trap, SIGTRAP);
  sigaction(SIGTRAP, &action, &before);
  pthread_sigmask(SIG_UNBLOCK, &trap, &mask);
  std::array<double, 21> rounds;
  for (double& round : rounds) {
    auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < kEach; i++) asm volatile("int3" ::: "memory");
    round = std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - begin).count() / kEach;
  }
  pthread_sigmask(SIG_SETMASK, &mask, nullptr);
  sigaction(SIGTRAP, &before, nullptr);
  std::ranges::nth_element(rounds, rounds.begin() + rounds.size() / 2);
  return rounds[rounds.size() / 2];
}

}  // namespace sonde::host
