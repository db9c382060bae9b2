// Handlers at hits (core/probe/hit_handler.h): the stacks that are taken in them, from the registers they are given and from where
// they stand, against the same calls unhooked as glibc's backtrace() sees them; what becomes of registers; nesting.
#include <doctest/doctest.h>

#include <execinfo.h>
#include <pthread.h>
#include <setjmp.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/probe/hit_handler.h"
#include "tests/probe/chains.h"
#include "tests/probe/own_tables.h"

using namespace sonde;
using namespace sonde::test;

namespace {

using Pcs = std::vector<uint64_t>;

template <class Function>
Function* agent_function(const char* name) {
  uint64_t at = the_harness().agent_symbol(name);
  REQUIRE(at);
  return reinterpret_cast<Function*>(at);
}

HitHandlers& handlers() {
  static auto* all = reinterpret_cast<HitHandlers*>(the_harness().agent_symbol("sonde_hit_handlers"));
  return *all;
}

// Sets the handlers, and tables to walk by, as long as it lives.
class Handlers {
 public:
  Handlers(HitHandler entry, HitHandler exit) : tables_(the_harness().control()->tables) {
    __atomic_store_n(&the_harness().control()->tables, own_arena(), __ATOMIC_RELEASE);
    handlers() = {entry, exit, 0};
  }
  ~Handlers() {
    handlers() = {};
    __atomic_store_n(&the_harness().control()->tables, tables_, __ATOMIC_RELEASE);
    the_harness().drain();
  }

 private:
  const TableArena* tables_;
};

void with_handlers(unsigned mask) {
  enable_subset(mask);
  for (unsigned i = 0; i <= kChain; i++) {
    uint32_t& flags = session_sites(the_harness().session())[hook_chain()[i]].flags;
    flags = (flags & ~uint32_t{kSiteHandler}) | (mask >> i & 1 ? uint32_t{kSiteHandler} : 0);
  }
}

__attribute__((noinline)) std::vector<Frame> stack_here() {
  static auto* here = agent_function<uint32_t(Frame*, uint32_t)>("sonde_stack_here");
  std::vector<Frame> frames(256);
  frames.resize(here(frames.data(), 256));
  return frames;
}

std::vector<Frame> stack_of(const SiteRegs& regs, bool pc_is_return) {
  static auto* of = agent_function<uint32_t(const SiteRegs*, bool, Frame*, uint32_t)>("sonde_stack_of");
  std::vector<Frame> frames(256);
  frames.resize(of(&regs, pc_is_return, frames.data(), 256));
  return frames;
}

// Without return trampolines, which stand before the real addresses in it.
__attribute__((noinline)) Pcs glibc_stack() {
  void* addresses[256];
  int count = backtrace(addresses, 256);
  Pcs pcs;
  for (int i = 0; i < count; i++) pcs.push_back(reinterpret_cast<uint64_t>(addresses[i]));
  std::erase_if(pcs, [](uint64_t pc) { return the_harness().is_trampoline(pc); });
  return pcs;
}

bool all_reliable(const std::vector<Frame>& frames) {
  return !frames.empty() && frames.back().reason == Reason::end &&
         std::ranges::all_of(frames, [](const Frame& frame) { return is_reliable(frame); });
}

Pcs pcs_of(const std::vector<Frame>& frames) {
  Pcs pcs;
  for (const Frame& frame : frames) pcs.push_back(frame.pc.value);
  return pcs;
}

bool ends_with(const Pcs& stack, const Pcs& end) {
  return stack.size() >= end.size() && std::equal(end.begin(), end.end(), stack.end() - static_cast<long>(end.size()));
}

// The chain's stack while nothing is hooked, from the caller of the innermost function outwards, and what the handlers saw.
Pcs unhooked;
struct Seen {
  long entries = 0, exits = 0, unreliable = 0, wrong = 0, engine_frames_wrong = 0, glibc_wrong = 0, unwound = 0;
} seen;

// What stands above the function of chain site i in the unhooked program: its caller's frame and so on.
Pcs above(uint32_t site) {
  const uint32_t* sites = hook_chain();
  auto i = static_cast<unsigned>(std::find(sites, sites + kChain, site) - sites);
  return {unhooked.begin() + static_cast<long>(kChain - 1 - i), unhooked.end()};
}

uint64_t size_of_return_code() {  // sonde_return_common and sonde_return_handled
  return the_harness().agent_symbol("sonde_landing_pad") - the_harness().agent_symbol("sonde_return_common");
}

void at_exit(const Hit* hit) {
  seen.exits++;
  const Pcs expected = above(hit->site);
  const auto by_regs = stack_of(hit->regs, true), here = stack_here();
  seen.unreliable += !all_reliable(by_regs) + !all_reliable(here);
  // From the registers: the real return address first, then the unhooked program's chain (S1, S16).
  seen.wrong += pcs_of(by_regs) != expected || hit->regs.pc != hit->return_address;
  // From here: this function, engine frames, the trampoline's code once, the real caller (S2).
  const Pcs all = pcs_of(here);
  seen.wrong += !ends_with(all, expected);
  const uint64_t code = the_harness().agent_symbol("sonde_return_common");
  seen.engine_frames_wrong +=
      std::ranges::count_if(all, [&](uint64_t pc) { return pc - code < size_of_return_code(); }) != 1;
  // Without registers, and without the engine's frames and this one's: the same again (S4).
  Pcs program;
  for (uint64_t pc : all)
    if (!the_harness().is_agent(pc)) program.push_back(pc);
  seen.engine_frames_wrong += program.size() != expected.size() + 2;  // stack_here() and at_exit() are the test's own
  // Others that stand here see it as well.
  seen.glibc_wrong += !ends_with(glibc_stack(), expected);
}

void at_entry(const Hit* hit) {
  seen.entries++;
  const Pcs expected = above(hit->site);
  const auto by_regs = stack_of(hit->regs, false), here = stack_here();
  seen.unreliable += !all_reliable(by_regs) + !all_reliable(here);
  Pcs from_site = expected;
  from_site.insert(from_site.begin(), the_harness().site_function(hit->site));
  seen.wrong += pcs_of(by_regs) != from_site || hit->return_address != expected[0];
  // The probed function appears between the engine's frames and its caller, which is not lost (S38, S39).
  seen.wrong += !ends_with(pcs_of(here), from_site);
  seen.glibc_wrong += !ends_with(glibc_stack(), expected);
}

void note_unhooked() { unhooked = glibc_stack(); }

// One call site for all, so that frames above the chain are the same.
__attribute__((noinline)) int run_with(unsigned mask) {
  with_handlers(mask);
  int result = run_chain();
  asm volatile("");
  return result;
}

void look_nowhere() {}

}  // namespace

