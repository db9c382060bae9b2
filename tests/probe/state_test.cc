// S15: every register, flag, vector and x87 state is the same across a hooked entry and a hooked return.
// Random states are loaded, the hooked function (state.S) stores what it gets and leaves with another random state.
#include <doctest/doctest.h>

#include <cpuid.h>
#include <sys/mman.h>

#include <cstdlib>
#include <cstring>

#include "tests/probe/programs.h"

using namespace sonde;
using namespace sonde::test;

namespace {

struct State {
  uint64_t general[15];  // rax rbx rcx rdx rsi rdi rbp r8-r15
  uint64_t flags;
  uint64_t padding[8];
  unsigned char xsave[4096];
};

}  // namespace

extern "C" {
extern State state_before, state_at_entry, state_at_exit, state_after;
extern uint64_t red_zone_before[16], red_zone_at_entry[16];
extern uint64_t state_sp_shift, state_mask, state_sp_before, state_sp_at_entry, state_sp_after;
void state_hooked();
void state_round();
}

namespace {

uint64_t seed = 88172645463325252u;
uint64_t random_word() {
  seed ^= seed << 13, seed ^= seed >> 7, seed ^= seed << 17;
  return seed;
}

constexpr uint64_t kFlags = 0x1 | 0x4 | 0x10 | 0x40 | 0x80 | 0x400 | 0x800 | 0x200000;  // CF PF AF ZF SF DF OF ID

struct Part {
  unsigned offset, size;
};
Part parts[16];
unsigned part_count;

// x87, SSE, AVX, and the three AVX-512 components, as far as the machine has them enabled.
void find_parts() {
  unsigned low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  state_mask = low & 0xe7;
  // Without the instruction and data pointers, which processors no longer keep; without MXCSR_MASK.
  parts[part_count++] = {0, 5};       // FCW FSW FTW
  parts[part_count++] = {24, 4};      // MXCSR
  for (unsigned i = 0; i < 8; i++) parts[part_count++] = {32 + 16 * i, 10};  // ST0-7
  parts[part_count++] = {160, 256};   // XMM
  for (unsigned component = 2; component < 8; component++) {
    if (!(state_mask >> component & 1)) continue;
    unsigned a, b, c, d;
    __cpuid_count(0xd, component, a, b, c, d);
    parts[part_count++] = {b, a};
  }
}

void put16(unsigned char* at, uint64_t value) { at[0] = value & 255, at[1] = value >> 8 & 255; }

void randomize(State* state) {
  for (uint64_t& word : state->general) word = random_word();
  state->flags = (random_word() & kFlags) | 0x202;
  for (unsigned i = 0; i < part_count; i++)
    for (unsigned at = 0; at < parts[i].size; at += 2) put16(state->xsave + parts[i].offset + at, random_word() >> 24);
  uint64_t control = random_word();
  put16(state->xsave, 0x7f | (control & 0xc00) | 0x300);      // all masked; any rounding
  put16(state->xsave + 2, control >> 16 & 0x7f7f);             // any top, condition and exception flags; no summary
  state->xsave[4] = control >> 40 & 255;                       // any register empty
  state->xsave[5] = 0;
  put16(state->xsave + 24, 0x1f80 | (control >> 48 & 0xe07f)); // all masked; any rounding, FTZ, DAZ and flags
  put16(state->xsave + 26, 0);
  put16(state->xsave + 512, state_mask);                       // XSTATE_BV: nothing in its initial state
}

bool equal(const State& a, const State& b) {
  if (std::memcmp(a.general, b.general, sizeof a.general) || ((a.flags ^ b.flags) & kFlags)) return false;
  for (unsigned i = 0; i < part_count; i++)
    if (std::memcmp(a.xsave + parts[i].offset, b.xsave + parts[i].offset, parts[i].size)) return false;
  return true;
}

}  // namespace

TEST_CASE("random register, flag, vector, x87 and MXCSR states survive a hooked entry and return") {
  Harness& harness = the_harness();
  harness.drain();
  find_parts();
  static uint32_t site = harness.hook(reinterpret_cast<void*>(state_hooked));
  const char* wanted = std::getenv("SONDE_STATES");
  long rounds = wanted ? std::atol(wanted) : 1000000;
  long bad_entry = 0, bad_exit = 0, bad_red_zone = 0, bad_sp = 0;
  uint64_t calls = 0;
  for (long round = 0; round < rounds; round++) {
    randomize(&state_before);
    randomize(&state_at_exit);
    for (uint64_t& word : red_zone_before) word = random_word();
    state_sp_shift = random_word() % 64;  // not aligned, not even to words
    state_round();
    bad_entry += !equal(state_before, state_at_entry);
    bad_exit += !equal(state_at_exit, state_after);
    bad_red_zone += std::memcmp(red_zone_before, red_zone_at_entry, sizeof red_zone_before) != 0;
    bad_sp += state_sp_before != state_sp_after || state_sp_at_entry + 8 != state_sp_before;
    if (round % 100000 == 99999) calls += harness.drain().calls.size();
  }
  calls += harness.drain().calls.size();
  asm volatile("emms");
  CHECK(bad_entry == 0);
  CHECK(bad_exit == 0);
  CHECK(bad_red_zone == 0);
  CHECK(bad_sp == 0);
  CHECK(calls == static_cast<uint64_t>(rounds));
  harness.enable(site, false);
}
