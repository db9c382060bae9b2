// SFrame sections written field by field here, both versions, both machines, every size of row entry and offset; headers and
// functions that lie; and what Debian's assembler makes, against the .eh_frame of the same file at each address.
// The layout: The SFrame Format, Version 2, sections 2 to 4; version 1 has functions without the repeated size.
#include "host/tables/sframe.h"

#include <doctest/doctest.h>
#include <fmt/format.h>

#include <functional>
#include <random>

#include "host/image/testing.h"
#include "host/tables/compile.h"
#include "host/tables/image_table.h"
#include "host/tables/print.h"

namespace sonde::host {
namespace {

constexpr uint32_t kX86_64 = 62, kAarch64 = 183;
constexpr uint64_t kSection = 0x8000, kCode = 0x1000, kCodeEnd = 0x6000;
constexpr uint8_t kFp = 0, kSp = 1, kSigned = 0x80;  // in the info of a row
using Bytes = std::vector<uint8_t>;

void put(Bytes& out, uint64_t value, unsigned size) {
  for (unsigned i = 0; i < size; i++) out.push_back(static_cast<uint8_t>(value >> 8 * i));
}

struct RowEntry {
  uint32_t start;
  uint8_t base;  // kFp, kSp, also kSigned
  std::vector<int32_t> offsets;
  unsigned size = 1;  // of each offset
};

struct FunctionEntry {
  uint64_t begin;
  uint32_t size;
  std::vector<RowEntry> rows;
  unsigned address_size = 1;
  uint8_t repeat = 0;  // not 0: repeated blocks
  uint8_t info = 0;  // more bits of it
};

// A section from its parts. Each field of the header may be changed before bytes().
struct SFrameWriter {
  uint8_t version = 2, flags = 1, abi = 3, auxiliary = 0;
  int8_t fixed_fp = 0, fixed_ra = -8;
  std::vector<FunctionEntry> functions;
  int64_t functions_more = 0, rows_more = 0, row_bytes_more = 0, functions_at_more = 0, rows_at_more = 0;
  uint16_t magic = 0xdee2;