TEST_CASE("handlers: stacks taken in them are the unhooked program's (S1, S2, S4, S16, S38, S39)") {
  Handlers set(at_entry, at_exit);
  hook_chain();
  long activations = 0;
  for (unsigned round = 0; round < 2; round++)
    for (unsigned mask = 0; mask < 1u << kChain; mask++) {
      at_the_leaf = mask ? look_nowhere : note_unhooked;
      int result = run_with(mask);  // NOLINT: the call site of all
      REQUIRE(result == kChainResult);
      if (!mask)
        unhooked.erase(unhooked.begin(), unhooked.begin() + 3);  // glibc_stack, note_unhooked, the innermost function
      activations += __builtin_popcount(mask);
    }
  with_handlers(0);
  CHECK(seen.entries == activations);
  CHECK(seen.exits == activations);
  CHECK(seen.unreliable == 0);
  CHECK(seen.wrong == 0);
  CHECK(seen.engine_frames_wrong == 0);
  CHECK(seen.glibc_wrong == 0);
  CHECK(handlers().missed == 0);
}

namespace {

// Per thread, where chain functions' slots are and what they held before their hooks.
struct Slots {
  const uint64_t* slot[kChain];
  uint64_t real[kChain];
};
thread_local Slots slots;

void note_slot(const Hit* hit) {
  const uint32_t* sites = hook_chain();
  auto i = std::find(sites, sites + kChain, hit->site) - sites;
  slots.slot[i] = reinterpret_cast<const uint64_t*>(hit->regs.sp);
  slots.real[i] = *slots.slot[i];
}

bool slots_are_kept(const Slots& of) {
  static auto* real_address = agent_function<uint64_t(const uint64_t*)>("sonde_return_address");
  for (unsigned i = 0; i < kChain; i++)
    if (!the_harness().is_trampoline(*of.slot[i]) || real_address(of.slot[i]) != of.real[i]) return false;
  return true;
}

// The innermost function of one thread waits until the other's has looked.
pthread_barrier_t both_inside, both_seen;
Slots* other_slots[2];
bool kept_own[2], kept_other[2], same_lines;
thread_local int number;

void look_at_slots() {
  other_slots[number] = &slots;
  pthread_barrier_wait(&both_inside);
  kept_own[number] = slots_are_kept(slots);
  kept_other[number] = slots_are_kept(*other_slots[!number]);
  for (const uint64_t* mine : slots.slot)
    for (const uint64_t* other : other_slots[!number]->slot) same_lines |= *mine / 128 == *other / 128;
  pthread_barrier_wait(&both_seen);
}

void* second_thread(void*) {
  number = 1;
  at_the_leaf = look_at_slots;
  return reinterpret_cast<void*>(static_cast<intptr_t>(run_chain()));
}

}  // namespace

