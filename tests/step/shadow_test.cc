// The truth itself, on made-up instructions: what they do to it follows from their words.
#include "tests/step/shadow.h"

#include <doctest/doctest.h>

namespace sonde::stepping {
namespace {

constexpr Insn kCall{5, Effect::call}, kReturn{1, Effect::ret}, kOther{4, Effect::other},
    kJump{2, Effect::jump_indirect}, kSetsSp{3, Effect::sets_sp};

struct Stack {
  Shadow shadow;
  uint64_t sp = 0x7ff000, pc = 0x1000;

  Stack() { shadow.begin(0x800000); }
  void step(const Insn& insn, uint64_t new_pc, uint64_t new_sp) {
    shadow.stepped(insn, pc, sp, new_pc, new_sp);
    pc = new_pc, sp = new_sp;
  }
  void call(uint64_t to) { step(kCall, to, sp - 8); }
  std::vector<uint64_t> chain() const {
    std::vector<uint64_t> pcs;
    for (const Call& call : shadow.calls()) pcs.push_back(call.pc);
    return pcs;
  }
};
using Pcs = std::vector<uint64_t>;

// Of a processor whose calls leave the return address in a register.
struct LinkStack : Stack {
  LinkStack() { shadow = Shadow(Return::in_register), shadow.begin(0x800000); }
  void call(uint64_t to) { step({4, Effect::call}, to, sp); }
  void jump(uint64_t to) { step({4, Effect::jump_indirect}, to, sp); }
  void ret(uint64_t to) { step({4, Effect::ret}, to, sp); }
  void move_sp(int64_t by) { step({4, Effect::other}, pc + 4, sp + static_cast<uint64_t>(by)); }
};

}  // namespace

TEST_CASE("shadow: calls and returns") {
  Stack s;
  s.call(0x2000);
  s.step(kOther, 0x2004, s.sp - 32);
  s.call(0x3000);
  CHECK(s.chain() == Pcs{0x1005, 0x2009});
  CHECK(s.shadow.calls().back().slot == s.sp);
  CHECK(s.shadow.calls().back().caller_sp == s.sp + 8);
  s.step(kJump, 0x4000, s.sp);  // a tail call
  CHECK(s.chain() == Pcs{0x1005, 0x2009});
  s.step(kOther, 0x4004, s.sp - 8);
  s.step(kReturn, 0x5000, s.sp + 8);  // a jump by push and ret
  CHECK(s.chain() == Pcs{0x1005, 0x2009});
  s.step(kReturn, 0x2009, s.sp + 8);
  CHECK(s.chain() == Pcs{0x1005});
  CHECK(s.shadow.known());
}

TEST_CASE("shadow: between a stack pointer that leaves frames and the jump nothing is known") {
  Stack s;
  s.call(0x2000);
  const uint64_t home = s.sp;
  s.call(0x3000);
  s.call(0x4000);
  s.step(kSetsSp, 0x4003, home);
  CHECK(!s.shadow.known());
  s.step(kJump, 0x2100, home);
  CHECK(s.shadow.known());
  CHECK(s.chain() == Pcs{0x1005});
  CHECK(s.shadow.abandoned == 1);
  // A return address that is popped and pushed again was never lost.
  s.step(kOther, 0x2101, s.sp + 8);
  CHECK(!s.shadow.known());
  s.step(kOther, 0x2102, s.sp - 8);
  CHECK(s.shadow.known());
  CHECK(s.chain() == Pcs{0x1005});
}

TEST_CASE("shadow: signals, also within signals, and handlers that jump out") {
  Stack s;
  s.call(0x2000);
  const uint64_t home = s.sp;
  s.shadow.interrupted(0x2000, s.sp, s.sp - 1000, 0x9000);
  s.pc = 0x6000, s.sp -= 1000;
  CHECK(s.chain() == Pcs{0x1005, 0x2000, 0x9000});
  s.shadow.interrupted(0x6000, s.sp, s.sp - 1000, 0x9000);
  s.pc = 0x6000, s.sp -= 1000;
  s.step(kReturn, 0x9000, s.sp + 8);
  CHECK(s.chain() == Pcs{0x1005, 0x2000, 0x9000, 0x6000});
  s.shadow.signal_returned(s.sp + 992);
  s.pc = 0x6000, s.sp += 992;
  CHECK(s.chain() == Pcs{0x1005, 0x2000, 0x9000});
  CHECK(s.shadow.known());
  s.step(kSetsSp, 0x6003, home);
  s.step(kJump, 0x2100, home);
  CHECK(s.chain() == Pcs{0x1005});
  s.shadow.signal_returned(home);  // of no signal
  CHECK(!s.shadow.known());
}

TEST_CASE("shadow: another stack and back") {
  Stack s;
  s.call(0x2000);
  const uint64_t home = s.sp;
  CHECK(s.shadow.bottom_known());
  s.step(kSetsSp, 0x2003, 0x500000);
  s.step(kReturn, 0x7000, s.sp + 8);
  s.call(0x8000);
  CHECK(!s.shadow.bottom_known());
  CHECK(s.chain() == Pcs{0x7005});
  s.step(kSetsSp, 0x8003, home + 8);  // as swapcontext has saved it; then it pushes the pc to return to
  CHECK(!s.shadow.known());
  s.step(kOther, 0x8004, home);
  CHECK(s.shadow.known());
  CHECK(s.shadow.bottom_known());
  CHECK(s.chain() == Pcs{0x1005});
  s.step(kReturn, 0x1005, s.sp + 8);
  CHECK(s.chain().empty());
  CHECK(s.shadow.stack_switches == 2);
}

TEST_CASE("shadow: calls that were there before are proven by their returns") {
  Stack s;
  s.shadow.begin(0x800000, {{.slot = 0x7ff008, .pc = 0x100, .caller_sp = 0x7ff010, .adopted = true},
                            {.slot = 0x7ff000, .pc = 0x200, .caller_sp = 0x7ff008, .adopted = true}});
  s.step(kReturn, 0x200, s.sp + 8);
  CHECK(s.shadow.adopted_returned == 1);
  s.step(kReturn, 0x300, s.sp + 8);
  CHECK(s.shadow.adopted_false == 1);
}

TEST_CASE("shadow: calls that push nothing, of functions with and without a frame") {
  LinkStack s;
  const uint64_t base = s.sp;
  s.call(0x2000);
  CHECK(s.chain() == Pcs{0x1004});
  CHECK(s.shadow.calls().back().caller_sp == base);
  s.jump(0x2100);  // a linkage stub
  CHECK(s.chain() == Pcs{0x1004});
  s.move_sp(-32);
  s.call(0x3000);
  s.step({4, Effect::other}, 0x3004, s.sp);
  CHECK(s.chain() == Pcs{0x1004, 0x2108});
  s.ret(0x2108);
  CHECK(s.chain() == Pcs{0x1004});
  s.move_sp(32);
  CHECK(s.shadow.known());
  CHECK(s.chain() == Pcs{0x1004});
  s.jump(0x4000);  // a tail call
  CHECK(s.chain() == Pcs{0x1004});
  s.ret(0x1004);
  CHECK(s.chain().empty());
}

TEST_CASE("shadow: calls that push nothing, left by a jump") {
  LinkStack s;
  s.call(0x2000);
  s.move_sp(-32);
  const uint64_t home = s.sp;
  s.call(0x9000);  // setjmp
  s.ret(0x2008);
  SUBCASE("from further in") {
    s.call(0x3000);
    s.move_sp(-32);
    s.call(0x4000);
    s.step({4, Effect::sets_sp}, 0x4004, home);
    CHECK(!s.shadow.known());
    s.jump(0x2008);
    CHECK(s.shadow.abandoned == 1);
  }
  SUBCASE("to a landing pad, where no call has returned to") {
    s.call(0x3000);
    s.move_sp(-32);
    s.call(0x4000);
    s.move_sp(32);
    CHECK(!s.shadow.known());
    s.ret(0x2050);
  }
  SUBCASE("from the function itself, with its own sp") {
    s.call(0x4000);
    s.jump(0x2008);
  }
  CHECK(s.shadow.known());
  CHECK(s.chain() == Pcs{0x1004});
}

TEST_CASE("shadow: a signal where calls push nothing") {
  LinkStack s;
  s.call(0x2000);
  const uint64_t home = s.sp;
  s.shadow.interrupted(0x2000, home, home - 4672, 0x9000);
  s.pc = 0x6000, s.sp = home - 4672;
  s.move_sp(-16);
  s.move_sp(16);
  CHECK(s.shadow.known());
  CHECK(s.chain() == Pcs{0x1004, 0x2000, 0x9000});
  s.ret(0x9000);
  CHECK(s.chain() == Pcs{0x1004, 0x2000});
  s.shadow.signal_returned(home);
  CHECK(s.chain() == Pcs{0x1004});
  CHECK(s.shadow.known());
}

TEST_CASE("shadow: stacks switched where calls push nothing") {
  LinkStack s;
  s.call(0x2000);  // swapcontext
  const uint64_t home = s.sp;
  s.call(0x3000);  // setcontext
  s.step({4, Effect::sets_sp}, 0x3004, 0x500000);
  s.jump(0x7000);
  s.call(0x8000);
  CHECK(!s.shadow.bottom_known());
  CHECK(s.chain() == Pcs{0x7004});
  s.step({4, Effect::sets_sp}, 0x8004, home);
  s.jump(0x2040);  // not behind the call, but in the function that made it
  CHECK(s.shadow.bottom_known());
  CHECK(s.chain() == Pcs{0x1004});
  s.ret(0x1004);
  CHECK(s.chain().empty());
}

}  // namespace sonde::stepping
