#include "core/base/cursor.h"

#include <doctest/doctest.h>

#include <array>

using sonde::Cursor;

TEST_CASE("cursor: integers are little-endian and a read past the end sticks") {
  std::array<uint8_t, 5> bytes{1, 2, 3, 4, 5};
  Cursor c(bytes);
  CHECK(c.read<uint32_t>() == 0x04030201);
  CHECK(c.read<uint16_t>() == 0);
  CHECK(!c.ok());
  CHECK(c.read<uint8_t>() == 0);
}

TEST_CASE("cursor: LEB128 of DWARF 5 figure 22 and 23") {
  std::array<uint8_t, 9> bytes{0x02, 0x7f, 0x80, 0x01, 0xe5, 0x8e, 0x26, 0x80, 0x7f};
  Cursor c(bytes);
  CHECK(c.uleb() == 2);
  CHECK(c.uleb() == 127);
  CHECK(c.uleb() == 128);
  CHECK(c.uleb() == 624485);
  CHECK(c.sleb() == -128);
  CHECK(c.ok());
}

TEST_CASE("cursor: an endless LEB128 fails instead of running on") {
  std::array<uint8_t, 16> bytes;
  bytes.fill(0x80);
  Cursor c(bytes);
  c.uleb();
  CHECK(!c.ok());
}
