// Images against what binutils and the dynamic loader say about the same files.
#include "host/image/image.h"

#include <elf.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <set>

#include "host/image/fde_ranges.h"
#include "host/image/testing.h"

using namespace sonde;
using namespace sonde::host;
using namespace sonde::host::testing;

namespace {

const std::vector<std::string> kLibraries = {"/usr/lib/x86_64-linux-gnu/libc.so.6",
                                             "/usr/lib/x86_64-linux-gnu/libstdc++.so.6",
                                             "/usr/lib/x86_64-linux-gnu/libsqlite3.so.0", "/usr/bin/python3"};

struct Exported {
  uint64_t addr, size;
  std::string type, name;  // name with its version as readelf prints it
};

std::vector<Exported> exported_functions(const std::string& path) {
  std::vector<Exported> symbols;
  for (auto& line : run("readelf -W --dyn-syms " + path)) {
    auto w = words(line);
    if (w.size() < 8 || (w[3] != "FUNC" && w[3] != "IFUNC") || w[6] == "UND") continue;
    symbols.push_back({std::stoull(w[1], nullptr, 16), std::stoull(w[2], nullptr, 0), w[3], w[7]});
  }
  return symbols;
}

}  // namespace

TEST_CASE("image: every exported function is there at its address, with its size, name and version") {
  for (auto& path : kLibraries) {
    CAPTURE(path);
    auto image = open_image(path);
    auto exported = exported_functions(path);
    REQUIRE(exported.size() > 300);
    for (auto& symbol : exported) {
      auto hit = image->find(ImageAddr(symbol.addr));
      REQUIRE_MESSAGE(hit, symbol.name);
      CAPTURE(symbol.name);
      REQUIRE(hit->offset == 0);
      auto& f = *hit->function;
      CHECK((f.name == symbol.name || std::ranges::find(f.aliases, symbol.name) != f.aliases.end()));
      CHECK(f.global);
      CHECK(f.ifunc == (symbol.type == "IFUNC"));
      if (symbol.size > 0 && !f.ifunc) CHECK(f.range.size() >= symbol.size);
      if (symbol.type == "FUNC") CHECK_FALSE(f.cold_part);
    }
  }
}

TEST_CASE("image: functions are sorted, do not overlap and lie in executable segments") {
  for (auto& path : kLibraries) {
    CAPTURE(path);
    auto image = open_image(path);
    ImageAddr end;
    for (auto& f : image->functions()) {
      REQUIRE(f.range.begin >= end);
      REQUIRE(f.range.begin < f.range.end);
      end = f.range.end;
      REQUIRE(std::ranges::any_of(image->segments(), [&](auto& s) {
        return s.executable && s.range.begin <= f.range.begin && f.range.end <= s.range.end;
      }));
    }
  }
}

TEST_CASE("image: header facts are readelf's") {
  for (auto& path : kLibraries) {
    CAPTURE(path);
    auto image = open_image(path);
    std::string id, soname, interpreter, entry;
    for (auto& line : run("readelf -W -n -d -l -h " + path)) {
      auto w = words(line);
      if (line.find("Build ID: ") != line.npos) id = w.back();
      if (line.find("(SONAME)") != line.npos) soname = w.back().substr(1, w.back().size() - 2);
      if (line.find("program interpreter: ") != line.npos) interpreter = w.back().substr(0, w.back().size() - 1);
      if (line.find("Entry point address: ") != line.npos) entry = w.back();
    }
    CHECK(image->build_id() == id);
    CHECK(image->soname() == soname);
    CHECK(image->interpreter().value_or("") == interpreter);
    CHECK(fmt::format("{:#x}", image->entry().value) == entry);
    CHECK(image->machine() == EM_X86_64);
    CHECK_FALSE(image->is_static());
  }
}

TEST_CASE("image: unwind ranges are readelf's") {
  for (auto& path : kLibraries) {
    CAPTURE(path);
    auto image = open_image(path);
    std::set<std::pair<uint64_t, uint64_t>> expected, got;
    for (auto& line : run("readelf -W --debug-dump=frames " + path + " 2>/dev/null || true")) {
      auto at = line.find(" pc=");
      if (at == line.npos) continue;
      expected.insert({std::stoull(line.substr(at + 4), nullptr, 16),
                       std::stoull(line.substr(line.find("..", at) + 2), nullptr, 16)});
    }
    auto* section = image->section(".eh_frame");
    REQUIRE(section);
    for (auto& r : read_fde_ranges(image->bytes(*section), section->addr, EM_X86_64))
      got.insert({r.range.begin.value, r.range.end.value});
    CHECK(expected.size() > 1000);
    CHECK(got == expected);
  }
}

