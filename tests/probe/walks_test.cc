// Real stacks of this program, walked in it the way a hit does and by the long way alone, from outside: every subset of six
// functions hooked, signal frames and alternate stacks, stacks cut at each frame, a thousand frames, and what hits recorded.
#include <doctest/doctest.h>

#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>

#include "core/walk/walker.h"
#include "host/image/maps.h"
#include "tests/probe/chains.h"
#include "tests/probe/own_tables.h"

using namespace sonde;
using namespace sonde::test;

namespace {

// What both ways may read. Code and return entries, by the kernel, so that any address will do; the stacks but for what
// is hidden of them.
AddrRange hidden;
bool read_own(Addr address, uint64_t* value) {
  if (hidden.overlaps({address, address + 8})) return false;
  iovec to{value, 8}, from{reinterpret_cast<void*>(address.value), 8};
  return process_vm_readv(getpid(), &to, 1, &from, 1, 0) == 8;
}

std::vector<AddrRange> stacks;
void note_stack(uint64_t sp) {
  auto maps = host::read_maps(getpid());
  REQUIRE(maps);
  for (auto& mapping : *maps)
    if (mapping.range.contains(Addr(sp))) stacks.push_back(mapping.range);
}

RawMemory raw_memory() {
  RawMemory memory;
  REQUIRE(stacks.size() <= RawMemory::kMaxStacks);
  for (const AddrRange& stack : stacks) memory.stacks[memory.stack_count++] = stack;
  memory.entries = {Addr(own_arena()->entries),
                    Addr(own_arena()->entries + uint64_t{kTrampolines} * kTrampolineStride)};
  memory.other = read_own;
  return memory;
}

AnyMemory any_memory() {
  return {nullptr, [](void*, Addr address, uint64_t* value) { return read_own(address, value); },
          [](void*, Addr sp, AddrRange* stack) {
            for (const AddrRange& range : stacks)
              if (range.contains(sp)) return *stack = range, true;
            return false;
          }};
}

struct Stack {
  std::vector<Frame> frames;
  WalkResult result;
};

template <class Memory>
Stack walk_by(Memory memory, RowCache* cache, const WalkStart<X86_64>& start, size_t room) {
  Stack stack;
  stack.frames.resize(room);
  stack.result = walk(own_arena(), cache, memory, start, std::span<Frame>(stack.frames));
  stack.frames.resize(stack.result.frames);
  return stack;
}

bool same(const Stack& a, const Stack& b) {
  return a.result.reason == b.result.reason &&
         std::ranges::equal(a.frames, b.frames, [](const Frame& x, const Frame& y) {
           return x.pc == y.pc && x.cfa == y.cfa && pack_frame(x) == pack_frame(y);
         });
}

WalkStart<X86_64> start_of(const ucontext_t& context) {
  constexpr int kInContext[X86_64::kRegs] = {REG_RAX, REG_RDX, REG_RCX, REG_RBX, REG_RSI, REG_RDI,
                                             REG_RBP, REG_RSP, REG_R8,  REG_R9,  REG_R10, REG_R11,
                                             REG_R12, REG_R13, REG_R14, REG_R15, REG_RIP};
  WalkStart<X86_64> start;
  for (unsigned reg = 0; reg < X86_64::kRegs; reg++)
    start.regs.set(reg, static_cast<uint64_t>(context.uc_mcontext.gregs[kInContext[reg]]));
  return start;
}

RowCache cache;
long walks, different, whole;
Stack truth;  // of the last walk
bool cut_each_frame;

void compare(const WalkStart<X86_64>& start, size_t room) {
  Stack by_rows = walk_by(any_memory(), nullptr, start, room);
  for (int i = 0; i < 2; i++) {  // the first time the cache may not know all
    Stack seen = walk_by(raw_memory(), &cache, start, room);
    if (!same(seen, by_rows)) different++;
    walks++;
  }
  whole += by_rows.result.whole();
  truth = std::move(by_rows);
}

__attribute__((noinline)) void look() {
  ucontext_t context;
  getcontext(&context);  // as it returns
  WalkStart<X86_64> start = start_of(context);
  compare(start, 2048);
  if (!cut_each_frame) return;
  const Stack all = truth;
  const std::vector<AddrRange> known = stacks;
  for (const Frame& frame : all.frames)
    for (int64_t more : {-16, -8, 0, 4, 8}) {
      if (!frame.cfa) continue;
      for (AddrRange& stack : stacks)
        if (stack.contains(frame.cfa)) hidden = {frame.cfa + more, stack.end}, stack.end = frame.cfa + more;
      compare(start, 2048);
      stacks = known, hidden = {};
    }
  for (size_t room = 1; room <= all.frames.size(); room++) compare(start, room);
  start.reliable_only = true, start.regs.valid &= ~(uint64_t{1} << X86_64::rbp), compare(start, 2048);
  truth = all;
}

void begin() {
  static int once = [] {
    hook_chain();
    int here;
    note_stack(reinterpret_cast<uint64_t>(&here));
    return 0;
  }();
  (void)once;
  at_the_leaf = look;
  walks = different = whole = 0, cut_each_frame = false;
}

void raise_on_leaf() { raise(SIGUSR1); }

}  // namespace

