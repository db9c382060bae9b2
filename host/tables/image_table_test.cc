// Tables of whole files whose parts are missing or lie.
#include "host/tables/image_table.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <fstream>
#include <random>

#include "core/unwind/table.h"

namespace sonde::host {
namespace {

std::vector<uint8_t> linker() {
  std::ifstream in("/lib64/ld-linux-x86-64.so.2", std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

CompiledTable table_of(std::vector<uint8_t> bytes) {
  auto image = Image::from_memory(std::move(bytes), "linker");
  REQUIRE(image);
  auto table = compile_table(**image);
  REQUIRE(table);
  return *std::move(table);
}

TEST_CASE("image table: a lying .eh_frame_hdr changes nothing") {
  auto bytes = linker();
  CompiledTable good = table_of(bytes);
  CHECK(good.stats.changes > 1000);
  auto image = Image::from_memory(bytes, "linker");
  REQUIRE(image);
  const Section* header = (*image)->section(".eh_frame_hdr");
  REQUIRE(header);
  std::mt19937 random(8);
  for (uint64_t i = 0; i < header->size; i++) bytes[header->offset.value + i] = static_cast<uint8_t>(random());
  CHECK(table_of(bytes).bytes == good.bytes);
}

TEST_CASE("image table: without .eh_frame everything is a gap") {
  auto bytes = linker();
  auto name = std::search(bytes.begin(), bytes.end(), ".eh_frame", ".eh_frame" + 10);  // with its zero: not .eh_frame_hdr
  REQUIRE(name != bytes.end());
  *(name + 1) = 'x';
  CompiledTable table = table_of(bytes);
  CHECK(table.stats.changes == 0);
  CHECK(Table::at(table.bytes.data()).lookup(ImageAddr(0x10000)) == nullptr);
}

}  // namespace
}  // namespace sonde::host
