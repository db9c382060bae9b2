// Which addresses calls enter, on programs whose source is the truth.
#include "host/image/functions.h"

#include <fmt/format.h>

#include <map>

#include "host/image/testing.h"

using namespace sonde;
using namespace sonde::host;
using namespace sonde::host::testing;

namespace {

std::map<std::string, uint64_t> addresses(const std::string& path) {
  std::map<std::string, uint64_t> all;
  for (auto& line : run("nm --defined-only " + path))
    if (auto w = words(line); w.size() == 3) all[w[2]] = std::stoull(w[0], nullptr, 16);
  return all;
}

std::string name_at(const Image& image, uint64_t addr) {
  auto hit = image.find(ImageAddr(addr));
  return hit ? fmt::format("{}+{}", hit->function->name, hit->offset) : "unknown";
}

}  // namespace

TEST_CASE("functions: symbols without size or type, nested and oversized ones") {
  auto folder = fresh_folder("oddities");
  std::string source = std::string(SONDE_SOURCE_DIR) + "/tests/cases/045-symbol-table-oddities/case.c";
  run(fmt::format("gcc -O1 -g -o full {0} && gcc -O1 -rdynamic -o sparse {0} && cp sparse sparse.full && strip "
                  "--strip-all sparse",
                  source),
      folder);
  auto at = addresses(folder + "/full");
  auto full = open_image(folder + "/full");
  for (const char* name : {"sz0", "sz1", "outerf", "intext", "hugesz", "after", "main"}) {
    auto* f = function_named(*full, name);
    REQUIRE_MESSAGE(f, name);
    CHECK(f->range.begin.value == at[name]);
    CHECK_FALSE(f->label);
    CHECK_FALSE(f->sizeless);
  }
  // Up to the next symbol: sz0 and its filler end at sz1, sz1 at lonely, hugesz at after.
  CHECK(function_named(*full, "sz0")->range.end.value == at["sz1"]);
  CHECK(function_named(*full, "sz1")->range.end.value == at["lonely"]);
  CHECK(function_named(*full, "hugesz")->range.end.value == at["after"]);
  CHECK(function_named(*full, "outerf")->range.end.value == at["intext"]);
  CHECK(function_named(*full, "intext")->range.end.value == at["hugesz"]);
  CHECK_FALSE(function_named(*full, "innerl"));
  CHECK_FALSE(function_named(*full, "tbl"));
  CHECK(name_at(*full, at["innerl"]) == "outerf+3");
  REQUIRE(function_named(*full, "lonely"));
  CHECK(function_named(*full, "lonely")->label);

  // Only exported names are left: those without size cover their own address, lonely's code belongs to nobody.
  at = addresses(folder + "/sparse.full");
  auto sparse = open_image(folder + "/sparse");
  CHECK(sparse->stripped());
  CHECK(name_at(*sparse, at["sz0"]) == "sz0+0");
  CHECK(function_named(*sparse, "sz0")->sizeless);
  CHECK(name_at(*sparse, at["sz0"] + 1) == "unknown");
  CHECK(name_at(*sparse, at["sz1"] + 1) == "unknown");
  CHECK(name_at(*sparse, at["lonely"]) == "unknown");
  CHECK(name_at(*sparse, at["hugesz"] + 1) == "unknown");
  CHECK(name_at(*sparse, at["outerf"] + 4) == "outerf+4");
  CHECK(name_at(*sparse, at["after"] + 1) == "after+1");
}

TEST_CASE("functions: split-off parts and clones") {
  auto folder = fresh_folder("clones");
  std::string source = std::string(SONDE_SOURCE_DIR) + "/tests/cases/043-split-and-cloned-functions/";
  std::string file = std::filesystem::exists(source + "case.cc") ? "case.cc" : "case.c";
  run(fmt::format("g++ -O2 -o full {}{} && strip --strip-all -o bare full", source, file), folder);
  auto at = addresses(folder + "/full");
  auto full = open_image(folder + "/full"), bare = open_image(folder + "/bare");
  size_t cold = 0, moved = 0;
  for (auto& [name, addr] : at) {
    if (name.find(".cold") == name.npos) continue;
    CAPTURE(name);
    cold++;
    auto* f = function_named(*full, name);
    REQUIRE(f);
    CHECK(f->cold_part);
    // Without names such a part shows only in its unwind range: entered with a frame that is already there.
    auto hit = bare->find(ImageAddr(addr));
    REQUIRE(hit);
    CHECK(hit->offset == 0);
    moved += hit->function->cold_part;
  }
  CHECK(cold > 0);
  CHECK(moved > 0);
  auto* main = function_named(*full, "main");
  REQUIRE(main);
  auto hit = bare->find(main->range.begin);
  REQUIRE(hit);
  CHECK(hit->function->name.empty());
  CHECK(hit->function->source == FunctionSource::eh_frame);
  CHECK_FALSE(hit->function->cold_part);
  CHECK(hit->function->range == main->range);
  CHECK(display_name(*bare, *hit->function) == fmt::format("bare+{:#x}", main->range.begin.value));
}

TEST_CASE("functions: a stripped program's unwind ranges are its functions, stubs and starts aside") {
  auto folder = fresh_folder("stripped");
  write_file(folder + "/a.c",
             "#include <stdio.h>\n#include <string.h>\n"
             "static __attribute__((noinline)) int one(int x) { return x + (int)strlen(\"a\" + x); }\n"
             "__attribute__((noinline)) int two(int x) { return one(x) * printf(\"%d\", x); }\n"
             "int main(int c, char **v) { return two(c) + puts(v[0]); }\n");
  run("gcc -O1 -fcf-protection -o full a.c && strip --strip-all -o bare full", folder);
  auto at = addresses(folder + "/full");
  auto bare = open_image(folder + "/bare");
  std::map<uint64_t, bool> entries;
  for (auto& f : bare->functions()) entries[f.range.begin.value] = f.cold_part;
  std::map<uint64_t, bool> expected = {
      {at["one"], false}, {at["two"], false}, {at["main"], false}, {at["_start"], true}};
  CHECK(entries == expected);
}

TEST_CASE("functions: the better name is what a program calls") {
  auto folder = fresh_folder("aliases");
  write_file(folder + "/a.c",
             "static int local_work(void) { return 1; }\n"
             "int __real_work(void) __attribute__((alias(\"local_work\")));\n"
             "int work(void) __attribute__((weak, alias(\"local_work\")));\n"
             "int main(void) { return work(); }\n");
  run("gcc -O0 -o a a.c", folder);
  auto image = open_image(folder + "/a");
  auto* f = function_named(*image, "work");
  REQUIRE(f);
  CHECK(f->aliases == std::vector<std::string>{"__real_work", "local_work"});
  CHECK(f->global);
}
