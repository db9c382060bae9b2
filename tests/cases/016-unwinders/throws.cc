#include "throws.h"
#define NI extern "C" __attribute__((noinline, visibility("default")))
static int destroyed;
static volatile int after;
struct Guard { ~Guard() { destroyed++; } };
NI int throws(int n) { Guard g; if (n % 2) throw n; after = after + 1; return n; }
NI int passes(int n, int depth) { Guard g; int r = depth ? passes(n, depth - 1) : throws(n); after = after + 1; return r; }
NI int catches(int n) { try { return passes(n, 2); } catch (int x) { return -x; } }
int run_throws(int rounds) {
  destroyed = 0;
  for (int i = 0; i < rounds; i++)
    if (catches(i) != (i % 2 ? -i : i)) return -1;
  return destroyed;
}
