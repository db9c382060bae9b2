// .eh_frame sections written byte by byte here: every encoding, augmentation and instruction, and input that contradicts
// itself. Expected rows follow from DWARF 5 section 6.4 and the Linux Standard Base. truth_test.cc has the real files.
#include "host/tables/compile.h"

#include <doctest/doctest.h>
#include <fmt/format.h>

#include <cstring>
#include <initializer_list>
#include <map>
#include <random>

#include "core/unwind/step.h"
#include "host/tables/print.h"

namespace sonde::host {
namespace {

constexpr uint32_t kX86_64 = 62, kAarch64 = 183;
constexpr uint64_t kSection = 0x7000, kCode = 0x1000, kCodeEnd = 0x5000, kGot = 0x6000;
using Bytes = std::vector<uint8_t>;

Bytes operator+(Bytes a, const Bytes& b) { return a.insert(a.end(), b.begin(), b.end()), a; }
Bytes le(uint64_t value, unsigned size) {
  Bytes out;
  for (unsigned i = 0; i < size; i++) out.push_back(static_cast<uint8_t>(value >> 8 * i));
  return out;
}
Bytes uleb(uint64_t value) {
  Bytes out;
  do out.push_back(static_cast<uint8_t>((value & 0x7f) | (value > 0x7f ? 0x80 : 0)));
  while (value >>= 7);
  return out;
}
Bytes text(std::string_view s) { return Bytes(s.begin(), s.end()) + Bytes{0}; }

const Bytes kCallRules = {0x0c, 7, 8, 0x90, 1};  // CFA = rsp + 8, return address at CFA - 8

struct Writer {
  Bytes out;
  enum Form { narrow, wide_length, wide_id };