TEST_CASE("image: bytes of a range are the file's, and nothing beyond a segment") {
  auto image = open_image("/usr/bin/python3");
  auto file = read_file("/usr/bin/python3");
  auto* text = image->section(".text");
  REQUIRE(text);
  auto bytes = image->bytes({text->addr, text->addr + static_cast<int64_t>(text->size)});
  REQUIRE(bytes.size() == text->size);
  CHECK(std::equal(bytes.begin(), bytes.end(), file.begin() + static_cast<ptrdiff_t>(text->offset.value)));
  auto& last = image->segments().back();
  CHECK(image->bytes({last.range.end - 1, last.range.end + 1}).empty());
  CHECK(image->bytes({ImageAddr(~0ull - 4), ImageAddr(2)}).empty());
  CHECK(image->bytes({text->addr + 8, text->addr}).empty());
}

TEST_CASE("image: what is no program is refused in words") {
  auto folder = fresh_folder("refused");
  auto message = [&](const std::string& name) {
    auto image = Image::open(name[0] == '/' ? name : folder + "/" + name);
    return image ? std::string("opened") : image.error().message.substr(image.error().message.find(' ') + 1);
  };
  write_file(folder + "/empty", "");
  write_file(folder + "/text", "hello");
  write_file(folder + "/script", "#!/bin/sh\n");
  write_file(folder + "/a.c", "int main(void) { return 0; }\n");
  run("mkfifo fifo && gcc -g -c a.c && gcc -g -o a a.c && objcopy --only-keep-debug a a.debug", folder);
  CHECK(message("missing") == "cannot be opened: No such file or directory");
  CHECK(message("empty") == "is empty, not an ELF file");
  CHECK(message("text") == "is not an ELF file");
  CHECK(message("script") == "is a script, not an ELF file; name its interpreter instead");
  CHECK(message("fifo") == "is not a regular file");
  CHECK(message("/usr") == "is a folder, not a program");
  CHECK(message("a.o") == "is an object file, not a program or library");
  CHECK(message("a.debug") == "is a debug file without code; name the program itself");
  CHECK(message("a") == "opened");
}

TEST_CASE("image: a symbol is found by name, the default of its versions") {
  auto folder = fresh_folder("versions");
  std::string source = std::string(SONDE_SOURCE_DIR) + "/tests/cases/042-symbol-versions/";
  run(fmt::format("gcc -O1 -fPIC -shared -Wl,--version-script={0}map -o full.so {0}lib.c && strip --strip-unneeded -o "
                  "bare.so full.so",
                  source),
      folder);
  std::map<std::string, uint64_t> truth;  // foo@V1 -> address
  for (auto& line : run("nm -D --defined-only --with-symbol-versions full.so", folder))
    truth[words(line)[2]] = std::stoull(line, nullptr, 16);
  REQUIRE(truth.contains("foo@V1"));
  for (const char* name : {"full.so", "bare.so"}) {
    CAPTURE(name);
    auto image = open_image(folder + "/" + name);
    CHECK(image->stripped() == (std::string(name) == "bare.so"));
    REQUIRE(image->symbol("foo"));
    CHECK(image->symbol("foo")->value == truth["foo@@V3"]);
    CHECK_FALSE(image->symbol("fo"));
    for (const char* version : {"foo@V1", "foo@V2", "foo@@V3"}) {
      auto hit = image->find(ImageAddr(truth[version]));
      REQUIRE(hit);
      CHECK(hit->offset == 0);
      CHECK(hit->function->name == "foo");
      CHECK(std::ranges::find(hit->function->aliases, version) != hit->function->aliases.end());
    }
  }
}

TEST_CASE("image: without section headers what the loader needs is still found") {
  auto folder = fresh_folder("sectionless");
  for (const std::string path :
       {"/usr/lib/x86_64-linux-gnu/libsqlite3.so.0", "/usr/lib/x86_64-linux-gnu/libstdc++.so.6", "/usr/bin/python3"}) {
    CAPTURE(path);
    auto bytes = read_file(path);
    Elf64_Ehdr header;
    std::memcpy(&header, bytes.data(), sizeof header);
    bytes.resize(header.e_shoff);
    header.e_shoff = 0, header.e_shnum = 0, header.e_shstrndx = 0;
    std::memcpy(bytes.data(), &header, sizeof header);
    auto cut = Image::from_memory(std::move(bytes), "cut");
    REQUIRE(cut);
    auto whole = open_image(path);
    CHECK((*cut)->build_id() == whole->build_id());
    CHECK((*cut)->soname() == whole->soname());
    auto *table = (*cut)->section(".eh_frame"), *whole_table = whole->section(".eh_frame");
    REQUIRE(table);
    CHECK(table->addr == whole_table->addr);
    CHECK(table->size + 4 >= whole_table->size);  // up to, perhaps with, the terminator
    for (auto& f : whole->functions()) {
      if (f.name.empty()) continue;
      auto hit = (*cut)->find(f.range.begin);
      REQUIRE(hit);
      REQUIRE(hit->offset == 0);
      REQUIRE(hit->function->name == f.name);
      REQUIRE(hit->function->aliases == f.aliases);
    }
  }
}
