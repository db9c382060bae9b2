#include "tests/probe/chains.h"

namespace sonde::test {

void (*at_the_leaf)();

namespace {

// Not static, not clones: each has its own frame, and something to do after its call.
SONDE_HOOKABLE int sixth(int x) {
  at_the_leaf();
  return x * 16 + 1;
}
SONDE_HOOKABLE int fifth(int x) {
  volatile int local[9] = {x};
  return sixth(local[0]) + (2 << 4);
}
SONDE_HOOKABLE int fourth(int x) { return fifth(x) + (3 << 8); }
SONDE_HOOKABLE int third(int x) {
  volatile char room[200];
  room[x] = 1;
  return fourth(x) + (4 << 12) * room[x];
}
SONDE_HOOKABLE int second(int x) { return third(x) + (5 << 16); }
SONDE_HOOKABLE int first(int x) { return second(x) + (6 << 20); }

SONDE_HOOKABLE int deep(int left) {
  if (left == 0) return at_the_leaf(), 0;
  volatile int below = deep(left - 1);  // volatile: stays a recursion
  return below + 1;
}

uint32_t sites[kChain + 1];

}  // namespace

const uint32_t* hook_chain() {
  static bool done = [] {
    int (*functions[])(int) = {first, second, third, fourth, fifth, sixth, deep};
    for (unsigned i = 0; i <= kChain; i++) {
      sites[i] = the_harness().hook(reinterpret_cast<void*>(functions[i]));
      the_harness().enable(sites[i], false);
    }
    return true;
  }();
  (void)done;
  return sites;
}

void enable_subset(unsigned mask) {
  for (unsigned i = 0; i <= kChain; i++) the_harness().enable(hook_chain()[i], mask >> i & 1);
}

__attribute__((noinline)) int run_chain() { return first(0) + 0; }
__attribute__((noinline)) int run_deep(int depth) { return deep(depth) + 0; }

}  // namespace sonde::test
