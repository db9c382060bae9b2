// The short way against the long one: made-up stacks of every shape that a usual row can have or just fails to have, hooked,
// damaged and cut. The truth is the walk without a cache, which knows no short way; whole frames are compared, CFA included.
#include "core/walk/usual_steps.h"

#include <algorithm>
#include <memory>
#include <random>
#include <vector>

#include "core/isa/aarch64.h"
#include "core/isa/x86_64.h"
#include "core/walk/walker.h"
#include "core/walk/world_test.h"

namespace sonde::test {
namespace {

constexpr uint64_t kFunctions = 0x400100, kApart = 0x80, kStart = 0x40f000;

// A chain of `depth` functions, each with a row of its own, under an outermost one; and a stack on which they wait.
template <class Isa>
struct Random : World<Isa> {
  using W = World<Isa>;
  inline static const std::vector<uint8_t> kNop =
      W::kX86 ? std::vector<uint8_t>{0x90} : std::vector<uint8_t>{0x1f, 0x20, 0x03, 0xd5};
  inline static const std::vector<uint8_t> kReturn =
      W::kX86 ? std::vector<uint8_t>{0xc3} : std::vector<uint8_t>{0xc0, 0x03, 0x5f, 0xd6};
  std::mt19937 dice;
  std::vector<uint64_t> slots;  // of return addresses, innermost first
  unsigned hooked = 0, usual = 0;

  explicit Random(unsigned seed) : dice(seed) { build(3 + roll(12)); }
  unsigned roll(unsigned sides) { return static_cast<unsigned>(dice() % sides); }

  void build(unsigned depth) {
    this->rows[kStart] = W::outermost();
    for (uint64_t a = W::kStackEnd - 0x4000; a < W::kStackEnd; a += 8) this->word(a, 0xdead0000 + a % 0x1000);
    uint64_t sp = W::kStackEnd - 0x3000, in_next = 0, fp = 0;
    const uint64_t first_sp = sp;
    // fp of the innermost frame: wherever the first function that uses it wants it. Built from the inside outwards, so it
    // is patched into the start or the slot that holds it once that is known.
    uint64_t fp_slot = 0, first_fp = W::kStackEnd - 0x100;
    auto want_fp = [&](uint64_t value) { fp_slot ? this->word(fp_slot, value) : void(first_fp = value); };
    uint64_t pc = kFunctions + 8;
    const bool returns = roll(6) == 0;
    for (unsigned i = 0; i < depth; i++) {
      uint64_t begin = kFunctions + i * kApart;
      int size = 8 * static_cast<int>(1 + roll(roll(8) ? 20 : 200));
      bool by_fp = roll(3) == 0 && size >= 16, saves = by_fp || (roll(2) && size >= 16);
      Row row = W::row(by_fp ? Isa::kFp : Isa::kSp, by_fp ? 16 : size, false);
      uint64_t cfa = sp + static_cast<uint64_t>(size);
      int below = by_fp ? 16 : saves ? 8 * static_cast<int>(2 + roll(static_cast<unsigned>(size / 8 - 1))) : 0;
      if (saves) row.saved[0] = {static_cast<int16_t>(-below), ValueKind::at_cfa};
      for (unsigned reg = 1; reg < Isa::kSaved.size(); reg++)
        if (roll(4) == 0)
          row.saved[reg] = {static_cast<int16_t>(-8 * static_cast<int>(1 + roll(24))), ValueKind::at_cfa};
        else if (roll(40) == 0) row.saved[reg].kind = ValueKind::undefined;
      if (by_fp) want_fp(cfa - 16);
      if (saves) fp_slot = cfa - static_cast<uint64_t>(below), fp = cfa;
      spoil(row);
      usual += UsualRow::encode(row, Isa::kSp, Isa::kFp) != 0;
      this->rows[begin] = row;
      if (i == 0) this->nops(begin, 16), this->bytes(pc, returns ? kReturn : kNop);
      in_next = this->call_site((i + 1 == depth ? kStart : begin + kApart) + 0x40);
      slots.push_back(cfa - 8);
      this->word(cfa - 8, in_next);
      sp = cfa;
    }
    (void)fp;
    this->at(pc, first_sp, first_fp);
    if (returns && roll(2)) this->word(first_sp, in_next);
    if (roll(2)) this->start.regs.forget(Isa::kSaved[1]);
  }

