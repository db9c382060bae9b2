// Synthetic stacks for both instruction sets: what is reliable, and the reason for everything that is not.
#include "core/walk/walker.h"

#include "core/walk/reason.h"
#include "core/walk/world_test.h"

namespace doctest {
template <>
struct StringMaker<sonde::Reason> {
  static String convert(sonde::Reason r) { return sonde::describe(r); }
};
}  // namespace doctest

namespace sonde::test {
namespace {

constexpr uint64_t kLeaf = 0x400100, kMiddle = 0x400200, kMain = 0x400300, kStart = 0x400400, kGap = 0x400500;
using Pcs = std::vector<uint64_t>;
using Reasons = std::vector<Reason>;
constexpr Reason R = Reason::reliable;

// start -> main -> middle -> leaf, each with 32 bytes of frame, return addresses just below the CFA; main saves and uses
// the frame pointer.
template <class Isa>
struct Chain : World<Isa> {
  using W = World<Isa>;
  static constexpr uint64_t kSp = W::kStackEnd - 0x1000;
  static constexpr uint64_t kLeafCfa = kSp + 32, kMiddleCfa = kSp + 64, kMainCfa = kSp + 96;
  uint64_t in_middle, in_main, in_start;

  Chain() {
    this->rows[kLeaf] = this->rows[kMiddle] = W::row(Isa::kSp, 32);
    this->rows[kMain] = W::row(Isa::kSp, 32, true);
    this->rows[kStart] = W::outermost();
    this->rows[kGap] = W::gap();
    this->nops(kLeaf, 0x40);
    this->nops(kGap, 0x40);
    in_middle = this->call_site(kMiddle + 0x20);
    in_main = this->call_site(kMain + 0x20);
    in_start = this->call_site(kStart + 0x20);
    for (uint64_t a = W::kStackEnd - 0x2000; a < W::kStackEnd; a += 8) this->word(a, 0xdead0000);
    this->word(kLeafCfa - 8, in_middle);
    this->word(kMiddleCfa - 8, in_main);
    this->word(kMainCfa - 8, in_start);
    this->at(kLeaf + 8, kSp);
  }
  Pcs pcs() const { return {kLeaf + 8, in_middle, in_main, in_start}; }
};

}  // namespace

TEST_CASE_TEMPLATE("walk: a whole stack ends positively and every frame is reliable", Isa, X86_64, Aarch64) {
  Chain<Isa> w;
  auto stack = w.walk();
  CHECK(stack.pcs() == w.pcs());
  CHECK(stack.reasons() == Reasons{R, R, R, Reason::end});
  CHECK(stack.result.whole());
  CHECK(stack.frames[0].source == Source::regs_pc);
  CHECK(!stack.frames[0].is_return);
  CHECK(stack.frames[1].source == Source::frame);
  CHECK(stack.frames[1].is_return);
  CHECK(stack.frames[0].cfa == Addr(w.kLeafCfa));
  CHECK(stack.frames[2].cfa == Addr(w.kMainCfa));
}

TEST_CASE_TEMPLATE("walk: a cache changes nothing, and another arena's is not used", Isa, X86_64, Aarch64) {
  Chain<Isa> w;
  RowCache cache;
  auto plain = w.walk();
  for (int i = 0; i < 3; i++) {
    auto stack = w.walk(&cache);
    CHECK(stack.pcs() == plain.pcs());
    CHECK(stack.reasons() == plain.reasons());
  }
  uint64_t word = RowCache::load(cache.usual[RowCache::place(w.in_middle)]);
  CHECK((word >> RowCache::kTagShift) == RowCache::tag(w.in_middle));
  CHECK(cache.find({Addr(w.in_middle), false}) == 0);
  CHECK(cache.find({Addr(w.in_start), true}) == RowCache::kOutermost);
  // The same code with another frame size: the old rows would lead elsewhere.
  w.rows[kMiddle] = World<Isa>::row(Isa::kSp, 48);
  w.generation++;
  w.word(w.kMiddleCfa - 8, 0), w.word(w.kMiddleCfa + 8, w.in_main), w.word(w.kMainCfa + 8, w.in_start);
  CHECK(w.walk(&cache).pcs() == w.pcs());
}

TEST_CASE_TEMPLATE("walk: a return address in no image is unknown code, also null", Isa, X86_64, Aarch64) {
  for (uint64_t bad : {uint64_t{0}, uint64_t{0x123456780000}, World<Isa>::kTextEnd + 16}) {
    Chain<Isa> w;
    w.word(w.kMiddleCfa - 8, bad);
    auto stack = w.walk();
    CHECK(stack.pcs() == Pcs{kLeaf + 8, w.in_middle, bad});
    CHECK(stack.reasons() == Reasons{R, R, Reason::unknown_code});
    CHECK(stack.result.reason == Reason::unknown_code);
  }
}

TEST_CASE_TEMPLATE("walk: a return address that no call precedes", Isa, X86_64, Aarch64) {
  Chain<Isa> w;
  w.nops(w.in_main - 8, 8);
  auto stack = w.walk();
  CHECK(stack.pcs() == w.pcs());
  CHECK(stack.reasons() == Reasons{R, R, Reason::ra_not_after_call, Reason::end});
  CHECK((stack.frames[3].recovered & kMarked) != 0);
  CHECK(!is_reliable(stack.frames[3]));
  CHECK(!stack.result.whole());
  CHECK(stack.result.reason == Reason::ra_not_after_call);
  CHECK(w.walk_reliable().pcs() == Pcs{kLeaf + 8, w.in_middle, w.in_main});
}

TEST_CASE_TEMPLATE("walk: a call that does not return may be the last instruction of its function", Isa, X86_64,
                   Aarch64) {
  Chain<Isa> w;
  uint64_t end = kMiddle + 0x40;  // what begins here has another row
  w.rows[end] = World<Isa>::row(Isa::kSp, 48);
  w.word(w.kLeafCfa - 8, w.call_site(end));
  RowCache cache;
  for (int i = 0; i < 2; i++) CHECK(w.walk(&cache).pcs() == Pcs{kLeaf + 8, end, w.in_main, w.in_start});
}

TEST_CASE_TEMPLATE("walk: a warm cache changes no verdict on a damaged stack", Isa, X86_64, Aarch64) {
  Chain<Isa> w;
  RowCache cache;
  CHECK(w.walk(&cache).result.whole());
  auto same = [&] {
    auto cold = w.walk(), warm = w.walk(&cache);
    CHECK(warm.pcs() == cold.pcs());
    CHECK(warm.reasons() == cold.reasons());
    CHECK(!warm.result.whole());
  };
  w.word(w.kMiddleCfa - 8, 0x1234), same();
  w.word(w.kMiddleCfa - 8, w.in_main), w.stacks[0].end = Addr(w.kMainCfa - 8), same();
  w.stacks[0].end = Addr(w.kStackEnd), w.entry(1, w.in_main, 0), w.word(w.kMiddleCfa - 8, w.trampoline(1)), same();
  w.at(kLeaf + 8, w.kSp + 4), same();
}

TEST_CASE_TEMPLATE("walk: a gap in the tables stops a reliable walk; another goes on by the frame pointer, marked", Isa,
                   X86_64, Aarch64) {
  Chain<Isa> w;
  uint64_t record = w.kLeafCfa + 8;  // {main's frame pointer, return address into main}, as code in the gap made it
  w.word(w.kLeafCfa - 8, w.call_site(kGap + 0x20));
  w.word(record, 0), w.word(record + 8, w.in_main);
  w.word(record + 16 + 32 - 8, w.in_start);
  w.at(kLeaf + 8, w.kSp, record);
  auto stack = w.walk();
  CHECK(stack.pcs() == Pcs{kLeaf + 8, kGap + 0x20, w.in_main, w.in_start});
  CHECK(stack.reasons() == Reasons{R, Reason::no_table_row, Reason::no_table_row, Reason::end});
  CHECK(!(stack.frames[1].recovered & kMarked));
  CHECK((stack.frames[2].recovered & kMarked) != 0);
  CHECK(w.walk_reliable().reasons() == Reasons{R, Reason::no_table_row});
  // The record leads to no code: nothing is guessed.
  w.word(record + 8, 0x1234);
  CHECK(w.walk().reasons() == Reasons{R, Reason::no_table_row});
}

TEST_CASE_TEMPLATE("walk: sp must grow, and a frame pointer must point into the stack ahead", Isa, X86_64, Aarch64) {
  SUBCASE("a row that leads back") {
    Chain<Isa> w;
    w.rows[kMiddle] = World<Isa>::row(Isa::kSp, 0);
    auto stack = w.walk();
    CHECK(stack.reasons() == Reasons{R, Reason::non_progress});
  }
  for (uint64_t fp : {uint64_t{0}, Chain<Isa>::kSp - 64, Chain<Isa>::kSp + 4, World<Isa>::kStackEnd, uint64_t{1}}) {
    Chain<Isa> w;
    w.rows[kMiddle] = World<Isa>::row(Isa::kFp, 16, true);
    w.at(kLeaf + 8, w.kSp, fp);
    auto stack = w.walk();
    CHECK(stack.reasons() == Reasons{R, Reason::fp_mismatch});
  }
  SUBCASE("a ring of frame records ends") {
    Chain<Isa> w;
    w.rows[kMiddle] = World<Isa>::row(Isa::kFp, 16, true);
    uint64_t record = w.kLeafCfa;
    w.word(record, record), w.word(record + 8, w.in_middle);
    w.at(kLeaf + 8, w.kSp, record);
    auto stack = w.walk();
    CHECK(stack.reasons() == Reasons{R, R, Reason::fp_mismatch});
  }
}

TEST_CASE_TEMPLATE("walk: a stack that ends too early", Isa, X86_64, Aarch64) {
  Chain<Isa> w;
  w.stacks[0].end = Addr(w.kMiddleCfa - 8);
  CHECK(w.walk().reasons() == Reasons{R, Reason::stack_out_of_range});
  w.stacks[0].end = Addr(w.kStackEnd);
  for (int i = 0; i < 8; i++) w.memory.erase(w.kMiddleCfa - 8 + i);
  CHECK(w.walk().reasons() == Reasons{R, Reason::stack_out_of_range});
  w.at(kLeaf + 8, 0x1000);
  CHECK(w.walk().reasons() == Reasons{Reason::stack_out_of_range});
}

TEST_CASE_TEMPLATE("walk: cut stacks say so", Isa, X86_64, Aarch64) {
  Chain<Isa> w;
  auto full = w.walk(nullptr, 2);
  CHECK(full.reasons() == Reasons{R, Reason::buffer_full});
  CHECK(full.result.reason == Reason::buffer_full);
  w.start.max_frames = 3;
  CHECK(w.walk().reasons() == Reasons{R, R, Reason::depth_limit});
  w.start.max_frames = 4;
  CHECK(w.walk().result.whole());
  w.start.max_frames = 0;
  CHECK(w.walk().frames.empty());
}

TEST_CASE_TEMPLATE("walk: trampolines in slots are resolved by their own entries, in every subset (S5)", Isa, X86_64,
                   Aarch64) {
  for (unsigned subset = 0; subset < 8; subset++) {
    Chain<Isa> w;
    w.trampolines = true;
    uint64_t cfas[] = {w.kLeafCfa, w.kMiddleCfa, w.kMainCfa};
    for (unsigned i = 0; i < 3; i++)
      if (subset >> i & 1) {
        unsigned number = 7 + 5 * i;
        w.entry(number, w.word_at(cfas[i] - 8), w.key(cfas[i]));
        w.word(cfas[i] - 8, w.trampoline(number));
      }
    RowCache cache;
    for (bool warm : {false, true}) {
      CAPTURE(warm);
      auto stack = w.walk(&cache);
      CHECK(stack.pcs() == w.pcs());
      CHECK(stack.result.whole());
      for (unsigned i = 0; i < 3; i++) CHECK((stack.frames[i + 1].recovered == kRecoveredReturn) == (subset >> i & 1));
    }
  }
}

TEST_CASE_TEMPLATE("walk: another walk at each read of the first disturbs neither, all slots hooked (S6)", Isa, X86_64,
                   Aarch64) {
  Chain<Isa> w;
  w.trampolines = true;
  uint64_t cfas[] = {w.kLeafCfa, w.kMiddleCfa, w.kMainCfa};
  for (unsigned i = 0; i < 3; i++) {
    w.entry(3 + i, w.word_at(cfas[i] - 8), w.key(cfas[i]));
    w.word(cfas[i] - 8, w.trampoline(3 + i));
  }
  struct Interleaved {
    AnyMemory memory;
    const TableArena* arena;
    RowCache* cache;
    WalkStart<Isa> start;
    Pcs truth;
    int walks, wrong;
    void walk_whole() {
      std::vector<Frame> frames(64);
      frames.resize(sonde::walk(arena, cache, memory, start, std::span<Frame>(frames)).frames);
      Pcs seen;
      for (auto& f : frames) seen.push_back(f.pc.value);
      walks++, wrong += seen != truth;
    }
  };
  RowCache cache;
  const TableArena* arena = w.arena();
  Interleaved other{w.any_memory(), arena, &cache, w.start, w.pcs(), 0, 0};
  AnyMemory first{&other,
                  [](void* self, Addr a, uint64_t* value) {
                    auto* o = static_cast<Interleaved*>(self);
                    o->walk_whole();
                    return o->memory.read(a, value);
                  },
                  [](void* self, Addr sp, AddrRange* stack) {
                    auto* o = static_cast<Interleaved*>(self);
                    return o->memory.stack_at(sp, stack);
                  }};
  Interleaved both{first, arena, &cache, w.start, w.pcs(), 0, 0};
  both.walk_whole();
  CHECK(both.wrong == 0);
  CHECK(other.walks >= 6);  // a slot and an entry for each frame
  CHECK(other.wrong == 0);
}

TEST_CASE_TEMPLATE("walk: hooks in layers on one slot are resolved one after the other; a ring is not", Isa, X86_64,
                   Aarch64) {
  Chain<Isa> w;
  uint64_t key = w.key(w.kLeafCfa);
  w.entry(1, w.trampoline(2), key), w.entry(2, w.in_middle, key);
  w.word(w.kLeafCfa - 8, w.trampoline(1));
  CHECK(w.walk_reliable().pcs() == w.pcs());
  w.entry(2, w.trampoline(1), key);
  CHECK(w.walk().result.reason == Reason::recovery_failed);
}

TEST_CASE_TEMPLATE("walk: a trampoline whose entry names another slot is not translated (S13, S18)", Isa, X86_64,
                   Aarch64) {
  Chain<Isa> w;
  w.entry(3, w.in_middle, w.key(w.kLeafCfa) + 16);
  w.word(w.kLeafCfa - 8, w.trampoline(3));
  auto stack = w.walk();
  CHECK(stack.pcs() == Pcs{kLeaf + 8, w.trampoline(3)});
  CHECK(stack.reasons() == Reasons{R, Reason::recovery_failed});
  // The middle of a trampoline is no return address.
  w.entry(3, w.in_middle, w.key(w.kLeafCfa));
  w.word(w.kLeafCfa - 8, w.trampoline(3) + 5);
  CHECK(w.walk().reasons() == Reasons{R, Reason::recovery_failed});
}

TEST_CASE_TEMPLATE("walk: the same bytes elsewhere are no trampoline (S35)", Isa, X86_64, Aarch64) {
  Chain<Isa> w;
  w.entry(3, w.in_middle, w.key(w.kLeafCfa));
  w.word(w.kLeafCfa - 8, 0x30000000);
  CHECK(w.walk().reasons() == Reasons{R, Reason::unknown_code});
}

TEST_CASE_TEMPLATE("walk: interrupted in a trampoline, the consumed slot is the key", Isa, X86_64, Aarch64) {
  Chain<Isa> w;
  w.entry(9, w.in_middle, w.key(w.kLeafCfa));
  for (uint64_t offset : {0, 4}) {
    w.at(w.trampoline(9) + offset, w.kLeafCfa);
    auto stack = w.walk_reliable();
    CHECK(stack.pcs() == Pcs{w.trampoline(9) + offset, w.in_middle, w.in_main, w.in_start});
    CHECK(stack.result.whole());
    CHECK(stack.frames[1].recovered == kRecoveredReturn);
    CHECK(stack.frames[1].is_return);
  }
  w.at(w.trampoline(9), w.kLeafCfa + 16);
  CHECK(w.walk().reasons() == Reasons{Reason::recovery_failed});
}

TEST_CASE_TEMPLATE("walk: special code", Isa, X86_64, Aarch64) {
  auto special = [](uint64_t begin, SpecialKind kind) {
    return SpecialEntry{begin, begin + 0x40, static_cast<uint32_t>(kind), 0};
  };
  SUBCASE("outermost needs no row and no call before it (S28)") {
    Chain<Isa> w;
    w.rows[kMain] = World<Isa>::gap();
    w.nops(w.in_main - 8, 8);
    w.specials = {special(kMain, SpecialKind::outermost)};
    auto stack = w.walk();
    CHECK(stack.pcs() == Pcs{kLeaf + 8, w.in_middle, w.in_main});
    CHECK(stack.result.whole());
  }
  SUBCASE("hand-written code without exemption (S29)") {
    Chain<Isa> w;
    w.specials = {special(kMiddle, SpecialKind::unreliable)};
    CHECK(w.walk().reasons()[1] == Reason::special_code);
  }
  SUBCASE("a context's start is entered by a return, not by a call") {
    Chain<Isa> w;
    w.word(w.kLeafCfa - 8, kStart);
    w.nops(kStart - 8, 16);
    auto stack = w.walk();
    CHECK(stack.pcs() == Pcs{kLeaf + 8, kStart});
    CHECK(stack.result.whole());
    CHECK(!stack.frames[1].is_return);
  }
  SUBCASE("code of no image that is known by its place") {
    Chain<Isa> w;
    uint64_t elsewhere = 0x7fffffffe000;  // as the kernel's page of uprobes
    w.word(w.kLeafCfa - 8, elsewhere);
    CHECK(w.walk().reasons()[1] == Reason::unknown_code);
    w.specials = {special(elsewhere - 1, SpecialKind::unreliable)};
    CHECK(w.walk().reasons()[1] == Reason::special_code);
    CHECK(!w.walk().result.whole());
  }
  SUBCASE("start files without rows: what they have pushed") {
    if constexpr (Isa::kReturnInRegister) return;
    struct Part {
      SpecialKind kind;
      uint64_t cfa;
    };
    for (auto [kind, cfa] : {Part{SpecialKind::bare, 8}, {SpecialKind::bare_word, 16}, {SpecialKind::bare_frame, 16}}) {
      Chain<Isa> w;
      w.rows[kLeaf] = World<Isa>::gap();
      w.at(kLeaf + 8, w.kLeafCfa - cfa, 0x1234);
      w.word(w.kLeafCfa - 16, 0x7ffe0000f000);
      w.specials = {special(kLeaf, kind)};
      RowCache cache;
      for (RowCache* with : {static_cast<RowCache*>(nullptr), &cache, &cache}) {
        CHECK(w.walk(with).pcs() == w.pcs());
        CHECK(w.walk(with).result.whole());
      }
      // A row goes first; so does the lack of a call in front of a return address.
      w.rows[kLeaf] = World<Isa>::row(Isa::kSp, 24);
      CHECK(w.walk().pcs() != w.pcs());
      w.rows[kLeaf] = World<Isa>::gap();
      w.start.pc_is_return = true;
      w.nops(kLeaf, 8);
      CHECK(w.walk().reasons()[0] == Reason::ra_not_after_call);
      w.call_site(kLeaf + 8);
      CHECK(w.walk().pcs() == w.pcs());
    }
    Chain<Isa> w;  // the frame above has its own frame pointer again
    w.rows[kLeaf] = World<Isa>::gap();
    w.rows[kMiddle] = World<Isa>::row(Isa::kFp, 16, true);
    w.at(kLeaf + 8, w.kLeafCfa - 16, 0x1234);
    w.word(w.kLeafCfa - 16, w.kLeafCfa + 8);
    w.word(w.kLeafCfa + 16, w.in_main);
    w.specials = {special(kLeaf, SpecialKind::bare_frame)};
    CHECK(w.walk().pc(2) == w.in_main);
    w.specials = {special(kLeaf, SpecialKind::bare_word)};
    CHECK(w.walk().reasons()[1] == Reason::fp_mismatch);
  }
  SUBCASE("a row that the checker refuted") {
    Chain<Isa> w;
    w.rows[kMiddle].flags = kRowRefuted;
    auto stack = w.walk();
    CHECK(stack.pcs() == w.pcs());
    CHECK(stack.reasons() == Reasons{R, Reason::row_refuted, Reason::row_refuted, Reason::end});
    CHECK(w.walk_reliable().pcs() == Pcs{kLeaf + 8, w.in_middle});
  }
}

}  // namespace sonde::test
