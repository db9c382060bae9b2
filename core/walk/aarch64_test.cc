// Code of AArch64 whose rows are missing, describe something else, or forget what was pushed. Words as GNU as 2.40 makes them.
#include "core/walk/world_test.h"

namespace sonde::test {
namespace {

constexpr uint64_t kFunction = 0x400100, kMain = 0x400200, kStart = 0x400300, kCallee = 0x400400;
constexpr Reason R = Reason::reliable;
using Pcs = std::vector<uint64_t>;
using Reasons = std::vector<Reason>;

Row rule(int cfa, ValueKind ra, int ra_offset = 0, uint8_t reg = Aarch64::sp) {
  Row row;
  row.cfa_offset = cfa, row.cfa_reg = reg, row.ra_kind = ra, row.ra_offset = ra_offset;
  return row;
}

// Execution stands in kFunction, called by kMain, which was called by kStart.
struct Called : World<Aarch64> {
  static constexpr uint64_t kSp = kStackEnd - 0x400;  // of kMain, when it makes the call
  uint64_t in_main, in_start;

  Called() {
    rows[kFunction] = rule(0, ValueKind::same);
    rows[kMain] = row(Aarch64::sp, 32);
    rows[kStart] = outermost();
    rows[kCallee] = row(Aarch64::sp, 32);
    in_main = call_site(kMain + 0x20), in_start = call_site(kStart + 0x20);
    for (uint64_t a = kStackEnd - 0x2000; a < kStackEnd; a += 8) word(a, 0xdead0000);
    word(kSp + 32 - 8, in_start);
    nops(kFunction - 16, 0x80);
  }
  void special(SpecialKind kind, uint64_t begin = kFunction, uint64_t size = 0x80) {
    specials.push_back({begin, begin + size, static_cast<uint32_t>(kind), 0});
  }
  void code(uint64_t at, std::vector<uint32_t> words) {
    for (uint32_t insn : words) {
      for (unsigned i = 0; i < 4; i++) memory[at + i] = static_cast<uint8_t>(insn >> 8 * i);
      at += 4;
    }
  }
  void stands(uint64_t pc, uint64_t sp, uint64_t lr) { at(pc, sp), start.regs.set(Aarch64::x30, lr); }
  Pcs pcs(uint64_t pc) const { return {pc, in_main, in_start}; }
};

}  // namespace

TEST_CASE("walk: AArch64 linkage stubs without rows, at each of their instructions (S20)") {
  Called w;
  w.rows[kFunction] = World<Aarch64>::gap();
  w.special(SpecialKind::plt);
  // header, 32 bytes; a stub; a stub for branch protection
  w.code(kFunction, {0xa9bf7bf0, 0x90000090, 0xf947fe11, 0x913fe210, 0xd61f0220, 0xd503201f, 0xd503201f, 0xd503201f,
                     0x90000090, 0xf9400211, 0x91000210, 0xd61f0220,  //
                     0xd503245f, 0x90000090, 0xf9400611, 0x91002210, 0xd503219f, 0xd61f0220});
  auto check = [&](uint64_t pc, uint64_t pushed) {
    w.stands(pc, w.kSp - pushed, w.in_main);
    auto stack = w.walk_reliable();
    CHECK(stack.pcs() == w.pcs(pc));
    CHECK(stack.result.whole());
    CHECK(stack.frames[0].cfa == Addr(w.kSp));
  };
  check(kFunction, 0);
  for (uint64_t i = 1; i <= 4; i++) check(kFunction + 4 * i, 16);
  for (uint64_t i = 8; i < 18; i++) check(kFunction + 4 * i, 0);
  // Not a stub's, and not where execution stands.
  w.stands(kFunction + 0x48, w.kSp, w.in_main);
  w.code(kFunction + 0x48, {0xf9000011});
  CHECK(w.walk().reasons()[0] == Reason::no_table_row);
  w.start.pc_is_return = true;
  w.stands(w.call_site(kFunction + 8), w.kSp, w.in_main);
  CHECK(w.walk().reasons()[0] == Reason::no_table_row);
}

TEST_CASE("walk: AArch64 rows that describe a context to come (S29)") {
  Called w;
  w.rows[kFunction] = rule(0, ValueKind::same, 0, Aarch64::x0);  // __longjmp, with x30 loaded
  w.stands(kFunction, w.kSp - 64, w.in_main);
  w.start.regs.set(Aarch64::x0, w.kSp);
  CHECK(w.walk().reasons()[0] == Reason::special_code);
  CHECK(w.walk_reliable().frames.size() == 1);
  // A frame that is made by a loop is found by a scratch register meanwhile (-fstack-clash-protection).
  w.rows[kFunction].cfa_reg = 12;
  w.start.regs.set(12, w.kSp);
  CHECK(w.walk_reliable().pcs() == w.pcs(kFunction));
}

TEST_CASE("walk: AArch64 lazy resolver, which the first stub has pushed two words for (S20)") {
  Called w;
  const uint64_t entered = w.kSp - 16;
  w.word(entered, 0x1111), w.word(entered + 8, w.in_main);
  w.rows[kFunction] = rule(0, ValueKind::same);
  w.rows[kFunction + 4] = rule(0, ValueKind::at_cfa, 8);
  w.rows[kFunction + 8] = rule(208, ValueKind::at_cfa, 8);
  w.rows[kFunction + 0x40] = rule(-16, ValueKind::at_cfa, 8);
  auto check = [&](uint64_t pc, uint64_t sp, uint64_t lr) {
    w.stands(pc, sp, lr);
    auto stack = w.walk_reliable();
    CHECK(stack.pcs() == w.pcs(pc));
    CHECK(stack.result.whole());
    REQUIRE(stack.frames.size() == 3);
    CHECK(stack.frames[0].cfa == Addr(w.kSp));
  };
  w.special(SpecialKind::lazy_resolver);
  check(kFunction, entered, w.in_main);
  check(kFunction + 4, entered, w.in_main);
  check(kFunction + 8, entered - 208, 0);
  const uint64_t in_resolver = w.call_site(kFunction + 0x20);
  check(kFunction + 0x20, entered - 208, in_resolver);  // x30 is the resolver's own
  w.word(entered + 8, 0xdead0000);  // a signal's frame has come over it
  check(kFunction + 0x40, w.kSp, w.in_main);
  // From further in.
  w.word(entered + 8, w.in_main);
  w.word(entered - 208 - 8, in_resolver);
  w.stands(kCallee, entered - 208 - 32, 0);
  CHECK(w.walk_reliable().pcs() == Pcs{kCallee, in_resolver, w.in_main, w.in_start});
  CHECK(w.walk().frames[1].cfa == Addr(w.kSp));
}

TEST_CASE("walk: AArch64 return addresses that are signed are stripped where rows say so, in x30 and on the stack") {
  constexpr uint64_t kCode = 0x0035000000000000;  // in bits 48 to 54
  Called w;
  w.rows[kFunction] = rule(0, ValueKind::same);
  w.rows[kFunction].flags = kRowRaSigned;
  w.rows[kMain].flags = kRowRaSigned;
  w.word(w.kSp + 32 - 8, w.in_start | kCode);
  w.stands(kFunction, w.kSp, w.in_main | kCode);
  CHECK(w.walk_reliable().pcs() == w.pcs(kFunction));
  CHECK(w.walk().result.whole());
  // A row that says nothing of it is believed: the address is as it is, and in no image.
  w.rows[kFunction].flags = 0;
  CHECK(w.walk_reliable().reasons() == Reasons{R, Reason::unknown_code});
  CHECK(w.walk_reliable().pc(1) == (w.in_main | kCode));
}

}  // namespace sonde::test