  Bytes bytes() const {
    Bytes table, rows;
    uint32_t count = 0;
    unsigned entry = version == 1 ? 17 : 20;
    for (const FunctionEntry& f : functions) {
      uint64_t from = flags & 4 ? kSection + 28 + auxiliary + table.size() : kSection;
      put(table, f.begin - from, 4);
      put(table, f.size, 4);
      put(table, rows.size(), 4);
      put(table, f.rows.size(), 4);
      put(table, (f.address_size == 1 ? 0u : f.address_size == 2 ? 1u : 2u) | (f.repeat ? 0x10u : 0u) | f.info, 1);
      if (version != 1) put(table, f.repeat, 1), put(table, 0, 2);
      for (const RowEntry& row : f.rows) {
        put(rows, row.start, f.address_size);
        put(rows, row.base | row.offsets.size() << 1 | (row.size == 1 ? 0u : row.size == 2 ? 1u : 2u) << 5, 1);
        for (int32_t offset : row.offsets) put(rows, static_cast<uint32_t>(offset), row.size);
        count++;
      }
    }
    REQUIRE(table.size() == entry * functions.size());
    Bytes out;
    put(out, magic, 2);
    put(out, version, 1), put(out, flags, 1), put(out, abi, 1);
    put(out, static_cast<uint8_t>(fixed_fp), 1), put(out, static_cast<uint8_t>(fixed_ra), 1), put(out, auxiliary, 1);
    put(out, functions.size() + static_cast<uint64_t>(functions_more), 4);
    put(out, count + static_cast<uint64_t>(rows_more), 4);
    put(out, rows.size() + static_cast<uint64_t>(row_bytes_more), 4);
    put(out, static_cast<uint64_t>(functions_at_more), 4);
    put(out, table.size() + static_cast<uint64_t>(rows_at_more), 4);
    out.insert(out.end(), auxiliary, 0xee);
    out.insert(out.end(), table.begin(), table.end());
    out.insert(out.end(), rows.begin(), rows.end());
    return out;
  }
};

struct Compiled {
  explicit Compiled(const Bytes& bytes, uint32_t machine = kX86_64, const Bytes& eh_frame = {}) {
    RowSources sources;
    sources.machine = machine;
    sources.executable = {{ImageAddr(kCode), ImageAddr(kCodeEnd)}};
    sources.sframes.push_back({bytes, ImageAddr(kSection)});
    if (!eh_frame.empty()) sources.sections.push_back({eh_frame, ImageAddr(0x7000)});
    auto result = compile_rows(sources);
    REQUIRE(result);
    compiled = *std::move(result);
  }
  std::string at(uint64_t pc) const {
    Table table = Table::at(compiled.bytes.data());
    return format_row(table, table.lookup(ImageAddr(pc)));
  }
  std::string refused() const { return compiled.stats.refused.empty() ? "" : compiled.stats.refused[0]; }
  uint64_t stopped(Inexpressible reason) const { return compiled.stats.inexpressible[static_cast<unsigned>(reason)]; }
  CompiledTable compiled;
};

const std::string kOthersLost = " rbx=lost r12=lost r13=lost r14=lost r15=lost";
std::string x86(const std::string& cfa, const std::string& fp = "") {
  return "cfa=" + cfa + " ra=[cfa-8]" + (fp.empty() ? "" : " rbp=" + fp) + kOthersLost;
}
// x19 to x28.
std::string a64(const std::string& text, const std::string& flags = "") {
  std::string out = text;
  for (int reg = 19; reg <= 28; reg++) out += fmt::format(" x{}=lost", reg);
  return out + flags;
}

TEST_CASE(
    "sframe: every size of row entry and of offset, both versions, starts relative to the section and to themselves") {
  for (auto [version, flags] : {std::pair<uint8_t, uint8_t>{1, 1}, {1, 0}, {2, 1}, {2, 0}, {2, 5}, {2, 4}, {2, 7}})
    for (unsigned address_size : {1u, 2u, 4u})
      for (unsigned size : {1u, 2u, 4u})
        for (uint8_t auxiliary : {0, 12}) {
          SFrameWriter w;
          w.version = version, w.flags = flags, w.auxiliary = auxiliary;
          int32_t far = size == 1 ? 120 : size == 2 ? 0x7ff8 : 0x12345678;
          uint32_t late = address_size == 1 ? 0xf0 : address_size == 2 ? 0xff0 : 0x1000;
          w.functions = {
              {kCode,
               0x1800,
               {{0, kSp, {8}, size}, {1, kSp, {16, -16}, size}, {4, kFp, {16, -16}, size}, {late, kSp, {far}, size}},
               address_size},
              {kCode + 0x2000, 0x10, {{0, kSp, {8}, size}}, address_size}};
          Compiled c(w.bytes());
          INFO(fmt::format("version {}, flags {}, starts of {}, offsets of {}", version, flags, address_size, size));
          CHECK(c.refused() == "");
          CHECK(c.at(kCode - 1) == "gap");
          CHECK(c.at(kCode) == x86("rsp+8"));
          CHECK(c.at(kCode + 1) == x86("rsp+16", "[cfa-16]"));
          CHECK(c.at(kCode + 3) == x86("rsp+16", "[cfa-16]"));
          CHECK(c.at(kCode + 4) == x86("rbp+16", "[cfa-16]"));
          CHECK(c.at(kCode + late - 1) == x86("rbp+16", "[cfa-16]"));
          CHECK(c.at(kCode + late) == x86(fmt::format("rsp+{}", far)));
          CHECK(c.at(kCode + 0x17ff) == x86(fmt::format("rsp+{}", far)));
          CHECK(c.at(kCode + 0x1800) == "gap");
          CHECK(c.at(kCode + 0x2000) == x86("rsp+8"));
          CHECK(c.at(kCode + 0x2010) == "gap");
          CHECK(c.compiled.stats.sframe_entries == 2);
        }
}

TEST_CASE("sframe: linkage stubs are blocks that repeat") {
  for (uint8_t version : {1, 2}) {
    SFrameWriter w;
    w.version = version;
    w.functions = {{kCode, 16, {{0, kSp, {16}}, {6, kSp, {24}}}},
                   {kCode + 16, 0x58, {{0, kSp, {8}}, {11, kSp, {16}}}, 1, 16}};
    if (version == 2) w.functions.push_back({kCode + 0x100, 0x30, {{0, kSp, {8}}, {5, kSp, {32}}}, 1, 24});
    Compiled c(w.bytes());
    CHECK(c.at(kCode + 5) == x86("rsp+16"));
    CHECK(c.at(kCode + 6) == x86("rsp+24"));
    for (uint64_t at = 0; at < 0x58; at++) CHECK(c.at(kCode + 16 + at) == x86(at % 16 >= 11 ? "rsp+16" : "rsp+8"));
    CHECK(c.at(kCode + 0x68) == "gap");
    if (version == 2)
      for (uint64_t at = 0; at < 0x30; at++) CHECK(c.at(kCode + 0x100 + at) == x86(at % 24 >= 5 ? "rsp+32" : "rsp+8"));
  }
}

TEST_CASE("sframe: AArch64: return address in x30 or saved, signed with either key") {
  for (uint8_t key : {0x00, 0x20}) {
    SFrameWriter w;
    w.abi = 2, w.fixed_ra = 0;
    w.functions = {{kCode,
                    0x40,
                    {{0, kSp, {0}},
                     {4, kSp | kSigned, {0}},
                     {8, kSp | kSigned, {32, -24, -32}},
                     {12, kFp | kSigned, {32, -24, -32}},
                     {20, kSp, {32, -24}},
                     {24, kSp, {0}}},
                    1,
                    0,
                    key}};
    Compiled c(w.bytes(), kAarch64);
    CHECK(c.refused() == "");
    CHECK(c.at(kCode) == a64("cfa=sp+0 ra=x30"));
    CHECK(c.at(kCode + 4) == a64("cfa=sp+0 ra=x30", " ra-signed"));
    CHECK(c.at(kCode + 8) == a64("cfa=sp+32 ra=[cfa-24] x29=[cfa-32] x30=[cfa-24]", " ra-signed"));
    CHECK(c.at(kCode + 12) == a64("cfa=x29+32 ra=[cfa-24] x29=[cfa-32] x30=[cfa-24]", " ra-signed"));
    CHECK(c.at(kCode + 20) == a64("cfa=sp+32 ra=[cfa-24] x30=[cfa-24]"));
    CHECK(c.at(kCode + 24) == a64("cfa=sp+0 ra=x30"));
  }
}

TEST_CASE("sframe: a fixed frame pointer slot is no offset of a row") {
  SFrameWriter w;
  w.fixed_fp = -16;
  w.functions = {{kCode, 0x10, {{0, kSp, {24}}}}};
  CHECK(Compiled(w.bytes()).at(kCode) == x86("rsp+24", "[cfa-16]"));
}

TEST_CASE("sframe: rows without a meaning stop walks, and are counted") {
  SFrameWriter w;
  w.functions = {{kCode, 0x10, {{0, kSp, {}}, {4, kSp, {8, -16, -24}}, {8, kSp | kSigned, {8}}, {12, kSp, {8}}}}};
  Compiled c(w.bytes());
  for (uint64_t at : {0, 4, 8}) CHECK(c.at(kCode + at) == "inexpressible");
  CHECK(c.at(kCode + 12) == x86("rsp+8"));
  CHECK(c.stopped(Inexpressible::sframe_row) == 3);
}

TEST_CASE("sframe: headers that lie are refused, with the reason") {
  auto reason = [](std::function<void(SFrameWriter&)> change, uint32_t machine = kX86_64) {
    SFrameWriter w;
    w.functions = {{kCode, 0x10, {{0, kSp, {8}}, {1, kSp, {16}}}}, {kCode + 0x20, 0x10, {{0, kSp, {8}}}}};
    change(w);
    Compiled c(w.bytes(), machine);
    CHECK(c.at(kCode) == "gap");
    return c.refused();
  };
  CHECK(reason([](auto& w) { w.magic = 0xe2de; }) == ".sframe has no magic number of this byte order");
  CHECK(reason([](auto& w) { w.version = 3; }) == ".sframe is of version 3, which is not known");
  CHECK(reason([](auto& w) { w.flags = 8; }) == ".sframe has unknown flags");
  CHECK(reason([](auto& w) { w.version = 1, w.flags = 4; }) == ".sframe has unknown flags");
  CHECK(reason([](auto& w) { w.abi = 2; }) == ".sframe is for another processor");
  CHECK(reason([](auto& w) { w.abi = 1; }, kAarch64) == ".sframe is for another processor");
  CHECK(reason([](auto& w) { w.fixed_ra = 0; }) == ".sframe has no return address below the CFA");
  CHECK(reason([](auto& w) { w.abi = 2; }, kAarch64) == ".sframe has a fixed return address");
  CHECK(reason([](auto& w) { w.functions_more = 1; }) == ".sframe ends before what its header says");
  CHECK(reason([](auto& w) { w.functions_more = 1 << 30; }) == ".sframe ends before what its header says");
  CHECK(reason([](auto& w) { w.row_bytes_more = 1; }) == ".sframe ends before what its header says");
  CHECK(reason([](auto& w) { w.rows_at_more = -1; }) == ".sframe has functions where its rows are");
  CHECK(reason([](auto& w) { w.functions_at_more = 0xffffffff; }) == ".sframe ends before what its header says");
  CHECK(reason([](auto& w) { w.rows_more = 1; }) == ".sframe: 3 rows of functions, where the header says 4");
  CHECK(reason([](auto& w) { w.rows_more = 100; }) == ".sframe has fewer bytes of rows than its rows take");
  CHECK(reason([](auto& w) { std::swap(w.functions[0].begin, w.functions[1].begin); }) ==
        ".sframe: function 1 is not sorted, as the header says");
  CHECK(reason([](auto& w) { w.functions[1].info = 7; }) == ".sframe: function 1 has row entries of an unknown kind");
  CHECK(reason([](auto& w) { w.functions[1].info = 0x10; }) == ".sframe: function 1 repeats blocks of unknown size");
  SFrameWriter w;
  w.functions = {{kCode, 0x10, {{0, kSp, {8}}}}};
  Bytes whole = w.bytes();
  for (size_t size = 0; size < whole.size(); size++)
    CHECK(Compiled(Bytes(whole.begin(), whole.begin() + static_cast<long>(size))).refused() != "");
}

TEST_CASE("sframe: a function that contradicts itself stops walks in its range and costs no other") {
  auto second = [](FunctionEntry function) {
    SFrameWriter w;
    w.functions = {{kCode, 0x10, {{0, kSp, {8}}}}, function, {kCode + 0x40, 0x10, {{0, kSp, {8}}}}};
    Compiled c(w.bytes());
    CHECK(c.at(kCode) == x86("rsp+8"));
    CHECK(c.at(kCode + 0x40) == x86("rsp+8"));
    CHECK(c.stopped(Inexpressible::malformed_sframe) == (c.at(kCode + 0x20) == "inexpressible"));
    return c.at(kCode + 0x20);
  };
  CHECK(second({kCode + 0x20, 0x10, {{0, kSp, {16}}}}) == x86("rsp+16"));
  CHECK(second({kCode + 0x20, 0x10, {}}) == "inexpressible");
  CHECK(second({kCode + 0x20, 0x10, {{1, kSp, {16}}}}) == "inexpressible");  // nothing at its start
  CHECK(second({kCode + 0x20, 0x10, {{0, kSp, {16}}, {0, kSp, {8}}}}) == "inexpressible");  // twice
  CHECK(second({kCode + 0x20, 0x10, {{0, kSp, {16}}, {4, kSp, {8}}, {2, kSp, {8}}}}) == "inexpressible");
  CHECK(second({kCode + 0x20, 0x10, {{0, kSp, {16}}, {0x10, kSp, {8}}}}) == "inexpressible");  // behind its end
  CHECK(second({kCode + 0x20, 0x10, {{0, 0x60 | kSp, {16}}}}) == "inexpressible");  // offsets of no size
}

TEST_CASE("sframe: only code without other rows is asked for") {
  // One entry: CFA = rsp + 8 in [kCode + 0x10, kCode + 0x20).
  Bytes eh;
  put(eh, 17, 4), put(eh, 0, 4);
  for (int byte : {1, 'z' + 0, 'R' + 0, 0, 1, 0x78, 16, 1, 3, 0x0c, 7, 8, 0x90, 1})
    eh.push_back(static_cast<uint8_t>(byte));
  eh[0] = 18;
  put(eh, 17, 4), put(eh, eh.size(), 4), put(eh, kCode + 0x10, 4), put(eh, 0x10, 4), put(eh, 0, 1), put(eh, 0, 4);
  SFrameWriter w;
  w.functions = {{kCode, 0x40, {{0, kSp, {32}}, {0x18, kSp, {48}}}}, {kCode + 0x10, 8, {{0, kSp, {16}}}}};
  Compiled c(w.bytes(), kX86_64, eh);
  CHECK(c.at(kCode + 0xf) == x86("rsp+32"));
  CHECK(c.at(kCode + 0x10) == "cfa=rsp+8 ra=[cfa-8]");
  CHECK(c.at(kCode + 0x1f) == "cfa=rsp+8 ra=[cfa-8]");
  CHECK(c.at(kCode + 0x20) == x86("rsp+48"));
  CHECK(c.compiled.stats.sframe_entries == 1);
  CHECK(c.compiled.stats.entries == 1);
}

TEST_CASE("sframe: mutated input") {
  SFrameWriter w;
  w.functions = {{kCode, 0x80, {{0, kSp, {8}}, {1, kSp, {16, -16}, 2}, {4, kFp, {16, -16}, 4}}, 2},
                 {kCode + 0x100, 0x100, {{0, kSp, {8}}, {11, kSp, {16}}}, 1, 16}};
  for (uint8_t version : {1, 2}) {
    w.version = version;
    Bytes whole = w.bytes();
    std::mt19937_64 random(version);
    unsigned read = 0;
    for (int round = 0; round < 20000; round++) {
      Bytes bytes = whole;
      for (unsigned n = 1 + random() % 3; n; n--) {
        uint8_t values[] = {0, 1, 0x7f, 0x80, 0xff, static_cast<uint8_t>(random())};
        bytes[4 + random() % (bytes.size() - 4)] = values[random() % 6];
      }
      Compiled c(bytes, round % 8 ? kX86_64 : kAarch64);
      REQUIRE(Table::open(c.compiled.bytes));
      CHECK(c.at(kCode - 1) == "gap");
      read += c.refused().empty();
    }
    CHECK(read > 1000);
  }
}

// Programs with and without frame pointers, stack arguments, alloca and calls through linkage stubs.
constexpr const char* kSource = R"(
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
int depth(int n) { volatile char b[100]; b[n % 100] = n; return n ? depth(n - 1) + b[n % 100] : 0; }
int many(int a, int b, int c, int d, int e, int f, int g, int h, int i) { return a * b + c * d + e * f + g * h + printf("%d", i); }
int grows(int n) { char* p = __builtin_alloca(n); memset(p, n, n); return p[n / 2] + many(1, 2, 3, 4, 5, 6, 7, 8, n); }
double mixed(double* v, int n) { double s = 0; for (int i = 0; i < n; i++) s += v[i] * depth(i) + grows(i + 1); return s; }
__attribute__((noinline)) int leaf(int a) { return a * 3; }
int main(int argc, char** argv) {
  double v[4] = {1, 2, 3, 4};
  for (int i = 0; i < argc; i++) if (strcmp(argv[i], "x")) puts(argv[i]);
  return leaf((int)mixed(v, argc % 4)) + (getenv("HOME") ? 1 : 2);
})";

TEST_CASE("sframe: what the assembler and the linker make says what .eh_frame says, at each address") {
  auto folder = testing::fresh_folder("sframe");
  testing::write_file(folder + "/a.c", kSource);
  uint64_t compared = 0;
  for (const char* options : {"-O0", "-O2", "-O2 -fno-omit-frame-pointer -no-pie", "-Os -fPIE -pie -Wl,-z,lazy",
                              "-O1 -fcf-protection=none -Wl,-z,lazy"}) {
    testing::run(fmt::format("gcc {} -Wa,--gsframe -o a a.c", options), folder);
    auto image = testing::open_image(folder + "/a");
    REQUIRE(image->section(".sframe"));
    CHECK(image->bytes(*image->section(".sframe"))[2] == 1);  // version
    RowSources both = row_sources(*image), with_sframe = both, with_cfi = both;
    with_cfi.sframes.clear(), with_sframe.sections.clear();
    auto sframe = compile_rows(with_sframe), cfi = compile_rows(with_cfi);
    REQUIRE((sframe && cfi));
    CHECK(sframe->stats.refused.empty());
    CHECK(sframe->stats.sframe_entries >= 8);
    CHECK(sframe->stats.inexpressible_changes == 0);
    Table a = Table::at(sframe->bytes.data()), b = Table::at(cfi->bytes.data());
    uint64_t here = 0, uncovered = 0;
    for (const ImageRange& code : both.executable)
      for (ImageAddr at = code.begin; at < code.end; at += 1) {
        const Row *from_sframe = a.lookup(at), *from_cfi = b.lookup(at);
        uncovered += from_cfi && !from_sframe;
        if (!from_sframe) continue;
        INFO(fmt::format("{} at {:#x}: {} / {}", options, at.value, format_row(a, from_sframe),
                         format_row(b, from_cfi)));
        REQUIRE(from_cfi);
        bool same = from_sframe->cfa_kind == from_cfi->cfa_kind && from_sframe->cfa_reg == from_cfi->cfa_reg &&
                    from_sframe->cfa_offset == from_cfi->cfa_offset && from_sframe->ra_kind == from_cfi->ra_kind &&
                    from_sframe->ra_offset == from_cfi->ra_offset && from_sframe->saved[0] == from_cfi->saved[0];
        REQUIRE(same);
        here++;
      }
    CHECK(here > 300);
    CHECK(uncovered < 100);  // _start, which the assembler cannot say
    compared += here;
    // Both there: SFrame adds nothing.
    auto whole = compile_rows(both);
    REQUIRE(whole);
    CHECK(whole->stats.sframe_entries == 0);
    CHECK(whole->bytes == cfi->bytes);
  }
  MESSAGE(fmt::format("{} addresses compared", compared));
}

}  // namespace
}  // namespace sonde::host
