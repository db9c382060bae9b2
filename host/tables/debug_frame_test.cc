// .debug_frame: its own form of entries, code that the linker dropped, debug files separate and compressed, and the same
// program's .eh_frame as the truth.
#include <doctest/doctest.h>
#include <fmt/format.h>

#include "host/image/testing.h"
#include "host/tables/image_table.h"
#include "host/tables/print.h"

namespace sonde::host {
namespace {

constexpr uint32_t kX86_64 = 62;
constexpr uint64_t kCode = 0x1000, kCodeEnd = 0x5000;
using Bytes = std::vector<uint8_t>;

Bytes operator+(Bytes a, const Bytes& b) { return a.insert(a.end(), b.begin(), b.end()), a; }
Bytes le(uint64_t value, unsigned size) {
  Bytes out;
  for (unsigned i = 0; i < size; i++) out.push_back(static_cast<uint8_t>(value >> 8 * i));
  return out;
}

struct Writer {
  bool wide = false;
  Bytes out;
  size_t entry(const Bytes& id, const Bytes& body) {
    size_t start = out.size();
    out =
        out + (wide ? le(0xffffffff, 4) + le(id.size() + body.size(), 8) : le(id.size() + body.size(), 4)) + id + body;
    return start;
  }
  size_t cie(uint8_t version) {
    Bytes body = {version, 0};
    if (version == 4) body = body + Bytes{8, 0};
    return entry(le(~uint64_t{0}, wide ? 8 : 4), body + Bytes{1, 0x78, 16, 0x0c, 7, 8, 0x90, 1});
  }
  void fde(size_t cie, uint64_t begin, uint64_t size, const Bytes& program = {}) {
    entry(le(cie, wide ? 8 : 4), le(begin, 8) + le(size, 8) + program);
  }
};

struct Compiled {
  explicit Compiled(const Bytes& debug_frame, const Bytes& eh_frame = {}, ImageAddr code = ImageAddr(kCode)) {
    RowSources sources;
    sources.machine = kX86_64;
    sources.executable = {{code, ImageAddr(kCodeEnd)}};
    sources.debug_frames.push_back(
        {.bytes = debug_frame, .address = {}, .text_base = {}, .data_base = {}, .debug_frame = true});
    if (!eh_frame.empty()) sources.sections.push_back({eh_frame, ImageAddr(0x7000)});
    auto result = compile_rows(sources);
    REQUIRE(result);
    compiled = *std::move(result);
  }
  std::string at(uint64_t pc) const {
    Table table = Table::at(compiled.bytes.data());
    return format_row(table, table.lookup(ImageAddr(pc)));
  }
  CompiledTable compiled;
};

const std::string kCall = "cfa=rsp+8 ra=[cfa-8]", kPushed = "cfa=rsp+16 ra=[cfa-8]";

TEST_CASE("debug_frame: entries of each version, in both widths") {
  for (bool wide : {false, true})
    for (uint8_t version : {1, 3, 4}) {
      Writer w{wide, {}};
      w.fde(w.cie(version), 0x1000, 0x20, {0x41, 0x0e, 16});
      size_t second = w.cie(version);
      w.fde(second, 0x2000, 0x20, {0x0e, 16});
      w.fde(0, 0x3000, 0x20);
      Compiled c(w.out);
      INFO(fmt::format("version {}, {}", version, wide));
      CHECK(c.at(0x1000) == kCall);
      CHECK(c.at(0x1001) == kPushed);
      CHECK(c.at(0x1020) == "gap");
      CHECK(c.at(0x2000) == kPushed);
      CHECK(c.at(0x3000) == kCall);
      CHECK(c.compiled.stats.debug_entries == 3);
      CHECK(c.compiled.stats.unusable_entries == 0);
    }
}

TEST_CASE("debug_frame: an id of nought is a place, and places lie within the section") {
  Writer w;
  w.cie(3);
  w.fde(0, 0x1000, 0x10);
  w.fde(4, 0x1010, 0x10);  // in the middle of an entry
  w.fde(5000, 0x1020, 0x10);  // behind the end
  w.fde(24, 0x1030, 0x10);  // no common entry
  Compiled c(w.out);
  CHECK(c.at(0x1000) == kCall);
  for (uint64_t at : {0x1010, 0x1020, 0x1030}) CHECK(c.at(at) == "gap");
  CHECK(c.compiled.stats.unusable_entries == 3);
}

TEST_CASE("debug_frame: entries of dropped code, left at 0, give nothing even where code begins at 0") {
  Writer w;
  w.fde(w.cie(3), 0, 0x800);
  w.fde(0, 0x10, 0x10);
  Compiled c(w.out, {}, ImageAddr(0));
  CHECK(c.at(0) == "gap");
  CHECK(c.at(0x10) == kCall);
  CHECK(c.at(0x20) == "gap");
}

TEST_CASE("debug_frame: only code that .eh_frame does not describe is asked for") {
  // .eh_frame: [0x1010, 0x1020) and [0x1040, 0x1050), where what it says cannot be read.
  Bytes eh = le(18, 4) + le(0, 4) + Bytes{1, 'z', 'R', 0, 1, 0x78, 16, 1, 3, 0x0c, 7, 32, 0x90, 1};
  eh = eh + le(17, 4) + le(eh.size() + 4, 4) + le(0x1010, 4) + le(0x10, 4) + Bytes{0, 0, 0, 0, 0};
  eh = eh + le(17, 4) + le(eh.size() + 4, 4) + le(0x1040, 4) + le(0x10, 4) + Bytes{0, 0x3f, 0, 0, 0};
  Writer w;
  w.fde(w.cie(3), 0x1000, 0x50, {0x58, 0x0e, 16});  // its row changes at 0x1018
  w.fde(0, 0x1010, 8);
  w.fde(0, 0x1060, 8);
  Compiled c(w.out, eh);
  CHECK(c.at(0x100f) == kCall);
  for (uint64_t at = 0x1010; at < 0x1020; at++) CHECK(c.at(at) == "cfa=rsp+32 ra=[cfa-8]");
  CHECK(c.at(0x1020) == kPushed);
  CHECK(c.at(0x103f) == kPushed);
  CHECK(c.at(0x1040) == "inexpressible");
  CHECK(c.at(0x1050) == "gap");
  CHECK(c.at(0x1060) == kCall);
  CHECK(c.compiled.stats.debug_entries == 2);
}

constexpr const char* kSource = R"(
#include <stdio.h>
#include <string.h>
int depth(int n) { volatile char b[100]; b[n % 100] = n; return n ? depth(n - 1) + b[n % 100] : 0; }
int grows(int n) { char* p = __builtin_alloca(n); memset(p, n, n); return p[n / 2] + depth(n); }
int aligned(int n) { _Alignas(64) char b[128]; memset(b, n, 128); char* p = __builtin_alloca(n); memset(p, n, n); return b[n] + p[0] + depth(n); }
int main(int argc, char** argv) { printf("%d\n", grows(argc) + aligned(argc)); return 0; }
)";

// Rows of the functions of a.c alone: what start-up code says is in .eh_frame in both builds.
TEST_CASE("debug_frame: a program without .eh_frame of its own has the rows of one with it") {
  auto folder = testing::fresh_folder("debug_frame");
  testing::write_file(folder + "/a.c", kSource);
  std::string build = "gcc -O1 -fno-exceptions -fno-asynchronous-unwind-tables -fcf-protection=none -g ";
  testing::run("gcc -O1 -fno-exceptions -fasynchronous-unwind-tables -fcf-protection=none -o with a.c && " + build +
                   "-gz=none -o plain a.c && " + build +
                   "-gz=zlib -o zlib a.c && "
                   "objcopy --compress-debug-sections=zlib-gnu plain gnu && "
                   "strip -o linked plain && objcopy --only-keep-debug plain linked.debug && objcopy "
                   "--add-gnu-debuglink=linked.debug linked && "
                   "strip -g -o symbols zlib && objcopy --only-keep-debug zlib symbols.debug && objcopy "
                   "--add-gnu-debuglink=symbols.debug symbols && "
                   "strip -o bare plain",
               folder);
  auto truth_image = testing::open_image(folder + "/with");
  auto truth = compile_table(*truth_image);
  REQUIRE(truth);
  Table right = Table::at(truth->bytes.data());
  auto names = testing::open_image(folder + "/plain");
  for (const char* file : {"plain", "zlib", "gnu", "linked", "symbols", "bare"}) {
    auto image = testing::open_image(folder + "/" + file);
    auto compiled = compile_table(*image);
    REQUIRE(compiled);
    Table table = Table::at(compiled->bytes.data());
    uint64_t compared = 0;
    for (const char* name : {"depth", "grows", "aligned", "main"}) {
      const Function *here = testing::function_named(*names, name),
                     *there = testing::function_named(*truth_image, name);
      REQUIRE((here && there));
      REQUIRE(here->range.size() == there->range.size());
      for (uint64_t i = 0; i < here->range.size(); i++, compared++) {
        INFO(fmt::format("{}: {}+{}", file, name, i));
        int64_t offset = static_cast<int64_t>(i);
        std::string expected = format_row(right, right.lookup(there->range.begin + offset));
        CHECK(format_row(table, table.lookup(here->range.begin + offset)) ==
              (file == std::string("bare") ? "gap" : expected));
        CHECK(expected != "gap");
      }
    }
    CHECK(compared > 200);
    CHECK(compiled->stats.debug_entries == (file == std::string("bare") ? 0 : 4));
  }
}

}  // namespace
}  // namespace sonde::host
