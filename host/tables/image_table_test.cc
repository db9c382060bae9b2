// Tables of whole files whose parts are missing or lie.
#include "host/tables/image_table.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <filesystem>
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
  auto name =
      std::search(bytes.begin(), bytes.end(), ".eh_frame", ".eh_frame" + 10);  // with its zero: not .eh_frame_hdr
  REQUIRE(name != bytes.end());
  *(name + 1) = 'x';
  CompiledTable table = table_of(bytes);
  CHECK(table.stats.changes == 0);
  CHECK(Table::at(table.bytes.data()).lookup(ImageAddr(0x10000)) == nullptr);
}

TEST_CASE("image table: without section headers .eh_frame is found through its header") {
  auto bytes = linker();
  CompiledTable good = table_of(bytes);
  std::fill(bytes.begin() + 0x28, bytes.begin() + 0x30, 0);  // e_shoff
  std::fill(bytes.begin() + 0x3c, bytes.begin() + 0x40, 0);  // e_shnum, e_shstrndx
  CompiledTable found = table_of(bytes);
  CHECK(found.stats.entries == good.stats.entries);
  CHECK(found.bytes == good.bytes);
}

// Debian's own files: nothing that a row cannot say, and a table of at most 0.6 times what it is made from.
void check_stats(const char* path, uint64_t at_least) {
  if (!std::filesystem::exists(path)) {
    MESSAGE("skipped: " << path << " is not installed");
    return;
  }
  auto image = Image::open(path);
  REQUIRE(image);
  auto compiled = compile_table(**image);
  REQUIRE(compiled);
  const TableStats& stats = compiled->stats;
  CHECK(stats.changes > at_least);
  CHECK(stats.inexpressible_changes * 100000 < stats.changes);
  for (uint64_t count : stats.inexpressible) CHECK(count == 0);
  CHECK(stats.unusable_entries == 0);
  CHECK(stats.lost_registers == 0);
  CHECK(stats.refused.empty());
  CHECK(stats.table_bytes * 10 <= stats.source_bytes * 6);
  MESSAGE(path << ": " << stats.changes << " rows, " << stats.rows << " distinct, " << stats.by_expression
               << " by expression, " << stats.inexpressible_changes << " inexpressible; " << stats.table_bytes << " of "
               << stats.source_bytes << " bytes");
}

TEST_CASE("image table: rows and size of libc") { check_stats("/lib/x86_64-linux-gnu/libc.so.6", 20000); }
TEST_CASE("image table: rows and size of libstdc++") { check_stats("/usr/lib/x86_64-linux-gnu/libstdc++.so.6", 25000); }
TEST_CASE("image table: rows and size of libcrypto") { check_stats("/usr/lib/x86_64-linux-gnu/libcrypto.so.3", 60000); }
TEST_CASE("image table: rows and size of python3") { check_stats("/usr/bin/python3", 40000); }
TEST_CASE("image table slow: rows and size of libLLVM" * doctest::skip()) {
  check_stats("/usr/lib/x86_64-linux-gnu/libLLVM-19.so", 800000);
}

}  // namespace
}  // namespace sonde::host