  size_t entry(const Bytes& id, const Bytes& body, Form form = narrow) {
    size_t start = out.size(), size = id.size() + body.size();
    out = out + (form == narrow ? le(size, 4) : le(0xffffffff, 4) + le(size, 8)) + id + body;
    return start;
  }
  size_t cie(std::string_view letters, const Bytes& data, const Bytes& rules = kCallRules, uint8_t code_align = 1,
             uint8_t ra = 16, Form form = narrow, uint8_t version = 1) {
    Bytes body = Bytes{version} + text(letters);
    if (version == 4) body = body + Bytes{8, 0};
    if (letters.starts_with("eh")) body = body + le(0, 8);
    body = body + Bytes{code_align, 0x78, ra};  // data alignment -8
    if (letters.starts_with("z")) body = body + uleb(data.size()) + data;
    return entry(le(0, form == wide_id ? 8 : 4), body + rules, form);
  }
  size_t id_place(Form form) const { return out.size() + (form == narrow ? 4 : 12); }
  // Range as encoded bytes.
  void fde_raw(size_t cie_at, const Bytes& range, const Bytes& program, bool has_size = true, Form form = narrow) {
    Bytes id = le(id_place(form) - cie_at, form == wide_id ? 8 : 4);
    entry(id, range + (has_size ? Bytes{0} : Bytes{}) + program, form);
  }
  // Range as absolute udata4.
  void fde(size_t cie_at, uint64_t begin, uint64_t size, const Bytes& program) {
    fde_raw(cie_at, le(begin, 4) + le(size, 4), program);
  }
  size_t plain_cie() { return cie("zR", {0x03}); }
};

struct Compiled {
  Compiled(const Bytes& bytes, uint32_t machine = kX86_64,
           std::vector<ImageRange> code = {{ImageAddr(kCode), ImageAddr(kCodeEnd)}}) {
    RowSources source;
    source.machine = machine;
    source.executable = code;
    source.sections.push_back({bytes, ImageAddr(kSection), ImageAddr(kCode), ImageAddr(kGot)});
    auto result = compile_rows(source);
    REQUIRE(result);
    compiled = *std::move(result);
  }
  std::string at(uint64_t pc) const {
    Table table = Table::at(compiled.bytes.data());
    return format_row(table, table.lookup(ImageAddr(pc)));
  }
  uint64_t stopped(Inexpressible reason) const { return compiled.stats.inexpressible[static_cast<unsigned>(reason)]; }
  CompiledTable compiled;
};

const std::string kCall = "cfa=rsp+8 ra=[cfa-8]", kPushed = "cfa=rsp+16 ra=[cfa-8]";

// A program run from kCode over 0x100 bytes; the rows at the given offsets.
void rows(const Bytes& program, std::initializer_list<std::pair<uint64_t, std::string>> expected) {
  Writer w;
  w.fde(w.plain_cie(), kCode, 0x100, program);
  Compiled c(w.out);
  for (auto& [offset, row] : expected) CHECK(c.at(kCode + offset) == row);
  CHECK(c.at(kCode - 1) == "gap");
  CHECK(c.at(kCode + 0x100) == "gap");
}

TEST_CASE("eh_frame: pointer encodings") {
  struct Case {
    uint8_t encoding;
    unsigned size;
  } formats[] = {{0x00, 8}, {0x02, 2}, {0x03, 4}, {0x04, 8}, {0x0a, 2}, {0x0b, 4}, {0x0c, 8}};
  for (Case format : formats)
    for (uint8_t relative : {0x00, 0x10, 0x20, 0x30}) {
      Writer w;
      size_t cie = w.cie("zR", {static_cast<uint8_t>(format.encoding | relative)});
      uint64_t base = relative == 0x10   ? kSection + w.out.size() + 8
                      : relative == 0x20 ? kCode
                      : relative == 0x30 ? kGot
                                         : 0;
      bool is_signed = format.encoding & 8 || format.size == 8;
      if (!is_signed && base > 0x1234) continue;  // an unsigned distance does not lead backwards
      w.fde_raw(cie, le(0x1234 - base, format.size) + le(0x20, format.size), {});
      Compiled c(w.out);
      INFO(fmt::format("encoding {:#x}", format.encoding | relative));
      CHECK(c.at(0x1233) == "gap");
      CHECK(c.at(0x1234) == kCall);
      CHECK(c.at(0x1253) == kCall);
      CHECK(c.at(0x1254) == "gap");
    }
  Writer w;
  w.fde_raw(w.cie("zR", {0x01}), uleb(0x1234) + uleb(0x20), {});
  w.fde_raw(w.cie("zR", {0x09}), Bytes{0xb4, 0xe6, 0x00} + Bytes{0x20}, {});  // sleb 0x3334
  size_t aligned = w.cie("zR", {0x50});
  Bytes padding(static_cast<size_t>(-(kSection + w.out.size() + 8) & 7), 0xee);
  w.fde_raw(aligned, padding + le(0x2000, 8) + le(0x20, 8), {});
  w.fde_raw(w.cie("zR", {0x83}), le(0x3000, 4) + le(0x20, 4), {});  // indirect
  w.fde_raw(w.cie("zR", {0xff}), le(0x3000, 4) + le(0x20, 4), {});  // omitted
  Compiled c(w.out);
  CHECK(c.at(0x1253) == kCall);
  CHECK(c.at(0x3334) == kCall);
  CHECK(c.at(0x201f) == kCall);
  CHECK(c.at(0x3000) == "gap");
  CHECK(c.compiled.stats.unusable_entries == 2);
}

TEST_CASE("eh_frame: augmentations") {
  Writer w;
  w.fde(w.cie("zPLR", Bytes{0x9b} + le(0x1234, 4) + Bytes{0x1b, 0x03}), 0x1000, 0x10, {});
  w.fde(w.cie("zRS", {0x03}), 0x1010, 0x10, {});
  w.fde(w.cie("zRX", {0x03, 1, 2, 3}), 0x1020, 0x10, {});
  w.fde(w.cie("zXR", {1, 2, 3, 0x03}), 0x1030, 0x10, {});
  w.fde_raw(w.cie("", {}), le(0x1040, 8) + le(0x10, 8), {}, false);
  w.fde_raw(w.cie("eh", {}), le(0x1050, 8) + le(0x10, 8), {}, false);
  w.fde_raw(w.cie("Q", {}), le(0x1060, 8) + le(0x10, 8), {}, false);
  w.fde(w.cie("zR", {0x03}, kCallRules, 1, 16, Writer::narrow, 3), 0x1070, 0x10, {});
  w.fde(w.cie("zR", {0x03}, kCallRules, 1, 16, Writer::narrow, 4), 0x1080, 0x10, {});
  w.fde(w.cie("zR", {0x03}, kCallRules, 1, 16, Writer::narrow, 9), 0x1090, 0x10, {});
  Compiled c(w.out);
  CHECK(c.at(0x1000) == kCall);
  CHECK(c.at(0x1010) == kCall + " signal-frame");
  CHECK(c.at(0x1020) == "inexpressible");
  CHECK(c.at(0x1030) == "gap");
  CHECK(c.at(0x1040) == kCall);
  CHECK(c.at(0x1050) == kCall);
  CHECK(c.at(0x1060) == "gap");
  CHECK(c.at(0x1070) == kCall);
  CHECK(c.at(0x1080) == kCall);
  CHECK(c.at(0x1090) == "gap");
  CHECK(c.stopped(Inexpressible::unknown_augmentation) == 1);
  CHECK(c.compiled.stats.unusable_entries == 6);  // three common entries and what uses them
}

TEST_CASE("eh_frame: 64-bit lengths, with ids of 4 and 8 bytes; terminators in the middle") {
  Writer w;
  size_t cie = w.cie("zR", {0x03}, kCallRules, 1, 16, Writer::wide_length);
  w.fde_raw(cie, le(0x1000, 4) + le(0x10, 4), {}, true, Writer::wide_length);
  w.out = w.out + le(0, 4);
  w.fde(cie, 0x1010, 0x10, {});
  cie = w.cie("zR", {0x03}, kCallRules, 1, 16, Writer::wide_id);
  w.out = w.out + le(0, 4) + le(0, 4);
  w.fde_raw(cie, le(0x1020, 4) + le(0x10, 4), {}, true, Writer::wide_id);
  w.out = w.out + le(0, 4);
  Compiled c(w.out);
  for (uint64_t at = 0x1000; at < 0x1030; at++) CHECK(c.at(at) == kCall);
  CHECK(c.compiled.stats.unusable_entries == 0);
}

TEST_CASE("eh_frame: ranges that are empty, overlap, or lie outside of code") {
  Writer w;
  size_t cie = w.plain_cie();
  w.fde(cie, 0x1000, 0, {0x0e, 99});
  w.fde(cie, 0x1000, 0x40, {});
  w.fde(cie, 0x1010, 0x10, {});  // agrees
  w.fde(cie, 0x1030, 0x20, {0x0e, 16, 0x44, 0x0e, 8});  // disagrees at first only
  w.fde(cie, 0x2000, 0x100, {0x0e, 16, 0x02, 0x80, 0x0e, 8});
  w.fde(cie, 0x2080, 0x100, {0x0e, 24});
  w.fde(cie, 0x0f00, 0x110, {0x0e, 8});  // starts in front of the code
  w.fde(cie, 0x4ff0, 0x100, {0x0e, 16});  // ends behind it
  w.fde(cie, 0x9000, 0x100, {});
  w.fde(cie, 0x3000, 0x10, {});
  Compiled c(w.out);
  CHECK(c.at(0x0fff) == "gap");
  CHECK(c.at(0x1000) == kCall);
  CHECK(c.at(0x1018) == kCall);
  CHECK(c.at(0x102f) == kCall);
  CHECK(c.at(0x1030) == "inexpressible");
  CHECK(c.at(0x1033) == "inexpressible");
  CHECK(c.at(0x1034) == kCall);
  CHECK(c.at(0x104f) == kCall);
  CHECK(c.at(0x1050) == "gap");
  CHECK(c.at(0x207f) == kPushed);
  CHECK(c.at(0x2080) == "inexpressible");
  CHECK(c.at(0x20ff) == "inexpressible");
  CHECK(c.at(0x2100) == "cfa=rsp+24 ra=[cfa-8]");
  CHECK(c.at(0x4fff) == kPushed);
  CHECK(c.at(0x5000) == "gap");
  CHECK(c.at(0x9000) == "gap");
  CHECK(c.compiled.stats.empty_entries == 1);
  CHECK(c.compiled.stats.outside_entries == 3);
  CHECK(c.compiled.stats.overlapping_entries == 6);
  CHECK(c.stopped(Inexpressible::overlap) == 2);
}

TEST_CASE("eh_frame: places advance by every instruction that can") {
  rows({0x41, 0x0e, 16, 0x02, 0x0f, 0x0e, 24, 0x03, 0x20, 0, 0x0e, 32, 0x04, 0x40, 0, 0, 0, 0x0e, 40},
       {{0, kCall},
        {1, kPushed},
        {0x0f, kPushed},
        {0x10, "cfa=rsp+24 ra=[cfa-8]"},
        {0x30, "cfa=rsp+32 ra=[cfa-8]"},
        {0x6f, "cfa=rsp+32 ra=[cfa-8]"},
        {0x70, "cfa=rsp+40 ra=[cfa-8]"},
        {0xff, "cfa=rsp+40 ra=[cfa-8]"}});
  rows(Bytes{0x01} + le(kCode + 0x20, 4) + Bytes{0x0e, 16}, {{0x1f, kCall}, {0x20, kPushed}});
  rows({0x40, 0x0e, 16, 0x42, 0x0e, 8}, {{0, kPushed}, {1, kPushed}, {2, kCall}});  // no step, one row
  rows({0x04, 0, 1, 0, 0, 0x0e, 16}, {{0xff, kCall}});  // beyond the end
}

TEST_CASE("eh_frame: register rules") {
  std::string at = "cfa=rsp+8 ra=[cfa-8] ";
  rows({0x86, 2}, {{0, at + "rbp=[cfa-16]"}});
  rows({0x05, 3, 3}, {{0, at + "rbx=[cfa-24]"}});
  rows({0x11, 12, 0x7e}, {{0, at + "r12=[cfa+16]"}});
  rows({0x2f, 12, 2}, {{0, at + "r12=[cfa+16]"}});
  rows({0x14, 13, 1}, {{0, at + "r13=cfa-8"}});
  rows({0x15, 13, 0x7f}, {{0, at + "r13=cfa+8"}});
  rows({0x09, 14, 0}, {{0, at + "r14=rax"}});
  rows({0x09, 14, 14}, {{0, kCall}});
  rows({0x07, 15}, {{0, at + "r15=lost"}});
  rows({0x08, 15}, {{0, kCall}});
  rows({0x10, 6, 2, 0x77, 0x10}, {{0, at + "rbp=[(breg7 16)]"}});
  rows({0x16, 6, 3, 0x77, 0x10, 0x06}, {{0, at + "rbp=(breg7 16; deref)"}});
  rows({0x10, 6, 0}, {{0, at + "rbp=[cfa+0]"}});
  rows({0x80, 1, 0x91, 3, 0x05, 40, 1}, {{0, kCall}});  // rax, xmm0 and a number above all: of no interest
  rows({0x09, 3, 17}, {{0, at + "rbx=lost"}});  // kept in xmm0
  rows({0x10, 3, 1, 0xf0}, {{0, at + "rbx=lost"}});  // an operation that is not known
  rows({0x2e, 0x80, 0x01, 0x86, 2}, {{0, at + "rbp=[cfa-16]"}});
}

TEST_CASE("eh_frame: CFA rules") {
  rows({0x0c, 6, 16}, {{0, "cfa=rbp+16 ra=[cfa-8]"}});
  rows({0x0d, 6}, {{0, "cfa=rbp+8 ra=[cfa-8]"}});
  rows({0x0e, 0x80, 0x02}, {{0, "cfa=rsp+256 ra=[cfa-8]"}});
  rows({0x12, 3, 0x7d}, {{0, "cfa=rbx+24 ra=[cfa-8]"}});
  rows({0x13, 0x7d}, {{0, "cfa=rsp+24 ra=[cfa-8]"}});
  rows({0x0f, 3, 0x76, 0x78, 0x06}, {{0, "cfa=[rbp-8] ra=[cfa-8]"}});
  rows({0x0f, 2, 0x7a, 0x00}, {{0, "cfa=r10+0 ra=[cfa-8]"}});
  rows({0x0f, 4, 0x76, 0x78, 0x06, 0x12}, {{0, "cfa=(breg6 -8; deref; dup) ra=[cfa-8]"}});
}

TEST_CASE("eh_frame: states kept and restored, CIE rules restored") {
  rows({0x86, 2, 0x0a, 0x41, 0x0e, 32, 0x83, 3, 0x0a, 0x41, 0x0c, 6, 16, 0x41, 0x0b, 0x41, 0x0b},
       {{0, kCall + " rbp=[cfa-16]"},
        {1, "cfa=rsp+32 ra=[cfa-8] rbp=[cfa-16] rbx=[cfa-24]"},
        {2, "cfa=rbp+16 ra=[cfa-8] rbp=[cfa-16] rbx=[cfa-24]"},
        {3, "cfa=rsp+32 ra=[cfa-8] rbp=[cfa-16] rbx=[cfa-24]"},
        {4, kCall + " rbp=[cfa-16]"}});
  Writer w;
  w.fde(w.cie("zR", {0x03}, kCallRules + Bytes{0x86, 5}), kCode, 0x10,
        {0x07, 16, 0x86, 2, 0x83, 3, 0x41, 0xd0, 0x06, 6, 0xc3});
  Compiled c(w.out);
  CHECK(c.at(kCode) == "outermost");
  CHECK(c.at(kCode + 1) == kCall + " rbp=[cfa-40]");
}

TEST_CASE("eh_frame: return addresses") {
  rows({0x07, 16}, {{0, "outermost"}});
  rows({0x09, 16, 1}, {{0, "cfa=rsp+8 ra=rdx"}});
  rows({0x10, 16, 2, 0x77, 0x28}, {{0, "cfa=rsp+8 ra=[(breg7 40)]"}});
  rows({0x08, 16}, {{0, "inexpressible"}});
  Writer w;
  w.fde(w.cie("zR", {0x03}, {0x0c, 7, 8}), kCode, 0x10, {});  // no rule
  w.fde(w.cie("zR", {0x03}, kCallRules, 1, 99), kCode + 0x10, 0x10, {});  // no register of this machine
  w.fde(w.cie("zR", {0x03}, {0x0c, 7, 8}, 1, 8), kCode + 0x20, 0x10, {});  // in r8
  w.fde(w.cie("zR", {0x03}, {0x90, 1}), kCode + 0x30, 0x10, {});  // no CFA
  w.fde(w.cie("zR", {0x03}, {0x0c, 55, 8, 0x90, 1}), kCode + 0x40, 0x10, {});
  w.fde(w.plain_cie(), kCode + 0x50, 0x10, {0x0f, 1, 0xf0});  // CFA by an unknown operation
  Compiled c(w.out);
  CHECK(c.at(kCode) == "inexpressible");
  CHECK(c.at(kCode + 0x10) == "inexpressible");
  CHECK(c.at(kCode + 0x20) == "cfa=rsp+8 ra=r8");
  CHECK(c.at(kCode + 0x30) == "inexpressible");
  CHECK(c.at(kCode + 0x40) == "inexpressible");
  CHECK(c.at(kCode + 0x50) == "inexpressible");
  CHECK(c.stopped(Inexpressible::no_return_rule) == 2);
  CHECK(c.stopped(Inexpressible::no_cfa) == 2);
  CHECK(c.stopped(Inexpressible::cfa_expression) == 1);
}

TEST_CASE("eh_frame: a stack pointer with a rule of its own becomes the CFA") {
  rows({0x14, 7, 0}, {{0, kCall}});
  rows({0x0c, 5, 0, 0x09, 7, 8, 0x86, 1, 0x15, 12, 0x7e},
       {{0, "cfa=r8+0 ra=[(breg5 -8)] rbp=[(breg5 -8)] r12=(breg5 16)"}});
  rows({0x0c, 5, 0, 0x11, 7, 0x6c}, {{0, "cfa=[rdi+160] ra=[(breg5 -8)]"}});
  rows({0x0c, 5, 16, 0x15, 7, 0x7e}, {{0, "cfa=rdi+32 ra=[(breg5 8)]"}});
  rows({0x0f, 3, 0x75, 8, 0x06, 0x11, 7, 0x7f},
       {{0, "cfa=(breg5 8; deref; const 8; plus; deref) ra=[(breg5 8; deref; const -8; plus)]"}});
  rows({0x0c, 5, 0, 0x10, 7, 2, 0x23, 4, 0x10, 6, 2, 0x23, 12},
       {{0, "cfa=(breg5 0; plus_uconst 4; deref) ra=[(breg5 -8)] rbp=[(breg5 0; plus_uconst 12)]"}});
  // As in signal frames: the same load.
  rows({0x0f, 3, 0x77, 0x28, 0x06, 0x10, 7, 2, 0x77, 0x28}, {{0, "cfa=[rsp+40] ra=[cfa-8]"}});
}

TEST_CASE("eh_frame: offsets that do not fit a row become expressions") {
  Writer w;  // rbx at CFA - 80000
  w.fde(w.plain_cie(), kCode, 0x10, Bytes{0x05, 3} + uleb(10000));
  Compiled c(w.out);
  CHECK(c.at(kCode) == kCall + " rbx=[(const -80000; plus)]");
}

TEST_CASE("eh_frame: the linkage table's rule becomes rows") {
  auto rule = [](uint8_t threshold) {
    return Bytes{0x0f, 11,   0x77, 8,   0x80, 0, 0x3f, 0x1a, static_cast<uint8_t>(0x30 + threshold),
                 0x2a, 0x33, 0x24, 0x22};
  };
  Writer w;
  size_t cie = w.plain_cie();
  w.fde(cie, 0x1008, 0x40, Bytes{0x0e, 16, 0x46, 0x0e, 24, 0x42} + rule(11));
  w.fde(cie, 0x2000, 0x20, rule(9));
  w.fde(cie, 0x3000, 0x18, rule(0));
  Compiled c(w.out);
  auto expected = [](uint64_t at, unsigned threshold) { return (at & 15) >= threshold ? kPushed : kCall; };
  CHECK(c.at(0x1008) == kPushed);
  CHECK(c.at(0x100e) == "cfa=rsp+24 ra=[cfa-8]");
  for (uint64_t at = 0x1010; at < 0x1048; at++) CHECK(c.at(at) == expected(at, 11));
  CHECK(c.at(0x1048) == "gap");
  for (uint64_t at = 0x2000; at < 0x2020; at++) CHECK(c.at(at) == expected(at, 9));
  for (uint64_t at = 0x3000; at < 0x3018; at++) CHECK(c.at(at) == expected(at, 0));
  // More code than is worth it: the expression stays, and says the same.
  Writer large;
  large.fde(large.plain_cie(), kCode, 0x2000000, rule(11));
  Compiled l(large.out, kX86_64, {{ImageAddr(kCode), ImageAddr(kCode + 0x2000000)}});
  CHECK(l.at(0x1000) == "cfa=(breg7 8; breg16 0; lit15; and; lit11; ge; lit3; shl; plus) ra=[cfa-8]");
}

TEST_CASE("eh_frame: AArch64") {
  auto rows_of = [](const Bytes& program) {
    Writer w;
    w.fde(w.cie("zRB", {0x03}, {0x0c, 31, 0}, 4, 30), kCode, 0x100, program);
    return Compiled(w.out, kAarch64);
  };
  Compiled c = rows_of({0x2d, 0x41, 0x0e, 32, 0x9d, 4, 0x9e, 3, 0x43, 0x2d});
  CHECK(c.at(kCode) == "cfa=sp+0 ra=x30 ra-signed");
  CHECK(c.at(kCode + 4) == "cfa=sp+32 ra=[cfa-24] x29=[cfa-32] x30=[cfa-24] ra-signed");
  CHECK(c.at(kCode + 15) == c.at(kCode + 4));
  CHECK(c.at(kCode + 16) == "cfa=sp+32 ra=[cfa-24] x29=[cfa-32] x30=[cfa-24]");
  c = rows_of({0x0a, 0x2d, 0x41, 0x0b});
  CHECK(c.at(kCode + 4) == "cfa=sp+0 ra=x30");
  c = rows_of({0x07, 30});
  CHECK(c.at(kCode) == "outermost");
  c = rows_of({0x93, 2, 0x05, 72, 3});  // x19, and v8, of no interest
  CHECK(c.at(kCode) == "cfa=sp+0 ra=x30 x19=[cfa-16]");
  Writer w;  // not an instruction of x86-64
  w.fde(w.plain_cie(), kCode, 0x100, {0x2d});
  CHECK(Compiled(w.out).stopped(Inexpressible::unknown_operation) == 1);
}

// AArch64: the state by instruction or by expression, kept and restored with the others; both keys are stripped alike.
TEST_CASE("eh_frame: AArch64 return addresses signed") {
  auto flags_of = [](std::string_view letters, const Bytes& program) {
    Writer w;
    w.fde(w.cie(letters, {0x03}, {0x0c, 31, 0}, 4, 30), kCode, 0x100, program);
    Compiled c(w.out, kAarch64);
    std::string out;
    for (uint64_t at = 0; at < 5; at++) {
      std::string row = c.at(kCode + 4 * at);
      out += row == "inexpressible" ? '?' : row.contains(" ra-signed") ? 's' : '-';
    }
    return out;
  };
  for (std::string_view letters : {"zR", "zRB", "zRG", "zRBG", "zRSB"}) {
    CHECK(flags_of(letters, {0x41, 0x2d, 0x41, 0x2d, 0x41, 0x2d}) == "-s-ss");
    CHECK(flags_of(letters, {0x41, 0x2c, 0x41, 0x2c}) == "-s---");
  }
  CHECK(flags_of("zR", {0x0a, 0x41, 0x2d, 0x0a, 0x41, 0x2d, 0x41, 0x0b, 0x41, 0x0b}) == "-s-s-");
  CHECK(flags_of("zR", {0x41, 0x16, 34, 1, 0x31, 0x41, 0x2d, 0x41, 0x16, 34, 1, 0x31, 0x41, 0x16, 34, 1, 0x30}) ==
        "-s-s-");
  CHECK(flags_of("zR", {0x41, 0x16, 34, 1, 0x32}) == "?????");  // signed how?
  CHECK(flags_of("zR", {0x41, 0x10, 34, 2, 0x8f, 0}) == "?????");  // stands in memory
}

// Each rule carried out: a frame as the code would leave it, and the caller that was there before.
TEST_CASE("eh_frame: realigned stacks, with the argument pointer in r10 and kept in the frame") {
  // GCC's prologue: lea 8(%rsp),%r10; and $-64,%rsp; push -8(%r10); push %rbp; mov %rsp,%rbp; push %rbx; push %r10.
  Writer w;
  w.fde(w.plain_cie(), kCode, 0x100, {0x45, 0x0c, 10, 0,  // +5: CFA = r10
                                      0x4d, 0x10, 6,  2,    0x76, 0,  // +18: rbp at [rbp]
                                      0x44, 0x0f, 3,  0x76, 0x70, 0x06,  // +22: CFA = [rbp - 16]
                                      0x10, 3,    2,  0x76, 0x78,  // rbx at [rbp - 8]
                                      0x5e, 0x0c, 10, 0,  // +52: CFA = r10
                                      0x45, 0x0c, 7,  8});  // +57: CFA = rsp + 8
  Compiled c(w.out);
  Table table = Table::at(c.compiled.bytes.data());
  struct Memory {
    std::map<uint64_t, uint64_t> words;
    bool read(Addr at, uint64_t* value) {
      auto found = words.find(at.value);
      return found != words.end() && (*value = found->second, true);
    }
  };
  constexpr uint64_t kCfa = 0x7ff0000000a8, kFrame = 0x7ff000000030;  // rbp, behind the realigned return address
  Memory memory{
      {{kCfa - 8, 0x401234}, {kFrame + 8, 0x401234}, {kFrame, 0xb0b}, {kFrame - 8, 0xbeb}, {kFrame - 16, kCfa}}};
  auto caller_at = [&](uint64_t offset, std::initializer_list<std::pair<X86_64::Reg, uint64_t>> values) {
    RegSet<X86_64> regs{}, caller{};
    for (auto [reg, value] : values) regs.set(reg, value);
    const Row* row = table.lookup(ImageAddr(kCode + offset));
    REQUIRE(row);
    REQUIRE(step(table, *row, regs, memory, 0, &caller) == StepStatus::ok);
    CHECK(caller.sp().value == kCfa);
    CHECK(caller.pc().value == 0x401234);
    CHECK(caller.get(X86_64::rbp) == 0xb0b);
    CHECK(caller.get(X86_64::rbx) == 0xbeb);
  };
  using R = X86_64;
  caller_at(0, {{R::rsp, kCfa - 8}, {R::rbp, 0xb0b}, {R::rbx, 0xbeb}});
  caller_at(5, {{R::rsp, kCfa - 8}, {R::r10, kCfa}, {R::rbp, 0xb0b}, {R::rbx, 0xbeb}});
  caller_at(9, {{R::rsp, kFrame + 16}, {R::r10, kCfa}, {R::rbp, 0xb0b}, {R::rbx, 0xbeb}});
  caller_at(18, {{R::rsp, kFrame}, {R::r10, kCfa}, {R::rbp, kFrame}, {R::rbx, 0xbeb}});
  caller_at(30, {{R::rsp, kFrame - 200}, {R::rbp, kFrame}, {R::rbx, 1}});
  caller_at(57, {{R::rsp, kCfa - 8}, {R::rbp, kFrame}, {R::rbx, 1}});
}

TEST_CASE("eh_frame: a common entry with a personality only, and entries without one between") {
  Writer w;
  size_t personality = w.cie("zP", Bytes{0x03} + le(0x4000, 4));
  w.fde_raw(personality, le(0x1000, 8) + le(0x10, 8), {0x0e, 16});
  size_t indirect = w.cie("zPR", Bytes{0x9b} + le(0x4000, 4) + Bytes{0x03});
  w.fde(indirect, 0x1010, 0x10, {});
  w.fde_raw(personality, le(0x1020, 8) + le(0x10, 8), {});
  size_t none = w.cie("zPR", {0xff, 0x03});
  w.fde(none, 0x1030, 0x10, {});
  size_t aligned =
      w.cie("zPR", Bytes{0x50} + Bytes(static_cast<size_t>(-(kSection + w.out.size() + 8 + 1 + 4 + 3 + 1 + 1) & 7), 0) +
                       le(0x4000, 8) + Bytes{0x03});
  w.fde(aligned, 0x1040, 0x10, {});
  Compiled c(w.out);
  CHECK(c.at(0x1000) == kPushed);
  for (uint64_t at : {0x1010, 0x1020, 0x1030, 0x1040}) CHECK(c.at(at) == kCall);
  CHECK(c.compiled.stats.unusable_entries == 0);
}

TEST_CASE("eh_frame: many entries that take turns with large common entries cost no more than one after the other") {
  Writer w;
  Bytes rules = kCallRules;
  for (int i = 0; i < 200000; i++) rules.push_back(0);  // nops
  size_t one = w.cie("zR", {0x03}, rules), two = w.cie("zR", {0x03}, rules);
  for (uint64_t i = 0; i < 10000; i++) w.fde(i % 2 ? one : two, kCode + i, 1, {});
  Compiled c(w.out);  // not four thousand million instructions
  CHECK(c.at(kCode + 9999) == kCall);
}

TEST_CASE("eh_frame: entries that contradict themselves stop a walk in their whole range") {
  Bytes programs[] = {{0x0b},
                      {0x02},
                      {0x41, 0x0e, 16, 0x0e},
                      {0x86},
                      {0x0f, 5, 0x77},
                      {0x0f, 1, 0x96, 0x0e, 8},
                      Bytes{0x41, 0x01} + le(kCode - 8, 4),
                      Bytes{0x0f, 1, 0x96, 0x0d, 6},
                      Bytes(100, 0x0a),
                      Bytes{0x10, 6} + uleb(1 << 30)};
  for (const Bytes& program : programs) {
    Writer w;
    size_t cie = w.plain_cie();
    w.fde(cie, kCode, 0x10, program);
    w.fde(cie, kCode + 0x10, 0x10, {});
    Compiled c(w.out);
    CHECK(c.at(kCode) == "inexpressible");
    CHECK(c.at(kCode + 0xf) == "inexpressible");
    CHECK(c.at(kCode + 0x10) == kCall);
    CHECK(c.stopped(Inexpressible::malformed_program) == 1);
  }
  for (uint8_t unknown : {0x17, 0x1c, 0x2c, 0x30, 0x3f}) {
    Writer w;
    w.fde(w.plain_cie(), kCode, 0x10, {unknown});
    Compiled c(w.out);
    CHECK(c.at(kCode) == "inexpressible");
    CHECK(c.stopped(Inexpressible::unknown_operation) == 1);
  }
}

TEST_CASE("eh_frame: a broken entry costs only itself, a broken length all behind it") {
  Writer w;
  size_t cie = w.plain_cie();
  w.fde(cie, 0x1000, 0x10, {});
  w.entry(le(0x7fffffff, 4), Bytes(16, 0xcc));  // its common entry would lie in front of the section
  w.entry(le(w.out.size() + 4 - 1, 4), Bytes(16, 0xcc));  // in the middle of another
  w.entry({}, {1, 2});  // too short for an id
  w.entry(le(0, 4), {1});  // a common entry that ends early
  w.fde(cie, 0x1010, 0x10, {});
  size_t before = w.out.size();
  w.out = w.out + le(0x10000000, 4);
  w.fde(cie, 0x1020, 0x10, {});
  Compiled c(w.out);
  CHECK(c.at(0x1000) == kCall);
  CHECK(c.at(0x1010) == kCall);
  CHECK(c.at(0x1020) == "gap");
  CHECK(c.compiled.stats.unusable_entries == 5);
  for (size_t length = 0; length < before; length++)
    Compiled(Bytes(w.out.begin(), w.out.begin() + static_cast<long>(length)));
}

// Mutated sections end in a table that is accepted, in bounded time; under the address sanitizer no read leaves the bytes.
TEST_CASE("eh_frame: mutated input") {
  Writer w;
  size_t cie = w.cie("zPLR", Bytes{0x9b} + le(0x1234, 4) + Bytes{0x1b, 0x03});
  Bytes everything = {0x41, 0x0e, 16,   0x86, 2,    0x0a, 0x02, 5,    0x0d, 6,  0x0b, 0x03, 1,    0,
                      0x10, 3,    2,    0x77, 8,    0x09, 16,   1,    0x0f, 11, 0x77, 8,    0x80, 0,
                      0x3f, 0x1a, 0x3b, 0x2a, 0x33, 0x24, 0x22, 0x42, 0x16, 12, 2,    0x77, 8};
  for (uint64_t i = 0; i < 6; i++) w.fde(cie, 0x1000 + i * 0x80, 0x80, everything);
  w.fde_raw(w.cie("zRS", {0x1b}), le(0x1800 - kSection - w.out.size() - 8, 4) + le(0x100, 4), everything);
  std::mt19937_64 random(6);
  for (int round = 0; round < 30000; round++) {
    Bytes bytes = w.out;
    for (unsigned n = 1 + random() % 4; n; n--) {
      uint8_t values[] = {0, 0x7f, 0x80, 0xff, static_cast<uint8_t>(random())};
      bytes[random() % bytes.size()] = values[random() % 5];
    }
    if (round % 10 == 0) bytes.resize(random() % bytes.size());
    Compiled c(bytes, round % 2 ? kX86_64 : kAarch64);
    REQUIRE(Table::open(c.compiled.bytes));
    CHECK(c.at(kCode - 1) == "gap");
  }
}

}  // namespace
}  // namespace sonde::host