  // Now and then the row is another than the stack was made for, and often no usual one.
  void spoil(Row& row) {
    switch (roll(200)) {
      case 0: row.saved[0].kind = ValueKind::undefined; break;
      case 1: row.saved[0] = {8, ValueKind::at_cfa}; break;
      case 2: row.ra_offset = -16; break;
      case 3: row.cfa_reg = Isa::kSaved[1]; break;
      case 4: row.flags = kRowRefuted; break;
      case 5: row.cfa_kind = CfaKind::deref_reg_offset; break;
      case 6: row.cfa_offset = 0; break;
      case 7: row.cfa_offset = -row.cfa_offset; break;
      case 8: row.cfa_offset += 4; break;
      case 9: row.saved[1] = {Isa::kSaved[2], ValueKind::in_register}; break;
      case 10: row = W::gap(); break;
      case 11: row.saved[0] = {-20, ValueKind::at_cfa}; break;
      case 12: row.saved[0] = {-8 * 32, ValueKind::at_cfa}; break;
      case 13: row.cfa_offset = 1 << 20; break;
      default: break;
    }
  }

  void hook_some() {
    this->trampolines = true;
    for (size_t i = 0; i < slots.size(); i++) {
      if (roll(2)) continue;
      unsigned number = static_cast<unsigned>(3 * i);
      this->entry(number, this->word_at(slots[i]), this->key(slots[i] + 8) + (roll(30) ? 0 : 8));
      if (roll(20) == 0)
        this->entry(1000, this->word_at(slots[i]), this->key(slots[i] + 8)),
            this->entry(number, this->trampoline(1000), this->key(slots[i] + 8));
      this->word(slots[i], this->trampoline(number) + (roll(30) ? 0 : 4));
      hooked++;
    }
  }

