// Source lines and inlined calls, held against eu-addr2line. (That of binutils leaves out levels.)
#include <doctest/doctest.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <map>
#include <random>
#include <set>

#include "host/image/testing.h"

namespace sonde::host {
namespace {

using namespace testing;

// Inlining in inlining, loops, a template, lambdas, a nested namespace and a part that is split off.
constexpr const char* kSource = R"(
#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>
namespace deep { namespace inner {
struct Counter {
  int n = 0;
  inline void add(int by) { n += by; }
  inline void add_twice(int by) { add(by); add(by + 1); }
};
} }
template <class T> static inline T square(T value) { return value * value; }
static inline int twice(int x) { return square(x) + square(x + 1); }
__attribute__((noinline)) int work(std::vector<int>& values, deep::inner::Counter& counter) {
  std::sort(values.begin(), values.end(), [](int a, int b) { return twice(a) < twice(b); });
  for (int v : values) counter.add_twice(twice(v));
  if (counter.n == 12345) throw std::runtime_error("rare");
  return counter.n;
}
int main(int argc, char**) {
  std::vector<int> values;
  for (int i = 0; i < argc * 10; i++) values.push_back(i * 7 % 11);
  deep::inner::Counter counter;
  return work(values, counter) == std::string("x").size();
}
)";

// "path/a.cc:12:3" -> "a.cc:12"; "" where it says nothing.
std::string place_of(std::string line) {
  line.erase(0, line.rfind('/') + 1);
  auto colon = line.find(':');
  line.resize(std::min(line.find(':', colon + 1), line.size()));
  return line.starts_with("?") || line.ends_with(":0") ? "" : line;
}

// Where eu-addr2line contradicts itself: at an address that two calls inlined side by side both claim.
std::set<uint64_t> ambiguous(const std::string& file, std::map<uint64_t, std::vector<std::string>>& levels) {
  std::set<uint64_t> found;
  uint64_t at = 0;
  for (const std::string& line : run(fmt::format("eu-addr2line -a -f -e {0} <{0}.addresses", file))) {
    if (line.starts_with("0x")) at = std::stoull(line, nullptr, 16);
    constexpr std::string_view kInlined = " inlined at ";
    auto call = line.find(kInlined);
    if (call == line.npos) continue;
    std::string place = line.substr(call + kInlined.size());
    place = place_of(place.substr(0, place.find(" in ")));
    if (levels[at].size() < 2 || levels[at][1] != place) found.insert(at);
  }
  return found;
}

// The place of each level, by address.
std::map<uint64_t, std::vector<std::string>> by_addr2line(const std::string& file,
                                                          const std::vector<uint64_t>& addresses) {
  std::string list;
  for (uint64_t a : addresses) list += fmt::format("{:#x}\n", a);
  write_file(file + ".addresses", list);
  std::map<uint64_t, std::vector<std::string>> found;
  std::vector<std::string>* levels = nullptr;
  for (const std::string& line : run(fmt::format("eu-addr2line -a -i -e {0} <{0}.addresses", file))) {
    if (line.starts_with("0x")) levels = &found[std::stoull(line, nullptr, 16)];
    else levels->push_back(place_of(line));
  }
  return found;
}

}  // namespace

