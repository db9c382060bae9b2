// Landing pads held against the labels that the compiler's own assembly names, and tables that lie.
#include "host/tables/exception_tables.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <random>
#include <set>

#include "host/image/testing.h"

using namespace sonde;
using namespace sonde::host;
using namespace sonde::host::testing;

namespace {

constexpr const char* kSource = R"(
#include <stdexcept>
#include <string>
#include <vector>
struct Noisy { Noisy(); ~Noisy(); };
int count;
Noisy::Noisy() { count++; }
Noisy::~Noisy() { count--; }
[[gnu::noinline]] void thrower(int i) { if (i % 3 == 0) throw std::runtime_error("x"); if (i % 3 == 1) throw i; }
[[gnu::noinline]] void no_more(int i) noexcept { Noisy n; thrower(i); }
[[gnu::noinline]] int nested(int i) {
  Noisy a;
  try {
    Noisy b;
    thrower(i);
    try { thrower(i + 1); } catch (int) { Noisy c; thrower(i + 2); }
  } catch (const std::exception& e) { return static_cast<int>(std::string(e.what()).size()); }
  return 0;
}
[[gnu::noinline]] std::vector<std::string> lists(int i) {
  std::vector<std::string> v{"a", "b", std::string(static_cast<size_t>(i), 'c')};
  if (__builtin_expect(i > 100, 0)) { Noisy n; thrower(i); v.push_back("d"); }
  return v;
}
int main(int c, char**) {
  try { nested(c); } catch (...) {}
  try { lists(c); } catch (...) {}
  if (c > 5) no_more(c);
  return count;
}
)";

// Reads "BEGIN-START, LENGTH, PAD-START or 0, ACTION" groups of .uleb128 (or .long) behind each call-site label.
// GCC and clang write one table row as four such directives, the third of them `.LABEL-.START`.
std::set<std::string> pad_labels(const std::vector<std::string>& assembly) {
  std::set<std::string> labels;
  bool inside = false, table = false;
  size_t field = 0;
  for (const std::string& line : assembly) {
    auto w = words(line);
    if (w.empty()) continue;
    if (w[0] == ".section") inside = w[1].starts_with(".gcc_except_table"), table = false;
    if (w[0].starts_with(".LLSDACSB") || w[0].starts_with(".Lcst_begin")) table = inside, field = 0;
    else if (w[0].starts_with(".LLSDACSE") || w[0].starts_with(".Lcst_end")) table = false;
    if (!table || (w[0] != ".uleb128" && w[0] != ".long" && w[0] != ".byte")) continue;
    if (field++ % 4 == 2 && w[1] != "0") labels.insert(w[1].substr(0, w[1].find('-')));
  }
  return labels;
}

std::map<std::string, uint64_t> symbols_of(const std::string& file, const std::string& folder) {
  std::map<std::string, uint64_t> found;
  for (const std::string& line : run("nm " + file, folder))
    if (auto w = words(line); w.size() == 3) found[w[2]] = std::stoull(w[0], nullptr, 16);
  return found;
}

void compare(const std::string& name, const std::string& compiler, const std::string& options,
             const std::string& link) {
  CAPTURE(name);
  std::string folder = fresh_folder("exception_tables_" + name);
  write_file(folder + "/a.cc", kSource);
  run(fmt::format("{} -S {} a.cc -o a.s", compiler, options), folder);
  auto labels = pad_labels(run("cat a.s", folder));
  CHECK(labels.size() >= 6);
  // Local labels stay symbols, so that the file itself says where they came to lie.
  run(fmt::format("as -L a.s -o a.o && g++ {} a.o -o a", link), folder);
  auto symbols = symbols_of("a", folder);
  std::set<uint64_t> expected, found;
  for (const std::string& label : labels) {
    REQUIRE_MESSAGE(symbols.contains(label), label);
    expected.insert(symbols[label]);
  }
  ExceptionTables tables = read_exception_tables(*open_image(folder + "/a"));
  CHECK(tables.unreadable.empty());
  for (const ThrowingRange& r : tables.ranges) found.insert(r.pad);
  CHECK(found == expected);
  bool in_cold_part = false;
  for (auto& [symbol, at] : symbols)
    if (symbol.ends_with(".cold"))
      for (uint64_t pad : found) in_cold_part |= at <= pad && pad < at + 400;
  if (options.find("-O2") != options.npos && compiler == "g++") CHECK(in_cold_part);
}

}  // namespace

TEST_CASE("exception tables: every landing pad that the compiler wrote, and no other") {
  compare("o2", "g++", "-O2", "");
  compare("o0", "g++", "-O0", "");
  compare("fixed", "g++", "-O2 -fno-pie", "-no-pie");
  compare("large", "g++", "-O2 -fno-pie -mcmodel=large", "-no-pie");
  if (access("/usr/bin/clang++-19", X_OK) == 0) compare("clang", "clang++-19", "-O2 -fno-addrsig", "");
  else MESSAGE("skipped: clang++-19 is not installed");
}

namespace {

// Two functions, the first with an area that the given lines are, both with eight nops of code.
constexpr const char* kFrame = R"(
 .text
 .globl first, second, main
 .type first,@function
first: .cfi_startproc
 .cfi_personality 0x9b,DW.ref.__gxx_personality_v0
 .cfi_lsda {},{}
 .skip 8,0x90
 ret
 .cfi_endproc
.Lfirst_end:
 .size first,.-first
 .type second,@function
second: .cfi_startproc
 .skip 8,0x90
.Lpad:
 ret
 .cfi_endproc
 .size second,.-second
main: ret
 .section .gcc_except_table,"a",@progbits
area: {}
 .section .data.rel.ro,"aw"
 .balign 8
pointer: .quad area
 .section .data.rel.local.DW.ref.__gxx_personality_v0,"awG",@progbits,DW.ref.__gxx_personality_v0,comdat
 .hidden DW.ref.__gxx_personality_v0
 .weak DW.ref.__gxx_personality_v0
DW.ref.__gxx_personality_v0: .quad __gxx_personality_v0
 .section .note.GNU-stack,"",@progbits
)";