  void damage() {
    switch (roll(7)) {
      case 0:
        this->word(slots[roll(static_cast<unsigned>(slots.size()))],
                   roll(2) ? 0 : 0x8000000000000000 | this->word_at(slots[0]));
        break;
      case 1: this->memory.erase(slots[roll(static_cast<unsigned>(slots.size()))]); break;  // cannot be read
      case 2: this->stacks[0].end = Addr(slots[roll(static_cast<unsigned>(slots.size()))] + 8 * roll(2)); break;
      case 3: this->start.regs.set(Isa::kFp, this->start.regs.get(Isa::kFp) + 4 * (1 + roll(3))); break;
      case 4: this->start.regs.forget(Isa::kFp); break;
      case 5: this->start.regs.set(Isa::kSp, this->start.regs.get(Isa::kSp) + (roll(2) ? 4 : -uint64_t{8})); break;
      case 6: this->word(this->start.regs.get(Isa::kSp), roll(2) ? this->word_at(slots[0]) : 0); break;
    }
  }
};

template <class Isa>
bool same(const typename World<Isa>::Stack& a, const typename World<Isa>::Stack& b) {
  auto equal = [](const Frame& x, const Frame& y) {
    return x.pc == y.pc && x.cfa == y.cfa && x.source == y.source && x.reason == y.reason &&
           x.recovered == y.recovered && x.is_return == y.is_return;
  };
  return a.result.reason == b.result.reason && std::ranges::equal(a.frames, b.frames, equal);
}

}  // namespace

TEST_CASE_TEMPLATE("walk: the short way shows what the long one shows, whatever stands on the stack", Isa, X86_64,
                   Aarch64) {
  unsigned whole = 0, refused = 0, different = 0, hooked = 0, usual = 0, packed = 0;
  uint64_t words[64] = {};
  for (unsigned seed = 0; seed < 400; seed++) {
    CAPTURE(seed);
    Random<Isa> w(seed);
    auto cache = std::make_unique<RowCache>();
    auto compare = [&](size_t room) {
      auto truth = w.walk(nullptr, room);
      for (int i = 0; i < 2; i++) {
        auto seen = w.walk(cache.get(), room);
        if (same<Isa>(seen, truth) || different++) continue;
        CHECK(seen.pcs() == truth.pcs());
        CHECK((seen.reasons() == truth.reasons()));
        CHECK(same<Isa>(seen, truth));
      }
      truth.result.whole() ? whole++ : refused++;
      if (room < 64 || w.start.max_frames < 64 || !w.start.regs.has(Isa::kFp)) return;
      // Packed, over what another walk left there, and again over its own.
      AnyMemory memory = w.any_memory();
      auto load = [&](uint64_t address, uint64_t* value) { return memory.read(Addr(address), value); };
      UsualState first{w.start.regs.pc().value, w.start.regs.sp().value, w.start.regs.get(Isa::kFp),
                       packed_kind(Source::regs_pc, 0, false), w.stacks[0]};
      for (int i = 0; i < 2 && w.stacks[0].contains(w.start.regs.sp()); i++) {
        UsualState state = first;
        uint64_t* end = usual_steps<Isa>(w.arena(), *cache, load, true, &state, words, words + 64);
        bool wrong = state.ended && static_cast<size_t>(end - words) != truth.frames.size();
        for (uint64_t* word = words; word != end; word++) wrong |= *word != pack_frame(truth.frames[word - words]);
        different += wrong;
        packed += static_cast<unsigned>(end - words);
      }
    };
    compare(64);
    w.hook_some();
    w.generation++, cache = std::make_unique<RowCache>();
    compare(64);
    compare(1 + w.roll(8));
    w.start.max_frames = 2, compare(64), w.start.max_frames = ~0u;
    w.start.reliable_only = true, compare(64), w.start.reliable_only = false;
    w.damage();
    compare(64);
    hooked += w.hooked, usual += w.usual;
  }
  CHECK(different == 0);
  // The draw was a good one.
  CHECK(whole > 600);
  CHECK(refused > 800);
  CHECK(hooked > 1200);
  CHECK(usual > 2400);
  CHECK(packed > 8000);
}

TEST_CASE_TEMPLATE("walk: usual steps are taken at all, up to the end, and packed as frames are", Isa, X86_64,
                   Aarch64) {
  using W = World<Isa>;
  W w;
  w.rows[0x400100] = W::row(Isa::kSp, 32), w.rows[0x400200] = W::row(Isa::kFp, 16, true),
  w.rows[0x400300] = W::outermost();
  w.nops(0x400100, 16);
  uint64_t in_second = w.call_site(0x400240), in_start = w.call_site(0x400340), sp = W::kStackEnd - 0x100;
  w.word(sp + 24, in_second), w.word(sp + 64, 0), w.word(sp + 72, in_start);
  w.entry(5, in_second, w.key(sp + 32)), w.word(sp + 24, w.trampoline(5));
  w.at(0x400104, sp, sp + 64);
  RowCache cache;
  auto truth = w.walk(&cache);
  REQUIRE(truth.pcs() == std::vector<uint64_t>{0x400104, in_second, in_start});
  auto load = [&](uint64_t address, uint64_t* value) { return *value = w.word_at(address), true; };
  uint64_t words[8];
  UsualState state{0x400104, sp, sp + 64, packed_kind(Source::regs_pc, 0, false), w.stacks[0]};
  uint64_t* end = usual_steps<Isa>(w.arena(), cache, load, true, &state, words, words + 8);
  REQUIRE(end - words == 3);
  CHECK(state.ended);
  for (int i = 0; i < 3; i++) CHECK(words[i] == pack_frame(truth.frames[i]));
  CHECK(unpack_frame(words[1]).recovered == kRecoveredReturn);
  // Where the entries cannot be read, in front of the frame whose caller is hooked.
  state = {0x400104, sp, sp + 64, packed_kind(Source::regs_pc, 0, false), w.stacks[0]};
  CHECK(usual_steps<Isa>(w.arena(), cache, load, false, &state, words, words + 8) == words);
  // No further than there is room.
  state = {0x400104, sp, sp + 64, packed_kind(Source::regs_pc, 0, false), w.stacks[0]};
  CHECK(usual_steps<Isa>(w.arena(), cache, load, true, &state, words, words + 2) == words + 2);
  CHECK(!state.ended);
  CHECK(state.pc == in_start);
}

TEST_CASE_TEMPLATE(
    "walk: a pc that is remembered as a return address is looked at anew where it is exact, and the reverse", Isa,
    X86_64, Aarch64) {
  using W = World<Isa>;
  W w;
  const uint64_t border = 0x400200, sp = W::kStackEnd - 0x100;  // the end of one function and the entry of the next
  w.rows[0x400100] = W::row(Isa::kSp, 32), w.rows[border] = W::row(Isa::kSp, 16), w.rows[0x400300] = W::outermost();
  uint64_t in_start = w.call_site(0x400340);
  w.call_site(border);
  w.word(sp + 8, border), w.word(sp + 40, in_start), w.word(sp + 24, in_start);
  RowCache cache;
  for (bool is_return : {true, false, true, false}) {
    w.start.pc_is_return = is_return;
    w.at(border, sp);
    auto truth = w.walk();
    CHECK(truth.result.whole());
    CHECK(same<Isa>(w.walk(&cache), truth));
    CHECK(same<Isa>(w.walk(&cache), truth));
  }
}

// kStart -> by another register -> saves that register -> innermost, whose frames are usual ones: the register that the long
// way needs is in a slot that the short way went past.
TEST_CASE_TEMPLATE("walk: registers that usual rows do not need are there for a row that does", Isa, X86_64, Aarch64) {
  using W = World<Isa>;
  constexpr unsigned kOther = Isa::kSaved[1];
  for (CfaKind kind : {CfaKind::reg_offset, CfaKind::deref_reg_offset})
    for (ValueKind rule : {ValueKind::at_cfa, ValueKind::same, ValueKind::undefined}) {
      CAPTURE(static_cast<int>(kind));
      CAPTURE(static_cast<int>(rule));
      W w;
      const uint64_t sp = W::kStackEnd - 0x200, base = sp + 0x60,
                     cell = sp + 0x80;  // CFA of the odd function: base + 16
      Row odd = W::row(kOther, kind == CfaKind::reg_offset ? 16 : 0);
      odd.cfa_kind = kind;
      w.rows[0x400100] = W::row(Isa::kSp, 32), w.rows[0x400200] = W::row(Isa::kSp, 32), w.rows[0x400300] = odd;
      w.rows[0x400400] = W::outermost();
      w.rows[0x400200].saved[1] = {-24, rule};
      w.nops(0x400100, 16);
      w.word(sp + 24, w.call_site(0x400240)), w.word(sp + 56, w.call_site(0x400340));
      w.word(base + 8, w.call_site(0x400440)), w.word(cell, base + 16);
      const uint64_t held = kind == CfaKind::reg_offset ? base : cell;
      w.word(sp + 64 - 24, held);
      w.at(0x400104, sp, sp + 64);
      // What the innermost frame has in it would do as well, but is wrong.
      w.word(base + 0x28, w.call_site(0x400440)), w.word(cell + 0x20, base + 0x30);
      w.start.regs.set(kOther, rule == ValueKind::same ? held : held + 0x20);
      auto truth = w.walk();
      CHECK(truth.result.whole() == (rule != ValueKind::undefined));
      RowCache cache;
      for (int i = 0; i < 3; i++) CHECK(same<Isa>(w.walk(&cache), truth));
      // Also if only the decoded row is still known.
      for (uint64_t& word : cache.references) word = 0;
      CHECK(same<Isa>(w.walk(&cache), truth));
    }
}

TEST_CASE("row cache: as many pcs of one place live together as a line holds, and each says whose it is") {
  RowCache cache;
  auto pc = [](uint64_t high) {
    return CodeAddr{Addr(high << 36 | high << 19 | (0x42 ^ high) << RowCache::kLowBits | 3), true};
  };
  constexpr uint32_t kLine = RowCache::kLine;
  for (uint32_t i = 1; i <= kLine; i++) {
    REQUIRE(RowCache::place(pc(i).pc.value) == RowCache::place(pc(1).pc.value));
    cache.keep(pc(i), 10 + i, 0);
    for (uint32_t k = 1; k <= kLine; k++) CHECK(cache.find(pc(k)) == (k <= i ? 10 + k : 0));
  }
  // One more drives one out, whichever, but not itself.
  auto known = [&] {
    unsigned count = 0;
    for (uint32_t i = 1; i <= kLine + 1; i++) {
      uint32_t reference = cache.find(pc(i));
      CHECK((reference == 0 || reference == 10 + i));
      count += reference != 0;
    }
    return count;
  };
  CodeAddr last = pc(kLine + 1);
  cache.keep(last, 10 + kLine + 1, 0);
  CHECK(cache.find(last) == 10 + kLine + 1);
  CHECK(known() == kLine);
  for (int times = 0; times < 4; times++)
    for (uint32_t i = 1; i <= kLine + 1; i++) {
      cache.keep(pc(i), 10 + i, 0);
      CHECK(cache.find(pc(i)) == 10 + i);
    }
  CHECK(known() >= kLine - 1);  // one may stand there twice
  cache.keep(last, 33, 0);
  CHECK(cache.find({last.pc, false}) == 0);
  cache.keep({last.pc, false}, 44, 0);
  CHECK(cache.find(last) == 33);
  CHECK(cache.find({last.pc, false}) == 44);
  CHECK(cache.find({last.pc + 1, true}) == 0);
  CHECK(cache.find({Addr(0), true}) == 0);
  cache.keep({Addr(RowCache::kMaxPc | last.pc.value), true}, 55, 0);  // no address of code
  CHECK(cache.find(last) == 33);
}

// Some pcs are in every stack, others in one each, and their line has no room for all: those driven out come back.
TEST_CASE("row cache: in a line that is too small no few pcs drive each other out for ever") {
  auto cache = std::make_unique<RowCache>();
  constexpr unsigned kCommon = 3, kPasses = 50, kWarm = 5;
  for (unsigned pcs = RowCache::kLine + 1; pcs <= RowCache::kLine + 2; pcs++)
    for (unsigned seed = 0; seed < 300; seed++) {
      *cache = RowCache();
      std::mt19937_64 random(seed);
      const uint64_t line = random() % 4096 * RowCache::kLine;
      std::vector<CodeAddr> codes;
      for (unsigned i = 0; i < pcs; i++) {
        uint64_t high = random() >> 37, place = (line | random() % RowCache::kLine) ^ (high & 0x7fff);
        codes.push_back({Addr(high << 19 | place << RowCache::kLowBits | random() % 16), true});
        REQUIRE((RowCache::place(codes.back().pc.value) ^ line) < RowCache::kLine);
      }
      auto missed = [&](CodeAddr code) {
        if (cache->find(code)) return false;
        cache->keep(code, 7, 8);
        return true;
      };
      unsigned walks = 0, slow = 0;
      for (unsigned pass = 0; pass < kPasses; pass++)
        for (unsigned other = kCommon; other < pcs; other++) {
          bool one = false;
          for (unsigned i = 0; i < kCommon; i++) one |= missed(codes[i]);
          missed(codes[other]);
          if (pass >= kWarm) walks++, slow += one;
        }
      if (slow * 2 > walks) FAIL("of ", walks, " walks ", slow, " found a common pc gone, seed ", seed);
    }
}

// 16,000 functions of 32 bytes with one call each, as bench/walk_sites.S has them: return addresses lie at 13 to 17 in them, and
// the linker may put the first one anywhere. bench/walk.cc walks such, and counts what the short way leaves.
TEST_CASE("row cache: wherever code lies, none of its calls is driven out by another") {
  auto cache = std::make_unique<RowCache>();
  std::vector<uint32_t> order(16000);
  for (uint32_t i = 0; i < order.size(); i++) order[i] = i;
  std::shuffle(order.begin(), order.end(), std::mt19937(1));
  for (uint64_t text : {uint64_t{0x400000}, uint64_t{0x5555556b4000}, uint64_t{0x7f31d2ee9000}})
    for (uint64_t first = 0; first < 256; first += 8) {
      *cache = RowCache();
      auto call = [&](uint32_t i) {
        return CodeAddr{Addr(text + first + 32 * i + 13 + i % 2 + (i % 16 >= 14 ? 3 : 0)), true};
      };
      for (uint32_t i : order) cache->keep(call(i), i + 3, 8);
      unsigned lost = 0;
      for (uint32_t i : order) lost += cache->find(call(i)) != i + 3;
      CAPTURE(first);
      CHECK(lost == 0);
    }
}

TEST_CASE("row cache: neighbours do not drive each other out") {
  RowCache cache;
  for (uint32_t i = 0; i < 1u << RowCache::kPlaceBits; i++)
    cache.keep({Addr(0x400000 + (i << RowCache::kLowBits)), true}, i + 3, 8);
  for (uint32_t i = 0; i < 1u << RowCache::kPlaceBits; i++)
    if (cache.find({Addr(0x400000 + (i << RowCache::kLowBits)), true}) != i + 3) FAIL("lost: ", i);
}

TEST_CASE("row cache: place and tag tell any two pcs apart") {
  std::mt19937_64 random(1);
  for (int i = 0; i < 200000; i++) {
    uint64_t a = random() % RowCache::kMaxPc,
             b = a ^ uint64_t { 1 } << random() % 47 ^ (i % 2 ? uint64_t{1} << random() % 47 : 0);
    bool same = RowCache::tag(a) == RowCache::tag(b) &&
                RowCache::place(a) / RowCache::kLine == RowCache::place(b) / RowCache::kLine;
    if (same != (a == b)) FAIL("taken for each other: ", a, " ", b);
    if (RowCache::tag(a) >> (64 - RowCache::kTagShift)) FAIL("a tag that does not fit: ", a);
  }
}

TEST_CASE("row cache: belongs to the first arena that uses it") {
  RowCache cache;
  CHECK(cache.is_of(7));
  CHECK(cache.is_of(7));
  CHECK(!cache.is_of(8));
}

}  // namespace sonde::test
