#include "tests/step/emulated.h"

#include <doctest/doctest.h>

namespace sonde::stepping {

// Words as GNU as 2.40 makes them.
TEST_CASE("aarch64: what an instruction does to pc and sp") {
  auto effect = [](uint32_t word) { return aarch64_insn(word).effect; };
  CHECK(effect(0x94000012) == Effect::call);  // bl
  CHECK(effect(0x97ffffef) == Effect::call);
  CHECK(effect(0xd63f0060) == Effect::call);  // blr x3
  CHECK(effect(0xd63f0c3f) == Effect::call);  // blrabz x1
  CHECK(effect(0xd73f0822) == Effect::call);  // blraa x1, x2
  CHECK(effect(0xd65f03c0) == Effect::ret);
  CHECK(effect(0xd65f0020) == Effect::ret);  // ret x1
  CHECK(effect(0xd65f0bff) == Effect::ret);  // retaa
  CHECK(effect(0xd65f0fff) == Effect::ret);  // retab
  CHECK(effect(0xd61f0220) == Effect::jump_indirect);  // br x17
  CHECK(effect(0xd71f0822) == Effect::jump_indirect);  // braa x1, x2
  CHECK(effect(0xd4000001) == Effect::system_call);
  CHECK(effect(0x910003bf) == Effect::sets_sp);  // mov sp, x29
  CHECK(effect(0x910043bf) == Effect::sets_sp);  // add sp, x29, #16
  CHECK(effect(0x910043ff) == Effect::other);  // add sp, sp, #16
  CHECK(effect(0x910003fd) == Effect::other);  // mov x29, sp
  CHECK(effect(0x14000012) == Effect::other);  // b
  CHECK(effect(0xd4200020) == Effect::other);  // brk #1
  CHECK(effect(0xa9bf7bfd) == Effect::other);  // stp x29, x30, [sp, #-16]!
  CHECK(aarch64_insn(0xd65f03c0).length == 4);
}

}  // namespace sonde::stepping
