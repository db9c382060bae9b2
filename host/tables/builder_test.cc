// Packed tables: lookup against a plain list, and hostile bytes.
#include "host/tables/builder.h"

#include <doctest/doctest.h>

#include <random>

namespace sonde::host {
namespace {

constexpr uint32_t kX86_64 = 62;

Row numbered(int n) {
  Row row;
  row.cfa_reg = X86_64::rsp;
  row.cfa_offset = n;
  row.ra_kind = ValueKind::at_cfa;
  row.ra_offset = -8;
  return row;
}

// Row number in force at address by walking the list.
uint16_t expected_at(const std::vector<RowChange>& changes, uint64_t end, uint64_t address) {
  uint16_t row = kGapRow;
  if (address >= end) return row;
  for (const RowChange& change : changes)
    if (change.address() <= address) row = change.row;
  return row;
}

std::vector<RowChange> random_changes(std::mt19937& random, TableBuilder& builder, uint64_t base, unsigned count,
                                      unsigned max_step) {
  std::vector<RowChange> changes;
  uint64_t at = base;
  for (unsigned i = 0; i < count; i++) {
    uint16_t row = random() % 8 == 0 ? kGapRow : *builder.row(numbered(static_cast<int>(random() % 500)));
    changes.push_back({at, row});
    at += 1 + random() % max_step;
  }
  return changes;
}

TEST_CASE("table: every address finds the row that a plain list finds") {
  std::mt19937 random(1);
  for (unsigned max_step : {1u, 3u, 40u, 5000u, 70000u}) {
    TableBuilder builder(kX86_64);
    auto changes = random_changes(random, builder, 0x401234 + max_step, 400, max_step);
    uint64_t end = changes.back().address() + 77;
    auto bytes = builder.finish(changes, end);
    REQUIRE(bytes);
    auto table = Table::open(*bytes);
    REQUIRE(table);
    std::vector<uint64_t> probes = {0, 0x400fff, end - 1, end, end + 1, ~uint64_t{0}};
    for (const RowChange& change : changes)
      for (int delta : {-1, 0, 1}) probes.push_back(change.address() + static_cast<uint64_t>(delta));
    for (unsigned i = 0; i < 2000; i++)
      probes.push_back(changes[0].address() + random() % (end - changes[0].address()));
    for (uint64_t address : probes) {
      uint16_t expected = expected_at(changes, end, address);
      const Row* row = table->lookup(ImageAddr(address));
      CHECK((row ? row->cfa_offset : -1) == (expected == kGapRow ? -1 : builder.row(expected).cfa_offset));
    }
    uint64_t at = table->header().base;
    table->for_each([&](ImageAddr begin, ImageAddr finish, const Row* row) {
      CHECK(begin.value == at);
      CHECK(row == table->lookup(begin));
      CHECK(row == table->lookup(finish - 1));
      at = finish.value;
    });
    CHECK(at == end);
  }
}

// Numbers of one byte, of two, and the largest there are; each change is at an address of its own, three entries in the table.
TEST_CASE("table: more rows than one byte numbers, and as many as there can be") {
  for (unsigned count : {253u, 254u, 255u, 256u, 257u, 600u, 65535u}) {
    TableBuilder builder(kX86_64);
    std::vector<RowChange> changes;
    for (unsigned i = 0; i < count; i++) changes.push_back({0x1000 + i, *builder.row(numbered(static_cast<int>(i)))});
    for (unsigned i = 0; i < 1000; i++)  // the last row is the most frequent one, with gaps between
      changes.push_back({0x1000 + count + i, i % 2 ? *builder.row(numbered(static_cast<int>(count) - 1)) : kGapRow});
    auto bytes = builder.finish(changes, changes.back().address() + 1);
    REQUIRE(bytes);
    auto table = Table::open(*bytes);
    REQUIRE(table);
    CHECK(table->rows()[0].cfa_offset == static_cast<int>(count) - 1);
    unsigned wrong = 0;
    for (const RowChange& change : changes) {
      const Row* row = table->lookup(ImageAddr(change.address()));
      wrong += (row ? row->cfa_offset : -1) != (change.row == kGapRow ? -1 : builder.row(change.row).cfa_offset);
    }
    CHECK(wrong == 0);
  }
  TableBuilder builder(kX86_64);
  for (int i = 0; i < 65535; i++) builder.row(numbered(i));
  CHECK(!builder.row(numbered(65535)));
}

TEST_CASE("table: no rows is a table of gaps") {
  TableBuilder builder(kX86_64);
  auto bytes = builder.finish({}, 0x1000);
  REQUIRE(bytes);
  auto table = Table::open(*bytes);
  REQUIRE(table);
  CHECK(table->lookup(ImageAddr(0x800)) == nullptr);
  CHECK(table->lookup(ImageAddr(0x1000)) == nullptr);
}

TEST_CASE("table: equal rows and expressions are stored once") {
  TableBuilder builder(kX86_64);
  for (int round = 0; round < 2; round++)
    for (int i = 0; i < 3000; i++) CHECK(*builder.row(numbered(i)) == i);
  uint8_t a[] = {0x76, 0x78, 0x06}, b[] = {0x76, 0x70, 0x06};
  CHECK(*builder.expression(a) == 0);
  CHECK(*builder.expression(b) == 1);
  CHECK(*builder.expression(a) == 0);
  auto bytes = builder.finish({}, 0);
  auto table = Table::open(*bytes);
  REQUIRE(table);
  CHECK(table->expression(1)[1] == 0x70);
  CHECK(table->expression(2).empty());
}

TEST_CASE("table: code spread too far is refused") {
  TableBuilder builder(kX86_64);
  RowChange changes[] = {{0x1000, *builder.row(numbered(8))}};
  CHECK(!builder.finish(changes, uint64_t{1} << 40));
}

// A mutated table is refused, or it is accepted (its checksum made right) and lookups stay inside: run under the address
// sanitizer this also proves that no read leaves the bytes.
TEST_CASE("table: mutated bytes are refused or harmless") {
  std::mt19937 random(2);
  TableBuilder builder(kX86_64);
  uint8_t expression[] = {0x76, 0x78, 0x06};
  Row special = numbered(3);
  special.cfa_kind = CfaKind::expression;
  special.cfa_offset = *builder.expression(expression);
  REQUIRE(builder.row(special));
  auto changes = random_changes(random, builder, 0x10000, 300, 600);
  auto good = builder.finish(changes, changes.back().address() + 10);
  REQUIRE(good);
  for (size_t length = 0; length < good->size(); length += 7) CHECK(!Table::open(std::span(*good).first(length)));
  unsigned accepted = 0;
  for (int round = 0; round < 20000; round++) {
    std::vector<uint8_t> bytes = *good;
    for (unsigned n = 1 + random() % 3; n; n--) {
      size_t at = random() % (round % 2 ? sizeof(TableHeader) : bytes.size());
      bytes[at] = static_cast<uint8_t>(random() % 3 ? random() : 0xff);
    }
    bool header_only_checksum = !Table::open(bytes);
    auto* header = reinterpret_cast<TableHeader*>(bytes.data());
    header->checksum = table_checksum(std::span(bytes).subspan(kChecksummedFrom));
    auto table = Table::open(bytes);
    if (!table) continue;
    accepted += header_only_checksum;
    for (int i = 0; i < 50; i++) {
      const Row* row = table->lookup(ImageAddr(table->header().base + random() % (table->header().span + 100)));
      if (row) CHECK((row >= table->rows().data() && row < table->rows().data() + table->rows().size()));
    }
    CHECK(table->expression(static_cast<uint32_t>(random())).size() <= bytes.size());
    uint64_t at = table->header().base;
    table->for_each([&](ImageAddr begin, ImageAddr end, const Row*) {
      CHECK(begin.value == at);
      at = end.value;
    });
    CHECK(at == table->header().base + table->header().span);
  }
  CHECK(accepted > 100);  // the deeper checks were reached
}

}  // namespace
}  // namespace sonde::host
