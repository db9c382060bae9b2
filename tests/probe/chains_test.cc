// S5, S6, S8: with any subset of six nested functions hooked, and a thousand deep, each of the usual in-process unwinders
// sees the chain that it sees of the same calls unhooked, return trampolines aside. The truth is the unhooked run.
#define UNW_LOCAL_ONLY
#include <doctest/doctest.h>

#include <execinfo.h>
#include <libunwind.h>
#include <unwind.h>

#include "tests/probe/chains.h"

using namespace sonde;
using namespace sonde::test;

namespace {

using Chain = std::vector<uint64_t>;
constexpr unsigned kMost = 4096;

Chain seen;
unsigned trampolines_seen;

void keep(uint64_t pc) {
  if (the_harness().is_trampoline(pc)) trampolines_seen++;
  else seen.push_back(pc);
}

__attribute__((noinline)) void by_backtrace() {
  static void* pcs[kMost];
  int count = backtrace(pcs, kMost);
  for (int i = 1; i < count; i++) keep(reinterpret_cast<uint64_t>(pcs[i]));
}

__attribute__((noinline)) void by_unwind_backtrace() {
  _Unwind_Backtrace(
      [](_Unwind_Context* context, void*) {
        keep(_Unwind_GetIP(context));
        return seen.size() < kMost ? _URC_NO_REASON : _URC_END_OF_STACK;
      },
      nullptr);
  seen.erase(seen.begin());
}

__attribute__((noinline)) void by_gnu_libunwind() {
  unw_context_t context;
  unw_getcontext(&context);
  unw_cursor_t cursor;
  unw_init_local(&cursor, &context);
  while (unw_step(&cursor) > 0 && seen.size() < kMost) {
    unw_word_t pc;
    unw_get_reg(&cursor, UNW_REG_IP, &pc);
    keep(pc);
  }
}

struct Walker {
  const char* name;
  void (*walk)();
};
constexpr Walker kWalkers[] = {
    {"backtrace", by_backtrace}, {"_Unwind_Backtrace", by_unwind_backtrace}, {"unw_step", by_gnu_libunwind}};

template <class Run>
Chain chain_of(void (*walk)(), Run run) {
  seen.clear();
  trampolines_seen = 0;
  at_the_leaf = walk;
  run();
  return seen;
}

}  // namespace

TEST_CASE("every subset of six hooked functions: every unwinder sees the unhooked chain") {
  hook_chain();
  for (const Walker& walker : kWalkers) {
    CAPTURE(walker.name);
    Chain truth;
    int wrong = 0, results = 0;
    // In one loop, so that the frames above are the same for all; the first round is the unhooked one.
    for (unsigned mask = 0; mask < 1u << kChain; mask++) {
      enable_subset(mask);
      Chain chain = chain_of(walker.walk, [&] { results += run_chain() == kChainResult; });
      enable_subset(0);
      if (mask == 0) truth = chain;
      wrong += chain != truth || trampolines_seen != static_cast<unsigned>(__builtin_popcount(mask));
    }
    CHECK(truth.size() > kChain + 4);
    CHECK(wrong == 0);
    CHECK(results == 1 << kChain);
  }
  CHECK(the_harness().drain().calls.size() == std::size(kWalkers) * kChain * (1 << kChain) / 2);
}

TEST_CASE("a thousand hooked activations of one function: every unwinder sees the unhooked chain") {
  constexpr int kDepth = 1000;
  hook_chain();
  for (const Walker& walker : kWalkers) {
    CAPTURE(walker.name);
    Chain chains[2];
    for (unsigned hooked = 0; hooked < 2; hooked++) {
      enable_subset(hooked << kChain);
      chains[hooked] = chain_of(walker.walk, [&] { CHECK(run_deep(kDepth) == kDepth); });
      enable_subset(0);
      CHECK(trampolines_seen == hooked * (kDepth + 1));
    }
    CHECK(chains[0].size() > kDepth);
    CHECK((chains[0] == chains[1]));
  }
  the_harness().drain();
}
