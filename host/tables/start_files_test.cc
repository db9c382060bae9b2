// What linkers put into every file, held against the symbols that say where it lies. That a walk through it is right is shown
// by tests/step, which stands at each of its instructions.
#include "host/tables/start_files.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>

#include "host/image/image.h"

namespace sonde::host {
namespace {

std::shared_ptr<const Image> build(const std::string& name, const std::string& command) {
  std::filesystem::path folder = std::filesystem::path(SONDE_BINARY_DIR) / "test-programs" / "start_files";
  std::filesystem::create_directories(folder);
  std::string file = folder / name, text = file + ".c";
  std::ofstream(text) << "int main(void) { return 0; }\n";
  REQUIRE(std::system((command + " -o " + file + " " + text).c_str()) == 0);
  auto image = Image::open(file);
  REQUIRE(image);
  return *image;
}

struct Coverage {
  std::map<std::string, uint64_t> missing;  // bytes, by function
  uint64_t covered = 0;
};

// Which of the bytes of these functions, padding left out, are recognised.
Coverage coverage(const Image& image) {
  std::vector<ImageRange> found;
  auto keep = [&](ImageAddr base, const std::vector<BareCode>& parts) {
    for (const BareCode& p : parts)
      found.push_back({base + static_cast<int64_t>(p.begin), base + static_cast<int64_t>(p.end)});
  };
  for (const Segment& s : image.segments())
    if (s.executable)
      keep(s.range.begin,
           find_crtbegin(image.bytes(ImageRange{s.range.begin, s.range.begin + static_cast<int64_t>(s.file_size)})));
  for (const char* name : {".init", ".fini"})
    if (const Section* section = image.section(name)) keep(section->addr, find_init(image.bytes(*section)));
  Coverage result;
  for (const char* name :
       {"_init", "_fini", "deregister_tm_clones", "register_tm_clones", "__do_global_dtors_aux", "frame_dummy"}) {
    auto symbol = image.symbol(name);
    INFO(std::string(name));
    REQUIRE(symbol);
    auto function = image.find(*symbol);
    REQUIRE(function);
    ImageRange range = function->function->range;
    if (range.size() <= 1) range.end = range.begin + 64;  // a label: as far as the next function, padding included
    for (const Function& other : image.functions())
      if (range.begin < other.range.begin && other.range.begin < range.end) range.end = other.range.begin;
    auto code = image.bytes(range);
    // The last return or jump ends the code.
    size_t end = 0;
    for (const ImageRange& r : found)
      if (range.contains(r.begin)) end = std::max(end, static_cast<size_t>(r.end - range.begin));
    result.covered += end;
    if (end == 0 || end > code.size()) result.missing[name]++;
    for (size_t at = 0; at < end; at++) {
      ImageAddr here = range.begin + static_cast<int64_t>(at);
      result.missing[name] += std::ranges::none_of(found, [&](const ImageRange& r) { return r.contains(here); });
    }
  }
  std::erase_if(result.missing, [](const auto& item) { return item.second == 0; });
  return result;
}

}  // namespace

TEST_CASE("specials: start files of every kind of link are recognised to the last byte") {
  struct Link {
    const char* name;
    const char* command;
  };
  for (const Link& link : {Link{"pie", "gcc"},
                           {"fixed", "gcc -no-pie"},
                           {"static", "gcc -static"},
                           {"static_pie", "gcc -static-pie"},
                           {"shared", "gcc -shared -fPIC"},
                           {"bind_now", "gcc -Wl,-z,now"},
                           {"lld", "clang-19 -fuse-ld=lld-19"}}) {
    INFO(std::string(link.name));
    if (std::string(link.command).starts_with("clang") &&
        std::system("command -v clang-19 ld.lld-19 >/dev/null") != 0) {
      MESSAGE("SKIPPED: clang-19 or lld-19 is not installed");
      continue;
    }
    Coverage c = coverage(*build(link.name, link.command));
    for (auto& [name, bytes] : c.missing) MESSAGE(name, ": ", bytes, " bytes not recognised");
    CHECK(c.missing.empty());
    CHECK(c.covered > 100);
  }
}

TEST_CASE("specials: start files with any byte changed that says what is pushed are not recognised") {
  auto image = build("changed", "gcc");
  const Section* section = image->section(".init");
  REQUIRE(section);
  auto bytes = image->bytes(*section);
  std::vector<uint8_t> code(bytes.begin(), bytes.end());
  auto whole = find_init(code);
  REQUIRE(whole.size() == 3);
  CHECK(whole[0].kind == SpecialKind::bare);
  CHECK(whole[1].kind == SpecialKind::bare_word);
  CHECK(whole[1].begin == (code[0] == 0xf3 ? 8 : 4));
  CHECK(whole[2].end - whole[2].begin == 1);
  CHECK(code[whole[2].begin] == 0xc3);
  size_t refused = 0;
  for (size_t i = 0; i < whole[2].end; i++) {
    auto other = code;
    other[i] ^= 0x10;
    refused += find_init(other).empty();
  }
  CHECK(refused + 4 == whole[2].end);  // all but the displacement of the weak symbol's address
  for (size_t size = 0; size < whole[2].end; size++) CHECK(find_init(std::span(code).first(size)).empty());

  auto symbol = image->symbol("deregister_tm_clones");
  REQUIRE(symbol);
  auto text = image->bytes(ImageRange{*symbol, *symbol + 256});
  for (size_t size = 0; size < text.size(); size++)
    for (const BareCode& part : find_crtbegin(text.first(size))) CHECK(part.end <= size);
}

}  // namespace sonde::host
