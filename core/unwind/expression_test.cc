// Operations one by one (DWARF 5 section 2.5.1), then bounds.
#include "core/unwind/expression.h"

#include <doctest/doctest.h>

#include <initializer_list>
#include <random>
#include <vector>

namespace sonde {
namespace {

struct Memory {
  // Word at address a is 0x1000 + a; nothing above 0x8000.
  static bool read(void*, Addr a, uint64_t* value) {
    if (a.value >= 0x8000) return false;
    *value = 0x1000 + a.value;
    return true;
  }
};

Result<uint64_t> run(std::vector<uint8_t> code, const uint64_t* initial = nullptr) {
  uint64_t regs[17] = {};
  regs[6] = 0x700, regs[7] = 0x500, regs[16] = 0x4011ab;
  ExpressionFrame frame{regs, 1 << 6 | 1 << 7 | 1 << 16, 17, nullptr, Memory::read};
  return evaluate(code, frame, initial);
}
void gives(uint64_t expected, std::vector<uint8_t> code) {
  CHECK(expression_is_known(code, 17));
  auto result = run(code);
  REQUIRE(result);
  CHECK(*result == expected);
}
void fails(ErrorCode code, std::vector<uint8_t> bytes) {
  auto result = run(bytes);
  REQUIRE(!result);
  CHECK(result.error().code == code);
}
constexpr uint64_t minus(uint64_t n) { return 0 - n; }

TEST_CASE("expression: constants") {
  gives(31, {0x4f});
  gives(0xfe, {0x08, 0xfe});
  gives(minus(2), {0x09, 0xfe});
  gives(0x8001, {0x0a, 0x01, 0x80});
  gives(minus(0x7fff), {0x0b, 0x01, 0x80});
  gives(0x80000001, {0x0c, 1, 0, 0, 0x80});
  gives(minus(0x7fffffff), {0x0d, 1, 0, 0, 0x80});
  gives(0x8000000000000001, {0x0e, 1, 0, 0, 0, 0, 0, 0, 0x80});
  gives(300, {0x10, 0xac, 0x02});
  gives(minus(2), {0x11, 0x7e});
}

TEST_CASE("expression: registers and memory") {
  gives(0x6f8, {0x76, 0x78});                       // breg6 -8
  gives(0x508, {0x92, 7, 8});                       // bregx 7 8
  gives(0x1000 + 0x6f8, {0x76, 0x78, 0x06});        // deref
  gives(0xf8, {0x76, 0x78, 0x94, 1});               // low byte of 0x16f8
  gives(0x16, {0x76, 0x79, 0x94, 1});               // its second byte
  gives(0x17000000, {0x76, 0x7e, 0x94, 4});         // 0x6fe: two bytes of 0x16f8's word, two of 0x1700's
}

TEST_CASE("expression: stack operations") {
  gives(2, {0x31, 0x32, 0x12, 0x13});      // 1 2 dup drop
  gives(1, {0x31, 0x32, 0x14});            // 1 2 over
  gives(1, {0x31, 0x32, 0x33, 0x15, 2});   // 1 2 3 pick 2
  gives(1, {0x31, 0x32, 0x16});            // 1 2 swap
  gives(2, {0x31, 0x32, 0x33, 0x17});      // 1 2 3 rot -> 3 1 2
  gives(1, {0x31, 0x32, 0x33, 0x17, 0x13});
  gives(3, {0x31, 0x32, 0x33, 0x17, 0x13, 0x13});
}

TEST_CASE("expression: arithmetic") {
  gives(5, {0x09, 0xfb, 0x19});            // abs -5
  gives(4, {0x36, 0x3c, 0x1a});            // 6 & 12
  gives(minus(3), {0x09, 0xf9, 0x32, 0x1b});  // -7 / 2
  gives(minus(1), {0x36, 0x37, 0x1c});     // 6 - 7
  gives(1, {0x37, 0x32, 0x1d});            // 7 mod 2
  gives(42, {0x36, 0x37, 0x1e});
  gives(minus(6), {0x36, 0x1f});
  gives(~uint64_t{6}, {0x36, 0x20});
  gives(14, {0x36, 0x3c, 0x21});
  gives(18, {0x36, 0x3c, 0x22});
  gives(306, {0x36, 0x23, 0xac, 0x02});    // plus_uconst 300
  gives(48, {0x36, 0x33, 0x24});
  gives(1, {0x3c, 0x33, 0x25});
  gives(minus(2), {0x09, 0xf8, 0x32, 0x26});
  gives(10, {0x36, 0x3c, 0x27});
  gives(0, {0x36, 0x08, 64, 0x24});
  gives(minus(1), {0x09, 0x80, 0x08, 200, 0x26});
  gives(uint64_t{1} << 63, {0x0e, 0, 0, 0, 0, 0, 0, 0, 0x80, 0x09, 0xff, 0x1b});  // smallest / -1 wraps
}

TEST_CASE("expression: comparisons are signed, jumps skip") {
  gives(1, {0x36, 0x36, 0x29});
  gives(0, {0x09, 0xff, 0x31, 0x2a});  // -1 >= 1
  gives(0, {0x31, 0x31, 0x2b});
  gives(1, {0x31, 0x31, 0x2c});
  gives(1, {0x09, 0xff, 0x31, 0x2d});
  gives(1, {0x31, 0x32, 0x2e});
  gives(5, {0x35, 0x2f, 1, 0, 0x36});          // skip over lit6
  gives(6, {0x35, 0x30, 0x28, 1, 0, 0x36});    // bra not taken
  gives(5, {0x35, 0x31, 0x28, 1, 0, 0x36});    // bra taken
  gives(5, {0x35, 0x96});
}

TEST_CASE("expression: the procedure linkage table's rule") {
  // CFA = rsp + 8 + ((rip & 15) >= 11) * 8 with rip = ...b
  gives(0x510, {0x77, 8, 0x80, 0, 0x3f, 0x1a, 0x3b, 0x2a, 0x33, 0x24, 0x22});
}

TEST_CASE("expression: the initial value lies below") {
  uint64_t cfa = 0x600;
  auto result = run({0x23, 8}, &cfa);
  REQUIRE(result);
  CHECK(*result == 0x608);
  CHECK(*run({}, &cfa) == 0x600);
}

TEST_CASE("expression: bounds and errors") {
  fails(ErrorCode::malformed, {});
  fails(ErrorCode::malformed, {0x22});
  fails(ErrorCode::malformed, {0x31, 0x14});
  fails(ErrorCode::malformed, {0x0c, 1, 2});
  fails(ErrorCode::malformed, {0x31, 0x30, 0x1b});
  fails(ErrorCode::malformed, {0x31, 0x30, 0x1d});
  fails(ErrorCode::malformed, {0x31, 0x2f, 0x00, 0x80});
  fails(ErrorCode::malformed, {0x31, 0x94, 9});
  fails(ErrorCode::not_found, {0x70, 0});
  fails(ErrorCode::not_found, {0x92, 0xff, 0x7f, 0});
  fails(ErrorCode::unreadable, {0x0c, 0, 0, 1, 0, 0x06});
  fails(ErrorCode::exhausted, {0x2f, 0xfd, 0xff});
  fails(ErrorCode::exhausted, std::vector<uint8_t>(40, 0x31));
  fails(ErrorCode::unsupported, {0x31, 0x31, 0x03});
  for (std::vector<uint8_t> bad : {std::vector<uint8_t>{0x03, 0, 0, 0, 0, 0, 0, 0, 0},
                                   {},
                                   {0x92, 17, 0},
                                   {0x0c, 1},
                                   {0x2f, 1, 0},
                                   {0x81, 0},
                                   {0x94, 0},
                                   {0x97},
                                   {0x50}})
    CHECK(!expression_is_known(bad, 17));
}

TEST_CASE("expression: random bytes end") {
  std::mt19937 random(3);
  for (int round = 0; round < 20000; round++) {
    std::vector<uint8_t> code(random() % 24);
    for (uint8_t& byte : code) byte = static_cast<uint8_t>(random());
    run(code);
    expression_is_known(code, 17);
  }
}

}  // namespace
}  // namespace sonde