TEST_CASE("source lines: inlined calls and lines as addr2line has them") {
  auto folder = fresh_folder("lines");
  write_file(folder + "/a.cc", kSource);
  struct Build {
    std::string name, command;
  };
  for (auto [name, command] :
       {Build{"gcc", "g++ -O2 -g -o gcc a.cc"}, Build{"dwarf4", "g++ -O2 -gdwarf-4 -o dwarf4 a.cc"},
        Build{"clang", "clang++-19 -O2 -g -gdwarf-aranges -o whole a.cc && clang++-19 -O2 -g -o clang a.cc"},
        Build{"split", "g++ -O2 -g -o whole a.cc && g++ -O2 -g -gsplit-dwarf -o split a.cc"},
        Build{"debug",
              "g++ -O2 -g -o whole a.cc && objcopy --only-keep-debug whole debug.debug && strip -g -o "
              "debug whole && objcopy --add-gnu-debuglink=debug.debug debug"}}) {
    CAPTURE(name);
    run(command, folder);
    auto image = open_image(folder + "/" + name);
    std::vector<uint64_t> addresses;
    for (const char* wanted : {"main", "_Z4workRSt6vectorIiSaIiEERN4deep5inner7CounterE"}) {
      auto* function = function_named(*image, wanted);
      REQUIRE(function);
      for (uint64_t a = function->range.begin.value; a < function->range.end.value; a++) addresses.push_back(a);
    }
    size_t inlined = 0, differing = 0;
    std::string same = folder + "/" + (name == "gcc" || name == "dwarf4" ? name : "whole");
    auto truth = by_addr2line(same, addresses);
    auto unclear = ambiguous(same, truth);
    CHECK(unclear.size() < addresses.size() / 10);
    for (uint64_t a : addresses) {
      if (unclear.contains(a)) continue;
      std::vector<std::string> places;
      for (auto& row : image->source_rows(ImageAddr(a))) {
        std::string file = row.at.file.substr(row.at.file.rfind('/') + 1);
        places.push_back(row.at.line ? fmt::format("{}:{}", file, row.at.line) : "");
        inlined += row.inlined;
      }
      if (places == truth[a]) continue;
      if (differing++ < 5)
        MESSAGE(fmt::format("{:#x}: {} but addr2line {}", a, fmt::join(places, " < "), fmt::join(truth[a], " < ")));
    }
    CHECK(addresses.size() > 300);
    CHECK(inlined > addresses.size() / 2);
    CHECK(differing == 0);
    CHECK(image->debug_problem() == "");
  }
}

TEST_CASE("source lines: names of inlined functions, qualified; none where there is no debug information") {
  auto folder = fresh_folder("linenames");
  write_file(folder + "/a.cc", kSource);
  run("g++ -O2 -g -o a a.cc && strip -g -o bare a", folder);
  auto image = open_image(folder + "/a");
  auto* work = function_named(*image, "_Z4workRSt6vectorIiSaIiEERN4deep5inner7CounterE");
  REQUIRE(work);
  std::set<std::string> names;
  for (ImageAddr a = work->range.begin; a < work->range.end; a = a + 1) {
    auto rows = image->source_rows(a);
    REQUIRE(!rows.empty());
    for (size_t i = 0; i < rows.size(); i++) {
      CHECK(rows[i].inlined == (i + 1 < rows.size()));
      if (rows[i].inlined) names.insert(rows[i].function);
    }
  }
  CHECK(names.contains("deep::inner::Counter::add_twice(int)"));
  CHECK(names.contains("twice"));
  CHECK(names.contains("square<int>"));
  CHECK(open_image(folder + "/bare")->source_rows(work->range.begin).empty());
}

TEST_CASE("source lines: sections that cannot be unpacked are named") {
  auto folder = fresh_folder("unpackable");
  write_file(folder + "/a.cc", kSource);
  run("g++ -O2 -g -gz=zlib -o a a.cc", folder);
  auto bytes = read_file(folder + "/a");
  auto good = open_image(folder + "/a");
  auto* section = good->section(".debug_info");
  REQUIRE(section);
  bytes[section->offset.value] = 77;  // ch_type
  write_file(folder + "/odd", std::string(bytes.begin(), bytes.end()));
  auto odd = open_image(folder + "/odd");
  CHECK(odd->source_rows(odd->functions().front().range.begin).empty());
  CHECK(odd->debug_problem() ==
        folder + "/odd: its section .debug_info cannot be unpacked (compression method 77): no source lines");
}

TEST_CASE("source lines: damaged debug information does no harm") {
  auto folder = fresh_folder("damagedlines");
  write_file(folder + "/a.cc", kSource);
  run("g++ -O2 -g -gz=none -o a a.cc", folder);
  auto good = read_file(folder + "/a");
  auto image = open_image(folder + "/a");
  auto* work = function_named(*image, "main");
  REQUIRE(work);
  std::mt19937 random(7);
  for (int round = 0; round < 200; round++) {
    auto bytes = good;
    for (auto& section : image->sections())
      if (section.name.starts_with(".debug_") && section.size)
        for (int i = 0; i < 4; i++)
          bytes[section.offset.value + random() % section.size] = static_cast<uint8_t>(random());
    auto damaged = Image::from_memory(bytes, "damaged");
    REQUIRE(damaged);
    for (ImageAddr a = work->range.begin; a < work->range.end; a = a + 16) (void)(*damaged)->source_rows(a);
  }
}

}  // namespace sonde::host
