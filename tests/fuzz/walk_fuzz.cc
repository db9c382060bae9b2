// Any bytes as stacks and the registers above them, walked through tables of every kind of row and special code: the walk ends,
// reads nothing outside of the stack (the sanitizer sees that), says the same with a cache as without, and what it calls reliable
// goes upwards. Words of the input are steered to addresses that lead on; see Input::word.
#define DOCTEST_CONFIG_DISABLE
#include <cstdio>
#include <cstdlib>
#include <memory>

#include "core/walk/walker.h"
#include "core/walk/world_test.h"

namespace {

using namespace sonde;
using test::World;

void require(bool condition, int line = __builtin_LINE()) {
  if (condition) return;
  std::fprintf(stderr, "walk_fuzz.cc:%d does not hold\n", line);
  std::abort();
}

constexpr uint64_t kText = 0x400000, kStep = 0x100, kDetour = 0x50000000;
constexpr unsigned kFunctions = 16;

template <class Isa>
struct Code : World<Isa> {
  using W = World<Isa>;
  uint64_t function(unsigned i) const { return kText + 0x1000 + i % kFunctions * kStep; }

  Code() {
    this->rows[kText] = W::gap();
    for (unsigned i = 0; i < kFunctions; i++) {
      this->rows[function(i)] = W::gap();
      for (uint64_t at = 0; at < kStep; at += 8) this->nops(function(i) + at, 8);
      this->call_site(function(i) + 0x20), this->call_site(function(i) + kStep);
    }
    this->nops(kText + 0x1000 + kFunctions * kStep, 32);
    auto row = [&](unsigned i) -> Row& { return this->rows[function(i)]; };
    row(0) = W::row(Isa::kSp, 16), row(1) = W::row(Isa::kSp, 32, true), row(2) = W::row(Isa::kFp, 16, true);
    row(3) = W::row(Isa::kSaved[1], 16, true), row(4) = W::outermost(), row(5) = W::row(Isa::kSp, 0);
    row(6) = W::row(Isa::kSp, 24), row(6).flags = kRowRefuted;
    row(7) = W::row(Isa::kSp, 16), row(7).cfa_offset = -64;
    row(8) = W::row(Isa::kSp, 16, true), row(8).saved[0] = {0, ValueKind::at_expression};
    row(8).saved[1] = {-24, ValueKind::at_cfa};
    this->expressions = {{0x76, 0x00}, {0x77, 0x08, 0x06, 0x23, 0x08}};  // fp + 0; *(sp + 8) + 8
    row(9) = Row{.cfa_offset = 1, .cfa_reg = Isa::kSp, .ra_kind = ValueKind::at_cfa, .ra_offset = -8};
    row(9).cfa_kind = CfaKind::expression;
    row(10) = W::row(Isa::kSp, 8), row(10).flags = kRowSignalFrame;
    this->bytes(function(11), W::kX86 ? std::vector<uint8_t>{0x48, 0xc7, 0xc0, 0x0f, 0, 0, 0, 0x0f, 0x05}
                                      : std::vector<uint8_t>{0x68, 0x11, 0x80, 0xd2, 0x01, 0, 0, 0xd4});
    row(15) = Row{.cfa_reg = Isa::kSp, .ra_kind = ValueKind::same};
    auto special = [&](unsigned i, SpecialKind kind) {
      this->specials.push_back({function(i), function(i) + kStep, static_cast<uint32_t>(kind), 0});
    };
    special(11, SpecialKind::signal_return), special(12, SpecialKind::bare_frame),
        special(13, SpecialKind::clone_return);
    special(14, SpecialKind::plt);
    this->steps = {{0, -1, 0, 0}, {5, -1, 128, 0}, {24, 0, 0, 0}};
    this->detours = {{kDetour, kDetour + 60, function(0), 5, 0, 3, 0}};
    for (unsigned i = 0; i < 8; i++) this->entry(i, function(i) + 0x20, 0);
  }
};

template <class Isa>
struct Fixed {
  Code<Isa> code;
  const TableArena* arena = code.arena();
  std::unique_ptr<RowCache> cache = std::make_unique<RowCache>();
};
template <class Isa>
Fixed<Isa>& fixed() {
  static auto* it = new Fixed<Isa>;
  return *it;
}

struct Input {
  const uint8_t* data;
  size_t size;
  uint8_t byte() { return size ? size--, *data++ : 0; }
  uint64_t raw() {
    uint64_t value = 0;
    for (int i = 0; i < 8; i++) value = value << 8 | byte();
    return value;
  }
  template <class Isa>
  uint64_t word(const Code<Isa>& code, uint64_t stack, size_t bytes) {
    uint8_t kind = byte();
    switch (kind % 8) {
      case 0: return raw();
      case 1:
      case 2: return code.function(kind / 8) + 0x20;
      case 3: return code.function(kind / 8) + byte();
      case 4: return stack + byte() * 8ull % bytes;
      case 5: return stack + raw() % (bytes + 64) - 32;
      case 6: return code.trampoline(kind / 8 % 9) - (kind & 64 ? 0 : kTrampolineCall) + (kind & 128 ? byte() : 0);
      default: return kind / 8 % 2 ? kDetour + byte() : byte();
    }
  }
};

// The slots that entries name are part of the input, too.
uint64_t g_stack;
size_t g_keys;
template <class Isa>
bool read_other(Addr at, uint64_t* value) {
  const Code<Isa>& code = fixed<Isa>().code;
  uint64_t entry = at.value - code.kEntries;
  if (entry < 8 * kTrampolineStride && entry % kTrampolineStride == 8)
    return *value = g_stack + (g_keys >> entry / kTrampolineStride) % 32 * 8, true;
  *value = 0;
  for (uint64_t i = 8; i-- > 0;) {
    auto found = code.memory.find(at.value + i);
    if (found == code.memory.end()) return false;
    *value = *value << 8 | found->second;
  }
  return true;
}

template <class Isa>
void walk_any(Input& in) {
  Fixed<Isa>& all = fixed<Isa>();
  size_t words = 8 + in.byte() % 64;
  g_keys = static_cast<size_t>(in.raw());
  std::unique_ptr<uint64_t[]> stack(new uint64_t[words]);
  g_stack = reinterpret_cast<uint64_t>(stack.get());
  WalkStart<Isa> start;
  for (unsigned r = 0; r < Isa::kRegs; r++) start.regs.set(r, in.word(all.code, g_stack, words * 8));
  start.regs.set(Isa::kSp, g_stack + in.byte() % words * 8);
  start.pc_is_return = in.byte() & 1;
  for (size_t i = 0; i < words; i++) stack[i] = in.word(all.code, g_stack, words * 8);
  RawMemory memory;
  memory.stacks[0] = {Addr(g_stack), Addr(g_stack + words * 8)}, memory.stack_count = 1;
  memory.other = read_other<Isa>;
  Frame cold[64], warm[64], strict[64];
  WalkResult without = walk(all.arena, nullptr, memory, start, std::span<Frame>(cold));
  WalkResult with = walk(all.arena, all.cache.get(), memory, start, std::span<Frame>(warm));
  start.reliable_only = true;
  WalkResult reliable = walk(all.arena, all.cache.get(), memory, start, std::span<Frame>(strict));
  require(without.frames <= 64 && with.frames == without.frames && with.reason == without.reason);
  for (unsigned i = 0; i < with.frames; i++)
    require(pack_frame(cold[i]) == pack_frame(warm[i]) && cold[i].cfa == warm[i].cfa);
  require(reliable.frames <= without.frames && reliable.reason == without.reason);
  for (unsigned i = 0; i + 1 < reliable.frames; i++) {
    require(is_reliable(strict[i]));
    if (strict[i + 1].source == Source::frame)  // else a signal frame says where
      require(strict[i].cfa >= Addr(g_stack) && strict[i].cfa <= memory.stacks[0].end);
  }
  for (unsigned i = 0; i < reliable.frames; i++)
    require(strict[i].pc == cold[i].pc && strict[i].reason == cold[i].reason);
  require(!without.whole() || cold[without.frames - 1].reason == Reason::end);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 4) return 0;
  Input in{data + 1, size - 1};
  for (auto* cache : {fixed<X86_64>().cache.get(), fixed<Aarch64>().cache.get()}) *cache = RowCache();
  // Several stacks: what one leaves in the cache must not change another's walk.
  for (int i = 0; i < 8 && in.size; i++) data[0] & 1 ? walk_any<Aarch64>(in) : walk_any<X86_64>(in);
  return 0;
}