struct Built {
  std::shared_ptr<const Image> image;
  std::map<std::string, uint64_t> symbols;
};

Built build(const std::string& name, const char* encoding, const char* pointer, const std::string& area,
            const char* how = "") {
  std::string folder = fresh_folder("exception_area_" + name);
  write_file(folder + "/a.s", fmt::format(fmt::runtime(kFrame), encoding, pointer, area));
  run(fmt::format("as -L a.s -o a.o && g++ {} a.o -o a", how), folder);
  return {open_image(folder + "/a"), symbols_of("a", folder)};
}

// No @LPStart, no types, uleb128: one call at `first`+1, pad 4.
const std::string kPlain = ".byte 0xff, 0xff, 1, 4, 1, 2, 4, 0";

}  // namespace

TEST_CASE("exception tables: every way to say where the area and its pads are") {
  auto pads = [](const Built& b) {
    ExceptionTables tables = read_exception_tables(*b.image);
    CHECK(tables.unreadable.empty());
    std::vector<uint64_t> out;
    for (auto& r : tables.ranges) {
      if (r.begin != b.symbols.at("first") + 1 || r.end != r.begin + 2) continue;
      out.push_back(r.pad);
    }
    return out;
  };
  auto plain = build("plain", "0x1b", "area", kPlain);
  CHECK(pads(plain) == std::vector{plain.symbols["first"] + 4});
  // The linker gives the pointer a relative relocation in one, and its final value in the other.
  for (const char* how : {"", "-no-pie"}) {
    auto indirect = build(fmt::format("indirect{}", how), "0x9b", "pointer", kPlain, how);
    CHECK(pads(indirect) == std::vector{indirect.symbols["first"] + 4});
  }
  // Pads in another part than the calls.
  auto start = build("start", "0x1b", "area", ".byte 0x1b; .long second-.; .byte 0xff, 1, 4, 1, 2, 8, 0");
  CHECK(pads(start) == std::vector{start.symbols["second"] + 8});
  auto fixed =
      build("fixed", "0x3", "area", ".byte 0x3; .long 0; .byte 0xff, 3, 13; .long 1, 2, .Lpad; .byte 0", "-no-pie");
  CHECK(pads(fixed) == std::vector{fixed.symbols["second"] + 8});
}

TEST_CASE("exception tables: what cannot be read is said to be unknown") {
  const std::map<std::string, std::string> areas = {
      {"encoding", ".byte 0xff, 0xff, 0x1f, 4, 1, 2, 4, 0"},       // no such format
      {"relative", ".byte 0xff, 0xff, 0x11, 4, 1, 2, 4, 0"},       // relative to what?
      {"start", ".byte 0x9b, 0, 0, 0, 0, 0xff, 1, 4, 1, 2, 4, 0"},  // an indirect @LPStart
      {"size", ".byte 0xff, 0xff, 1, 0xff, 0xff, 0xff, 0xff, 0xff, 0x0f"},
      {"overlong", ".byte 0xff, 0xff, 1, 0xff; .skip 40, 0xff"},
      {"half", ".byte 0xff, 0xff, 1, 7, 1, 2, 4, 0, 5, 1, 6"},  // ends within its second entry
  };
  for (auto& [name, area] : areas) {
    CAPTURE(name);
    auto built = build(name, "0x1b", "area", area);
    ExceptionTables tables = read_exception_tables(*built.image);
    REQUIRE(tables.unreadable.size() == 1);
    CHECK(tables.unreadable[0].begin.value == built.symbols["first"]);
  }
  auto outside = build("outside", "0x3", "0x7f000000", kPlain, "-no-pie");
  CHECK(read_exception_tables(*outside.image).unreadable.size() == 1);
}

TEST_CASE("exception tables: damaged bytes give pads or unknown ones, at once") {
  auto folder = fresh_folder("exception_damage");
  write_file(folder + "/a.cc", kSource);
  run("g++ -O2 a.cc -o a", folder);
  auto good = read_file(folder + "/a");
  auto image = open_image(folder + "/a");
  auto range_of = [&](const char* name) {
    const Section* s = image->section(name);
    REQUIRE(s);
    return std::pair{s->offset.value, s->size};
  };
  std::mt19937_64 random(7);
  size_t most = 0, unreadable = 0;
  for (int round = 0; round < 3000; round++) {
    auto bytes = good;
    auto [offset, size] = range_of(round % 3 ? ".gcc_except_table" : ".eh_frame");
    for (uint64_t i = 0, n = 1 + random() % 8; i < n; i++)
      bytes[offset + random() % size] = random() % 2 ? static_cast<uint8_t>(random()) : uint8_t{0xff};
    auto damaged = Image::from_memory(std::move(bytes), "damaged");
    REQUIRE(damaged);
    ExceptionTables tables = read_exception_tables(**damaged);
    most = std::max(most, tables.ranges.size());
    unreadable += tables.unreadable.size();
    REQUIRE(std::ranges::is_sorted(tables.ranges, {}, &ThrowingRange::begin));
  }
  CHECK(unreadable > 0);
  CHECK(most <= good.size() / 4);  // an entry has four bytes or more
}
