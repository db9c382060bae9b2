// Synthetic stacks that begin or pass where execution was interrupted: signal frames, alternate stacks, detours, linkage
// stubs, calls through null, instructions whose rows are known to lag.
#include "core/walk/usual_steps.h"
#include "core/walk/walker.h"
#include "core/walk/world_test.h"

namespace sonde::test {
namespace {

constexpr uint64_t kHandler = 0x400100, kWork = 0x400200, kMain = 0x400300, kStart = 0x400400, kRestorer = 0x400600,
                   kBad = 0x400900;
using Pcs = std::vector<uint64_t>;
using Reasons = std::vector<Reason>;
constexpr Reason R = Reason::reliable;

// start -> main -> work, interrupted at its first instruction by a signal -> handler. The handler's frame and the kernel's
// signal frame lie at `base`, by default below work's on the same stack.
template <class Isa>
struct Signal : World<Isa> {
  using W = World<Isa>;
  static constexpr uint64_t kWorkSp = W::kStackEnd - 0x400;
  static constexpr uint64_t kFrame = 0x500;  // bytes of a signal frame and a handler
  uint64_t in_main, in_start;

  Signal() {
    this->rows[kHandler] = W::row(Isa::kSp, 32);
    this->rows[kWork] = W::row(Isa::kSp, 8);
    this->rows[kMain] = W::row(Isa::kSp, 32);
    this->rows[kStart] = W::outermost();
    this->rows[kRestorer] = W::gap();
    this->nops(kHandler, 0x40), this->nops(kWork - 8, 0x40), this->nops(kRestorer - 8, 0x40);
    this->bytes(kRestorer, W::kX86 ? std::vector<uint8_t>{0x48, 0xc7, 0xc0, 0x0f, 0, 0, 0, 0x0f, 0x05}
                                   : std::vector<uint8_t>{0x68, 0x11, 0x80, 0xd2, 0x01, 0, 0, 0xd4});
    in_main = this->call_site(kMain + 0x20), in_start = this->call_site(kStart + 0x20);
    for (uint64_t a = W::kStackEnd - 0x2000; a < W::kStackEnd; a += 8) this->word(a, 0xdead0000);
    this->word(kWorkSp, in_main);
    this->word(kWorkSp + 8 + 32 - 8, in_start);
    raise(kWorkSp - kFrame, kWork, kWorkSp);
  }
  // The kernel interrupts {pc, sp}: the handler runs with its frame at `base`.
  void raise(uint64_t base, uint64_t pc, uint64_t sp, AddrRange alternate = {}) {
    for (uint64_t a = base; a < base + kFrame; a += 8) this->word(a, 0);
    uint64_t frame = base + 32;
    this->word(frame - 8, kRestorer);
    for (unsigned r = 0; r < Isa::kRegs; r++) this->word(frame + Code<Isa>::signal_register(r), 0);
    this->word(frame + Code<Isa>::signal_register(Isa::kPc), pc);
    this->word(frame + Code<Isa>::signal_register(Isa::kSp), sp);
    this->word(frame + Code<Isa>::kSignalStackBase, alternate.begin.value);
    this->word(frame + Code<Isa>::kSignalStackSize, alternate.size());
    this->at(kHandler + 8, base);
  }
  Pcs pcs() const { return {kHandler + 8, kRestorer, kWork, in_main, in_start}; }
};

constexpr AddrRange kAlternate = {Addr(0x600000), Addr(0x602000)};
void fill(auto& w, AddrRange range) {
  for (Addr a = range.begin; a < range.end; a += 8) w.word(a.value, 0xdead0000);
}

}  // namespace

TEST_CASE_TEMPLATE("walk: over a signal frame the pc is exact and every register is the kernel's", Isa, X86_64,
                   Aarch64) {
  for (bool known : {false, true}) {
    Signal<Isa> w;
    if (known) {  // as glibc's: covered by a row with the signal flag, from one byte before
      w.rows[kRestorer - 1] = World<Isa>::row(Isa::kSp, 8);
      w.rows[kRestorer - 1].flags = kRowSignalFrame;
      w.rows.erase(kRestorer);
      w.rows[kRestorer + 0x20] = World<Isa>::gap();
    }
    auto stack = w.walk_reliable();
    CHECK(stack.pcs() == w.pcs());
    CHECK(stack.result.whole());
    CHECK(!stack.frames[1].is_return);
    CHECK(!stack.frames[2].is_return);
    CHECK(stack.frames[2].source == Source::regs_pc);
    CHECK(stack.frames[3].source == Source::frame);
    CHECK(stack.frames[3].is_return);
  }
}

TEST_CASE_TEMPLATE("walk: beyond the interrupted pc only an exact row leads on (S31)", Isa, X86_64, Aarch64) {
  Signal<Isa> w;
  w.rows[kWork] = World<Isa>::gap();
  auto stack = w.walk();
  CHECK(stack.pcs() == Pcs{kHandler + 8, kRestorer, kWork});
  CHECK(stack.reasons() == Reasons{R, R, Reason::boundary_next});
}

TEST_CASE_TEMPLATE("walk: a handler on an alternate stack, which is left once", Isa, X86_64, Aarch64) {
  SUBCASE("apart from the thread's stack") {
    Signal<Isa> w;
    w.stacks.push_back(kAlternate);
    fill(w, kAlternate);
    w.raise(kAlternate.end.value - 0x800, kWork, w.kWorkSp, kAlternate);
    CHECK(w.walk_reliable().pcs() == w.pcs());
    CHECK(w.walk_reliable().result.whole());
  }
  SUBCASE("above the interrupted frame on the thread's own stack") {
    Signal<Isa> w;
    AddrRange inside = {Addr(w.kStackEnd - 0x2000), Addr(w.kStackEnd - 0x1000)};
    uint64_t sp = w.kStackEnd - 0x2100;  // deeper
    w.word(sp, w.in_main), w.word(sp + 8 + 32 - 8, w.in_start);
    w.raise(inside.begin.value + 0x200, kWork, sp, inside);
    w.word(sp, w.in_main), w.word(sp + 8 + 32 - 8, w.in_start);
    CHECK(w.walk_reliable().pcs() == w.pcs());
    CHECK(w.walk_reliable().result.whole());
  }
  SUBCASE("an interrupted stack that is not known: the pc is certain, nothing beyond") {
    Signal<Isa> w;
    w.stacks = {kAlternate};
    fill(w, kAlternate);
    w.raise(kAlternate.end.value - 0x800, kWork, w.kWorkSp, kAlternate);
    CHECK(w.walk().reasons() == Reasons{R, R, Reason::stack_out_of_range});
  }
  SUBCASE("entered twice") {
    Signal<Isa> w;
    w.stacks.push_back(kAlternate);
    fill(w, kAlternate);
    uint64_t low = kAlternate.begin.value + 0x200, high = kAlternate.begin.value + 0x1000;
    // On the alternate stack a handler interrupted work on the thread's stack, which itself seems to be a handler's
    // frame that interrupted something on the alternate stack.
    w.raise(w.kWorkSp - 0x1000, kWork, high, kAlternate);
    w.raise(low, kHandler + 8, w.kWorkSp - 0x1000, kAlternate);
    auto stack = w.walk();
    CHECK(stack.pcs() == Pcs{kHandler + 8, kRestorer, kHandler + 8, kRestorer});
    CHECK(stack.reasons() == Reasons{R, R, R, Reason::foreign_stack});
  }
}

TEST_CASE_TEMPLATE("walk: a signal frame that leads back on one stack", Isa, X86_64, Aarch64) {
  Signal<Isa> w;
  w.raise(w.kWorkSp - w.kFrame, kWork, w.kWorkSp - w.kFrame - 64);
  CHECK(w.walk().reasons() == Reasons{R, Reason::non_progress});
}

// The short way (usual_steps.h) goes over signal frames as well, where they lead upwards on one stack. Everything else about
// them is the long way's, which is the truth here.
TEST_CASE_TEMPLATE("walk: over signal frames the short way shows what the long one shows", Isa, X86_64, Aarch64) {
  using W = World<Isa>;
  auto same_as_cold = [](Signal<Isa>& w) {
    RowCache cache;
    auto cold = w.walk();
    for (int i = 0; i < 3; i++) {
      auto warm = w.walk(&cache);
      CHECK(warm.result.reason == cold.result.reason);
      REQUIRE(warm.frames.size() == cold.frames.size());
      for (size_t f = 0; f < cold.frames.size(); f++) {
        CHECK(pack_frame(warm.frames[f]) == pack_frame(cold.frames[f]));
        CHECK(warm.frames[f].cfa == cold.frames[f].cfa);
      }
    }
    return cold;
  };
  SUBCASE("whole, and taken at all") {
    Signal<Isa> w;
    CHECK(same_as_cold(w).result.whole());
    RowCache cache;
    w.walk(&cache);
    CHECK(cache.find({Addr(kRestorer), true}) == RowCache::kSignalReturn);
    CHECK(cache.find({Addr(kRestorer), false}) == RowCache::kSignalReturn);
    cache.keep({Addr(kRestorer), false}, RowCache::kSignalReturn, UsualRow::kSignal);  // whichever comes last
    AnyMemory memory = w.any_memory();
    auto load = [&](uint64_t address, uint64_t* value) { return memory.read(Addr(address), value); };
    UsualState state{w.start.regs.pc().value, w.start.regs.sp().value, 0, packed_kind(Source::regs_pc, 0, false),
                     w.stacks[0]};
    uint64_t words[8];
    CHECK(usual_steps<Isa>(w.arena(), cache, load, true, &state, words, words + 8) - words == 5);
    CHECK(state.ended);
  }
  SUBCASE("cut at each frame") {
    Signal<Isa> w;
    RowCache cache;
    for (int i = 0; i < 2; i++)
      for (size_t room = 1; room < 6; room++) CHECK(w.walk(&cache, room).reasons() == w.walk(nullptr, room).reasons());
  }
  SUBCASE("the interrupted frame has no row: only the pc is certain (S31)") {
    Signal<Isa> w;
    w.rows[kWork] = W::gap();
    CHECK(same_as_cold(w).reasons() == Reasons{R, R, Reason::boundary_next});
  }
  SUBCASE("interrupted registers that a later row needs") {
    constexpr unsigned kOther = Isa::kSaved[1];
    Signal<Isa> w;
    w.rows[kMain] = W::row(kOther, 48);
    uint64_t base = w.kWorkSp + 16;
    w.word(base + 40, w.in_start), w.word(w.kWorkSp + 32, 0x1234);
    w.word(w.start.regs.sp().value + 32 + static_cast<uint64_t>(Code<Isa>::signal_register(kOther)), base);
    w.start.regs.set(kOther, base + 64);  // the handler's own
    CHECK(same_as_cold(w).result.whole());
  }
  SUBCASE("an alternate stack, an odd sp, one that leads back, memory that is not there") {
    Signal<Isa> w;
    w.stacks.push_back(kAlternate);
    fill(w, kAlternate);
    w.raise(kAlternate.end.value - 0x800, kWork, w.kWorkSp, kAlternate);
    CHECK(same_as_cold(w).result.whole());
    Signal<Isa> odd;
    odd.raise(odd.kWorkSp - odd.kFrame, kWork, odd.kWorkSp + 4);
    CHECK(!same_as_cold(odd).result.whole());
    Signal<Isa> back;
    back.raise(back.kWorkSp - back.kFrame, kWork, back.kWorkSp - back.kFrame - 64);
    CHECK(same_as_cold(back).result.reason == Reason::non_progress);
    Signal<Isa> hole;
    hole.memory.erase(hole.start.regs.sp().value + 32 + static_cast<uint64_t>(Code<Isa>::signal_register(3)));
    CHECK(same_as_cold(hole).result.reason == Reason::stack_out_of_range);
    Signal<Isa> end;
    end.stacks[0].end = end.start.regs.sp() + 32 + 64;
    CHECK(!same_as_cold(end).result.whole());
  }
}

TEST_CASE_TEMPLATE("walk: behind clone's system call the result tells parent and child apart", Isa, X86_64, Aarch64) {
  Signal<Isa> w;
  w.at(kWork, w.kWorkSp);
  if (!w.kX86)
    w.rows[kWork] = World<Isa>::row(Isa::kSp, 16), w.word(w.kWorkSp + 8, w.in_main), w.word(w.kWorkSp + 40, w.in_start);
  w.specials = {{kWork, kWork + 16, static_cast<uint32_t>(SpecialKind::clone_return), 0}};
  RowCache cache;
  for (int i = 0; i < 2; i++) {
    w.start.regs.set(Code<Isa>::kSystemResult, 4711);
    CHECK(w.walk(&cache).pcs() == Pcs{kWork, w.in_main, w.in_start});
    CHECK(w.walk(&cache).result.whole());
    w.start.regs.set(Code<Isa>::kSystemResult, 0);
    CHECK(w.walk(&cache).pcs() == Pcs{kWork});
    CHECK(w.walk(&cache).result.whole());
    w.start.regs.forget(Code<Isa>::kSystemResult);
    CHECK(w.walk(&cache).reasons()[0] == Reason::special_code);
  }
  // glibc's clone has no row there, but ends in a return.
  w.rows[kWork] = World<Isa>::gap();
  for (uint64_t result : {0, 4711}) {
    w.start.regs.set(Code<Isa>::kSystemResult, result);
    if (result && !w.kX86) CHECK(w.walk(&cache).reasons()[0] == Reason::special_code);
    else CHECK(w.walk(&cache).pcs() == (result ? Pcs{kWork, w.in_main, w.in_start} : Pcs{kWork}));
    CHECK(w.walk(&cache).result.whole() == (!result || w.kX86));
  }
  w.start.regs.set(Code<Isa>::kSystemResult, 4711);
  w.start.pc_is_return = true;
  w.call_site(kWork + 8), w.at(kWork + 8, w.kWorkSp);
  CHECK(w.walk().reasons()[0] == Reason::special_code);
}

TEST_CASE("walk: interrupted at the restorer's own second instruction") {
  Signal<X86_64> w;
  w.specials = {{kRestorer, kRestorer + 9, static_cast<uint32_t>(SpecialKind::signal_return), 0}};
  uint64_t frame = w.start.regs.sp().value + 32;
  w.at(kRestorer + 7, frame);
  auto stack = w.walk_reliable();
  CHECK(stack.pcs() == Pcs{kRestorer + 7, kWork, w.in_main, w.in_start});
  CHECK(stack.result.whole());
}

TEST_CASE_TEMPLATE("walk: only to the first instruction of a restorer does a handler return", Isa, X86_64, Aarch64) {
  for (uint64_t behind : {4, 8, 9, 16}) {
    for (bool in_image : {true, false}) {
      Signal<Isa> w;
      const uint64_t restorer = in_image ? kRestorer : 0x700000000000, end = restorer + 16;
      w.specials = {{restorer, end, static_cast<uint32_t>(SpecialKind::signal_return), 0}};
      w.word(w.start.regs.sp().value + 24, restorer + behind);
      RowCache cache;
      for (RowCache* with : {static_cast<RowCache*>(nullptr), &cache, &cache})
        CHECK(w.walk(with).reasons() == Reasons{R, in_image ? Reason::ra_not_after_call : Reason::unknown_code});
      w.word(w.start.regs.sp().value + 24, restorer);
      for (RowCache* with : {static_cast<RowCache*>(nullptr), &cache, &cache})
        CHECK(w.walk(with).pcs() == Pcs{kHandler + 8, restorer, kWork, w.in_main, w.in_start});
      // What that stack left in the cache says nothing of code that begins where the restorer ends.
      if (!in_image) continue;
      w.rows[end] = World<Isa>::row(Isa::kSp, 8), w.word(w.kWorkSp, w.in_main);
      w.at(end, w.kWorkSp);
      CHECK(w.walk(&cache).pcs() == Pcs{end, w.in_main, w.in_start});
    }
  }
}

TEST_CASE("walk: a call through null shows its caller, marked") {
  Signal<X86_64> w;
  w.at(0, w.kWorkSp);
  auto stack = w.walk();
  CHECK(stack.pcs() == Pcs{0, w.in_main, w.in_start});
  CHECK(stack.reasons() == Reasons{Reason::null_pc, Reason::null_pc, Reason::end});
  CHECK((stack.frames[1].recovered & kMarked) != 0);
  CHECK(w.walk_reliable().frames.size() == 1);
  w.word(w.kWorkSp, 0x1234);
  CHECK(w.walk().pcs() == Pcs{0});
}

TEST_CASE("walk: linkage stubs without rows") {
  constexpr uint64_t kPlt = 0x400700;
  Signal<X86_64> w;
  w.rows[kPlt - 0x80] = World<X86_64>::gap();
  w.nops(kPlt - 16, 64);
  w.bytes(kPlt, {0xff, 0x35, 2, 0, 0, 0, 0xff, 0x25, 4, 0, 0, 0, 0x0f, 0x1f, 0x40, 0});
  w.bytes(kPlt + 16, {0xff, 0x25, 6, 0, 0, 0, 0x68, 0, 0, 0, 0, 0xe9, 0xe0, 0xff, 0xff, 0xff});
  struct {
    uint64_t pc;
    int pushed;
  } points[] = {{kPlt + 16, 0}, {kPlt + 22, 0}, {kPlt + 27, 1}, {kPlt, 1}, {kPlt + 6, 2}};
  for (auto [pc, pushed] : points) {
    w.at(pc, w.kWorkSp - 8 * static_cast<uint64_t>(pushed));
    CHECK(w.walk().reasons() == Reasons{Reason::no_table_row});
  }
  w.specials = {{kPlt, kPlt + 32, static_cast<uint32_t>(SpecialKind::plt), 0}};
  for (auto [pc, pushed] : points) {
    w.at(pc, w.kWorkSp - 8 * static_cast<uint64_t>(pushed));
    auto stack = w.walk_reliable();
    CHECK(stack.pcs() == Pcs{pc, w.in_main, w.in_start});
    CHECK(stack.result.whole());
  }
}

TEST_CASE_TEMPLATE("walk: a pc in a detour is the displaced instruction's, with the sp it would have there (S38)", Isa,
                   X86_64, Aarch64) {
  constexpr uint64_t kDetour = 0x50000000;
  Signal<Isa> w;
  w.rows[kWork + 4] = World<Isa>::row(Isa::kSp, 24);  // the second displaced instruction stands behind `sub $16,%rsp`
  w.steps = {{0, -1, 0, 0}, {5, -1, 128, 0}, {24, 0, 0, 0}, {28, 4, 0, 0}, {40, 12, -8, 0}};
  w.detours = {{kDetour, kDetour + 60, kWork, 5, 0, 5, 0}};
  struct {
    uint64_t offset, sp, pc;
  } points[] = {{0, w.kWorkSp, kWork},  {5, w.kWorkSp - 128, kWork},     {16, w.kWorkSp - 128, kWork},
                {24, w.kWorkSp, kWork}, {28, w.kWorkSp - 16, kWork + 4}, {44, w.kWorkSp - 8, kWork + 12}};
  for (auto [offset, sp, pc] : points) {
    w.at(kDetour + offset, sp);
    auto stack = w.walk_reliable();
    CHECK(stack.pcs() == Pcs{pc, w.in_main, w.in_start});
    CHECK(stack.result.whole());
    CHECK(stack.frames[0].recovered == kInDetour);
    CHECK(!stack.frames[0].is_return);
  }
}

TEST_CASE("walk: above sonde_entry stands the probed function at its patch address (S39)") {
  constexpr uint64_t kEntry = 0x400800, kPatch = kWork;
  Signal<X86_64> w;
  // RA = the constant kPatch + 1, as the engine's rule computes it; CFA = sp at the site.
  w.expressions = {{0x0c, 0x01, 0x02, 0x40, 0x00}};
  Row entry{.cfa_offset = 144, .cfa_reg = X86_64::rsp, .ra_kind = ValueKind::is_expression, .ra_offset = 0};
  w.rows[kEntry] = entry;
  w.nops(kEntry, 0x40);
  w.rows[kPatch - 0x20] = World<X86_64>::gap();  // the row of pc - 1 would be another function's
  w.specials = {{kEntry, kEntry + 0x100, static_cast<uint32_t>(SpecialKind::entry_trampoline), 0}};
  w.at(kEntry, w.kWorkSp - 144);
  auto stack = w.walk_reliable();
  CHECK(stack.pcs() == Pcs{kEntry, kPatch, w.in_main, w.in_start});
  CHECK(stack.result.whole());
  CHECK(!stack.frames[1].is_return);
  CHECK(stack.frames[1].recovered == kInDetour);
}

TEST_CASE("walk: sonde's trap handler interrupted one byte behind the trap") {
  Signal<X86_64> w;
  w.rows[kWork + 1] = World<X86_64>::row(X86_64::rsp, 16);  // wrong where the trap has not run the instruction yet
  w.raise(w.kWorkSp - w.kFrame, kWork + 1, w.kWorkSp);
  w.detours = {{0x50000000, 0x50000040, kWork, 5, 0, 0, 0}};
  auto elsewhere = w.walk();
  CHECK(elsewhere.pcs()[2] == kWork + 1);
  w.specials = {{kHandler, kHandler + 0x40, static_cast<uint32_t>(SpecialKind::trap_handler), 0}};
  auto stack = w.walk_reliable();
  CHECK(stack.pcs() == w.pcs());
  CHECK(stack.result.whole());
  CHECK(stack.frames[2].recovered == kInDetour);
}

TEST_CASE("walk: a displaced call is a call") {
  Signal<X86_64> w;
  w.nops(w.in_main - 8, 8);
  w.bytes(w.in_main - 5, {0xe9, 1, 2, 3, 4});
  CHECK(w.walk().result.reason == Reason::ra_not_after_call);
  w.detours = {{0x50000000, 0x50000040, w.in_main - 5, 5, 0, 0, 0}};
  CHECK(w.walk_reliable().pcs() == w.pcs());
}

TEST_CASE("walk: at a return instruction the row must agree, and registers are restored") {
  auto make = [](Row row) {
    Signal<X86_64> w;
    w.rows[kBad] = row;
    w.nops(kBad, 0x20);
    w.bytes(kBad, {0xc3});
    w.at(kBad, w.kWorkSp);
    return w;
  };
  SUBCASE("a row that puts the return address elsewhere is refuted") {
    auto w = make(World<X86_64>::row(X86_64::rsp, 48));
    w.word(w.kWorkSp + 40, w.in_start);  // another return address, as stale stacks hold them
    CHECK(w.walk_reliable().reasons() == Reasons{Reason::no_table_row});
  }
  SUBCASE("a jump made by push and ret is believed to its row") {
    auto w = make(World<X86_64>::row(X86_64::rsp, 16));
    w.word(w.kWorkSp - 8, kWork);
    w.at(kBad, w.kWorkSp - 8);
    CHECK(w.walk_reliable().pcs() == Pcs{kBad, w.in_main, w.in_start});
  }
  SUBCASE("a rule of rbp that leave has made stale") {
    Row row = World<X86_64>::row(X86_64::rsp, 8);
    row.saved[0] = {0, ValueKind::at_expression};
    auto w = make(row);
    w.expressions = {{0x76, 0x00}};  // at rbp + 0
    w.rows[kMain] = World<X86_64>::row(X86_64::rbp, 16);
    uint64_t record = w.kWorkSp + 24;
    w.at(kBad, w.kWorkSp, record);
    CHECK(w.walk_reliable().pcs() == Pcs{kBad, w.in_main, w.in_start});
    // One instruction earlier: lea -8(%r10),%rsp, CFA still r10.
    row.cfa_reg = X86_64::r10, row.cfa_offset = 0;
    w.rows[kBad + 8] = row;
    w.at(kBad + 8, w.kWorkSp - 32, record);
    w.start.regs.set(X86_64::r10, w.kWorkSp + 8);
    CHECK(w.walk_reliable().pcs() == Pcs{kBad + 8, w.in_main, w.in_start});
    // Before `leave` the rule is right: main's frame pointer stands where rbp points.
    w.word(w.kWorkSp - 16, record);
    w.at(kBad + 8, w.kWorkSp - 32, w.kWorkSp - 16);
    w.start.regs.set(X86_64::r10, w.kWorkSp + 8);
    CHECK(w.walk_reliable().pcs() == Pcs{kBad + 8, w.in_main, w.in_start});
  }
}

TEST_CASE("walk: where execution stands a frame may have no size, elsewhere not") {
  Signal<X86_64> w;
  w.rows[kWork] = World<X86_64>::row(X86_64::rsp, 0);  // as before `jmp *-8(%rsp)`
  w.at(kWork, w.kWorkSp + 8);
  CHECK(w.walk_reliable().pcs() == Pcs{kWork, w.in_main, w.in_start});
  w.rows[kMain] = World<X86_64>::row(X86_64::rsp, 0);
  CHECK(w.walk_reliable().reasons() == Reasons{R, Reason::non_progress});
}

TEST_CASE("walk: rows that describe the context to come are not believed") {
  Signal<X86_64> w;
  // As in longjmp: CFA from a register that holds the new sp, return address in another register.
  Row row;
  row.cfa_reg = X86_64::r8, row.ra_kind = ValueKind::in_register, row.ra_offset = X86_64::rdx;
  w.rows[kWork] = row;
  w.at(kWork, w.kWorkSp);
  w.start.regs.set(X86_64::r8, w.kWorkSp + 48), w.start.regs.set(X86_64::rdx, w.in_start);
  CHECK(w.walk_reliable().reasons() == Reasons{Reason::special_code});
  // vfork keeps its return address in a register, above a frame that is its own.
  w.rows[kWork].cfa_reg = X86_64::rsp;
  w.at(kWork, w.kWorkSp + 8);
  w.start.regs.set(X86_64::rdx, w.in_main);
  CHECK(w.walk_reliable().pcs() == Pcs{kWork, w.in_main, w.in_start});
}

TEST_CASE("walk: AArch64 leaf, and a link register that a call has overwritten (S31)") {
  Signal<Aarch64> w;
  Row leaf{.cfa_reg = Aarch64::sp, .ra_kind = ValueKind::same};
  w.rows[kWork] = leaf;
  uint64_t frame = w.start.regs.sp().value + 32;
  w.word(frame + Code<Aarch64>::signal_register(Aarch64::x30), w.in_main);
  w.word(frame + Code<Aarch64>::signal_register(Aarch64::sp), w.kWorkSp + 8);
  auto stack = w.walk_reliable();
  CHECK(stack.pcs() == w.pcs());
  CHECK(stack.result.whole());
  // The same row at a return address: x30 holds that very address.
  w.rows[kMain] = Row{.cfa_offset = 32, .cfa_reg = Aarch64::sp, .ra_kind = ValueKind::same};
  CHECK(w.walk().reasons() == Reasons{R, R, R, Reason::no_table_row});
}

TEST_CASE("walk: AArch64 return addresses lose their authentication code") {
  Signal<Aarch64> w;
  w.rows[kMain].flags = kRowRaSigned;
  w.word(w.kWorkSp + 8 + 32 - 8, w.in_start | 0xa55a000000000000);
  CHECK(w.walk_reliable().pcs() == w.pcs());
}

}  // namespace sonde::test
