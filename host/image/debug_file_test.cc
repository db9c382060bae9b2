// Separate debug files: by build id, by debug link, compressed, packed into the program itself.
#include "host/image/debug_file.h"

#include <fmt/format.h>

#include <cstring>

#include "host/image/testing.h"

using namespace sonde;
using namespace sonde::host;
using namespace sonde::host::testing;

namespace {

constexpr const char* kSource =
    "static __attribute__((noinline)) int hidden(int x) { return x * 3; }\n"
    "int main(int c, char **v) { return hidden(c) + (v == 0); }\n";

std::unique_ptr<ElfFile> debug_of(const std::string& path, const std::string& root, std::string* problem = nullptr) {
  auto bytes = FileBytes::read(path);
  REQUIRE(bytes);
  auto file = ElfFile::open(std::move(*bytes));
  REQUIRE(file);
  return find_debug_file(**file, path, problem, {&root, 1});
}

}  // namespace

TEST_CASE("debug files: by debug link, checked by its sum") {
  auto folder = fresh_folder("debuglink");
  write_file(folder + "/a.c", kSource);
  run("gcc -g -Wl,--build-id=none -o full a.c && objcopy --only-keep-debug full a.debug && strip -o a full && "
      "objcopy --add-gnu-debuglink=a.debug a",
      folder);
  auto image = open_image(folder + "/a"), full = open_image(folder + "/full");
  CHECK(image->build_id() == "");
  CHECK_FALSE(image->stripped());
  REQUIRE(image->functions().size() == full->functions().size());
  for (size_t i = 0; i < full->functions().size(); i++) {
    CHECK(image->functions()[i].name == full->functions()[i].name);
    CHECK(image->functions()[i].range == full->functions()[i].range);
  }
  run("mkdir .debug && mv a.debug .debug/", folder);
  CHECK_FALSE(open_image(folder + "/a")->stripped());
  run(fmt::format("mkdir -p 'root{0}' && mv .debug/a.debug 'root{0}/'", folder), folder);
  CHECK(open_image(folder + "/a")->stripped());
  CHECK(debug_of(folder + "/a", folder + "/root"));

  // One byte changed in the debug file: it is of another build.
  std::string moved = folder + "/root" + folder + "/a.debug";
  auto bytes = read_file(moved);
  bytes.back() ^= 1;
  write_file(moved, std::string(bytes.begin(), bytes.end()));
  std::string problem;
  CHECK_FALSE(debug_of(folder + "/a", folder + "/root", &problem));
  CHECK(problem == "its debug file " + moved + " is of another build (the check sum differs) and not used");
}

TEST_CASE("debug files: by build id, which a file under that name must have") {
  auto folder = fresh_folder("buildid");
  write_file(folder + "/a.c", kSource);
  run("gcc -g -Wl,--build-id=0x1234567890 -o full a.c && gcc -g -Wl,--build-id=0x1234567891 -o other a.c && "
      "strip -o a full && mkdir -p root/.build-id/12 && objcopy --only-keep-debug full "
      "root/.build-id/12/34567890.debug",
      folder);
  std::string problem;
  CHECK(debug_of(folder + "/a", folder + "/root", &problem));
  CHECK(problem.empty());
  run("objcopy --only-keep-debug other root/.build-id/12/34567890.debug", folder);
  CHECK_FALSE(debug_of(folder + "/a", folder + "/root", &problem));
  CHECK(problem.find("the build id differs") != std::string::npos);
}

TEST_CASE("debug files: a small symbol table packed into the program") {
  auto folder = fresh_folder("minidebug");
  write_file(folder + "/a.c", kSource);
  run("gcc -g -o full a.c && strip -o a full && objcopy --only-keep-debug full d && strip -g d -o mini && xz -k mini "
      "&& "
      "objcopy --add-section .gnu_debugdata=mini.xz a",
      folder);
  auto image = open_image(folder + "/a");
  CHECK_FALSE(image->stripped());
  CHECK(function_named(*image, "hidden"));
  // Cut off in the middle it is no help, and no harm.
  run("head -c 200 mini.xz >cut && objcopy --update-section .gnu_debugdata=cut a", folder);
  CHECK(open_image(folder + "/a")->stripped());
}

TEST_CASE("debug files: compressed sections read as if they were not") {
  auto folder = fresh_folder("compressed");
  write_file(folder + "/a.c", kSource);
  run("gcc -g -gz=none -o plain a.c && objcopy --compress-debug-sections=zlib plain zlib && "
      "objcopy --compress-debug-sections=zlib-gnu plain gnu",
      folder);
  auto plain = open_image(folder + "/plain");
  size_t compressed = 0;
  for (auto& section : plain->sections()) {
    if (!section.name.starts_with(".debug_")) continue;
    CAPTURE(section.name);
    auto expected = plain->bytes(section);
    for (const char* variant : {"zlib", "gnu"}) {
      auto image = open_image(folder + "/" + variant);
      auto* same = image->section(section.name);
      if (!same) same = image->section(".z" + section.name.substr(1));
      REQUIRE(same);
      compressed += same->size != section.size;
      for (int again = 0; again < 2; again++) {
        auto bytes = image->bytes(*same);
        REQUIRE(bytes.size() == expected.size());
        CHECK(std::memcmp(bytes.data(), expected.data(), bytes.size()) == 0);
      }
    }
  }
  CHECK(compressed >= 4);
}