TEST_CASE("handlers: while calls are hooked their real return addresses are kept aside, each thread's own (S7)") {
  Handlers set(note_slot, nullptr);
  with_handlers((1u << kChain) - 1);
  at_the_leaf = look_at_slots;
  pthread_barrier_init(&both_inside, nullptr, 2);
  pthread_barrier_init(&both_seen, nullptr, 2);
  pthread_t thread;
  REQUIRE(pthread_create(&thread, nullptr, second_thread, nullptr) == 0);
  CHECK(run_chain() == kChainResult);
  void* result;
  pthread_join(thread, &result);
  CHECK(reinterpret_cast<intptr_t>(result) == kChainResult);
  with_handlers(0);
  for (int i : {0, 1}) CHECK((kept_own[i] && kept_other[i]));
  CHECK(!same_lines);  // of their entries: threads that write to one line wait for each other
  static auto* real_address = agent_function<uint64_t(const uint64_t*)>("sonde_return_address");
  uint64_t plain = 4711, copied = the_harness().agent_symbol("sonde_trampolines");
  CHECK(real_address(&plain) == 4711);
  CHECK(real_address(&copied) == 0);  // a trampoline's address as data is no hooked slot (S18)
}

namespace {

SONDE_HOOKABLE double sum(double a, double b, double c, double d, double e, double f, double g, double h,
                          long double x) {
  return a + 2 * b + 4 * c + 8 * d + 16 * e + 32 * f + 64 * g + 128 * h + static_cast<double>(x);
}

int spoiled;
void spoils_registers(const Hit*) {
  spoiled++;
  unsigned mode = 0x3f80 | 0x6000, control = 0;  // rounds toward zero
  asm volatile(
      "pcmpeqd %%xmm0, %%xmm0\n\tpcmpeqd %%xmm1, %%xmm1\n\tpcmpeqd %%xmm2, %%xmm2\n\tpcmpeqd %%xmm3, %%xmm3\n\t"
      "pcmpeqd %%xmm4, %%xmm4\n\tpcmpeqd %%xmm5, %%xmm5\n\tpcmpeqd %%xmm6, %%xmm6\n\tpcmpeqd %%xmm7, %%xmm7\n\t"
      "fninit\n\tfldz\n\tfld1\n\tldmxcsr %0\n\tfldcw %1\n\tor $-1, %%rax\n\tor $-1, %%rcx\n\tor $-1, %%rdx" ::"m"(mode),
      "m"(control)
      : "rax", "rcx", "rdx", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "cc");
}

}  // namespace

TEST_CASE("handlers: whatever a handler does to vector, x87 and control registers is undone") {
  Handlers set(spoils_registers, spoils_registers);
  static uint32_t site = the_harness().hook(reinterpret_cast<void*>(sum), kSiteHijack | kSiteHandler);
  volatile double one = 1;
  for (int i = 0; i < 3; i++) CHECK(sum(one, 1, 1, 1, 1, 1, 1, 1, 0.5L) == 255.5);
  unsigned mode;
  asm volatile("stmxcsr %0" : "=m"(mode));
  CHECK((mode & 0x6000) == 0);
  CHECK(spoiled == 6);
  the_harness().enable(site, false);
}