TEST_CASE("walks: every subset of six hooked functions, whole and cut at every frame, as by the long way") {
  begin();
  int results = 0;
  std::vector<uint64_t> unhooked;
  for (unsigned mask = 0; mask < 1u << kChain; mask++) {
    cut_each_frame = mask % 8 == 5 || mask == 63;
    enable_subset(mask);
    results += run_chain() == kChainResult;
    enable_subset(0);
    unsigned recovered = 0;
    std::vector<uint64_t> pcs;
    for (const Frame& frame : truth.frames)
      recovered += frame.recovered == kRecoveredReturn, pcs.push_back(frame.pc.value);
    CHECK(recovered == static_cast<unsigned>(__builtin_popcount(mask)));
    if (mask == 0) unhooked = pcs;
    CHECK((pcs == unhooked));
  }
  CHECK(results == 1 << kChain);
  CHECK(whole >= 1 << kChain);
  CHECK(walks > 1000);
  CHECK(different == 0);
  the_harness().drain();
}

TEST_CASE("walks: out of signal handlers, on the same stack and on another, as by the long way") {
  begin();
  at_the_leaf = raise_on_leaf;
  static char* other =
      static_cast<char*>(mmap(nullptr, 1 << 18, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  if (stacks.size() == 1)
    stacks.push_back({Addr(reinterpret_cast<uint64_t>(other)), Addr(reinterpret_cast<uint64_t>(other) + (1 << 18))});
  stack_t alternate{.ss_sp = other, .ss_flags = 0, .ss_size = 1 << 18};
  sigaltstack(&alternate, nullptr);
  for (int flags : {0, SA_ONSTACK}) {
    struct sigaction action{};
    action.sa_handler = [](int) { look(); };
    action.sa_flags = flags;
    sigaction(SIGUSR1, &action, nullptr);
    for (unsigned mask : {0u, 21u, 42u, 63u}) {
      cut_each_frame = mask == 42;
      enable_subset(mask);
      CHECK(run_chain() == kChainResult);
      enable_subset(0);
      CHECK(truth.result.whole());
      CHECK(std::ranges::count(truth.frames, Source::regs_pc, &Frame::source) == 2);
    }
  }
  alternate.ss_flags = SS_DISABLE;
  sigaltstack(&alternate, nullptr);
  CHECK(different == 0);
  the_harness().drain();
}

TEST_CASE("walks: a thousand hooked frames, as by the long way") {
  begin();
  for (unsigned hooked = 0; hooked < 2; hooked++) {
    enable_subset(hooked << kChain);
    CHECK(run_deep(1000) == 1000);
    enable_subset(0);
    CHECK(truth.frames.size() > 1000);
    CHECK(truth.result.whole());
    CHECK(std::ranges::count(truth.frames, uint8_t{kRecoveredReturn}, &Frame::recovered) == (hooked ? 1001 : 0));
  }
  CHECK(different == 0);
  the_harness().drain();
}

// The stack of a hit was taken before its own return was hooked; all else is as it is for the innermost function.
TEST_CASE("walks: what hits record is what the long way sees from the innermost function") {
  begin();
  Harness& harness = the_harness();
  const TableArena* before = harness.control()->tables;
  __atomic_store_n(&harness.control()->tables, own_arena(), __ATOMIC_RELEASE);
  for (unsigned i = 0; i <= kChain; i++) session_sites(harness.session())[hook_chain()[i]].flags |= kSiteStack;
  harness.drain();
  long wrong = 0, compared = 0;
  for (int round = 0; round < 2; round++)
    for (unsigned mask = 0; mask < 1u << kChain; mask++) {
      enable_subset(mask);
      CHECK(run_chain() == kChainResult);
      enable_subset(0);
      Records records = harness.drain();
      CHECK(records.stacks.size() == static_cast<size_t>(__builtin_popcount(mask)));
      for (const StackRecord& stack : records.stacks) {
        REQUIRE(stack.frames.size() < truth.frames.size());
        size_t skip = truth.frames.size() - stack.frames.size();
        Frame site = unpack_frame(stack.frames[0]);
        wrong += site.pc.value != harness.site_function(stack.site) || site.source != Source::regs_pc ||
                 site.is_return || site.reason != Reason::reliable;
        for (size_t i = 1; i < stack.frames.size(); i++) {
          Frame there = truth.frames[skip + i];
          if (i == 1) there.recovered = 0;
          wrong += stack.frames[i] != pack_frame(there);
        }
        compared++;
      }
    }
  CHECK(compared == 2 * kChain * (1 << kChain) / 2);
  CHECK(wrong == 0);

  enable_subset(1u << kChain);
  CHECK(run_deep(1000) == 1000);
  enable_subset(0);
  auto stacks_of_calls = harness.drain().stacks;
  REQUIRE(stacks_of_calls.size() == 1001);
  const size_t most = 128;  // as many as a record of a hit holds
  for (size_t call = 0; call < stacks_of_calls.size(); call++) {
    const std::vector<uint64_t>& frames = stacks_of_calls[call].frames;
    const size_t skip = 1 + (1000 - call);  // the innermost call's own frame is truth.frames[1]
    const bool cut = truth.frames.size() - skip > most;
    REQUIRE(frames.size() == (cut ? most : truth.frames.size() - skip));
    for (size_t i = 1; i < frames.size(); i++) {
      Frame there = truth.frames[skip + i];
      if (i == 1) there.recovered = 0;
      if (cut && i == most - 1) there.reason = Reason::buffer_full;
      wrong += frames[i] != pack_frame(there);
    }
  }
  CHECK(wrong == 0);
  for (unsigned i = 0; i <= kChain; i++)
    session_sites(harness.session())[hook_chain()[i]].flags &= ~uint32_t{kSiteStack};
  __atomic_store_n(&harness.control()->tables, before, __ATOMIC_RELEASE);
}