namespace {

SONDE_HOOKABLE int nested(int x) { return x + 1; }
int (*volatile call_nested)(int) = nested;
unsigned deepest;
long hits_at[kMaxContextLevels + 1];
bool regs_kept;
jmp_buf out;

void calls_its_function(const Hit* hit) {
  const Hit before = *hit;
  hits_at[hit->level]++;
  deepest = std::max(deepest, hit->level);
  regs_kept &= call_nested(40) == 41;
  regs_kept &= hit->regs.sp == before.regs.sp && hit->regs.rbx == before.regs.rbx &&
               hit->return_address == before.return_address;
}
void jumps_out(const Hit*) { longjmp(out, 1); }
long counted;
void counts(const Hit* hit) { counted += hit->level == 0; }

}  // namespace

TEST_CASE("handlers: they nest four deep, the fifth hit is counted as lost (S51, S52)") {
  static uint32_t site = the_harness().hook(reinterpret_cast<void*>(nested), kSiteHijack | kSiteHandler);
  Handlers set(calls_its_function, nullptr);
  uint64_t lost = the_harness().lost(LossCause::nesting);
  deepest = 0, regs_kept = true;
  CHECK(call_nested(1) == 2);
  CHECK(regs_kept);
  CHECK(deepest == kMaxContextLevels - 1);
  for (unsigned level = 0; level < kMaxContextLevels; level++) CHECK(hits_at[level] == 1);
  CHECK(the_harness().lost(LossCause::nesting) == lost + 1);
  CHECK(the_harness().drain().calls.size() == kMaxContextLevels);
  the_harness().enable(site, false);
}

namespace {
SONDE_HOOKABLE int left(int x) { return x + 2; }
int (*volatile call_left)(int) = left;
}  // namespace

TEST_CASE("handlers: a longjmp out of one leaves the levels usable (S53)") {
  static uint32_t site = the_harness().hook(reinterpret_cast<void*>(left), kSiteHijack | kSiteHandler);
  for (int i = 0; i < 100; i++) {
    HitHandler entry = i % 2 ? jumps_out : nullptr, exit = i % 2 ? nullptr : jumps_out;
    Handlers set(entry, exit);
    if (!setjmp(out)) CHECK(call_left(1) == -1);  // not reached
  }
  counted = 0;
  {
    Handlers set(counts, counts);
    for (int i = 0; i < 10; i++) CHECK(call_left(1) == 3);
    CHECK(counted == 20);
    CHECK(handlers().missed == 0);
  }
  the_harness().enable(site, false);
}

namespace {

SONDE_HOOKABLE int throws(int x) {
  if (x) throw std::runtime_error("x");
  return 1;
}
int (*volatile call_throws)(int) = throws;
long unwound, unwound_wrong;
Pcs at_call;
void notes_unwinding(const Hit* hit) {
  unwound += hit->kind == ExitKind::unwound;
  auto stack = stack_of(hit->regs, true);
  // The landing is in the frame of the caller: its callers are the same, its own pc that of the call.
  unwound_wrong += !all_reliable(stack) || pcs_of(stack) != at_call || hit->regs.pc != hit->return_address;
}
void notes_call(const Hit* hit) { at_call = pcs_of(stack_of(hit->regs, false)), at_call.erase(at_call.begin()); }

}  // namespace

TEST_CASE("handlers: an exit by an exception is told as such, with the caller's registers") {
  static uint32_t site = the_harness().hook(reinterpret_cast<void*>(throws), kSiteHijack | kSiteHandler);
  Handlers set(notes_call, notes_unwinding);
  int caught = 0;
  for (int i = 0; i < 10; i++) try {
      call_throws(1);
    } catch (const std::runtime_error&) {
      caught++;
    }
  CHECK(caught == 10);
  CHECK(unwound == 10);
  CHECK(unwound_wrong == 0);
  the_harness().enable(site, false);
}
