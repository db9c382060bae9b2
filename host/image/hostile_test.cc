// Damaged ELF files: every answer is an error or an image whose claims hold, never a crash. Run under the sanitizers too.
#include <elf.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <random>

#include "host/image/select.h"
#include "host/image/testing.h"

using namespace sonde;
using namespace sonde::host;
using namespace sonde::host::testing;

namespace {

std::vector<uint8_t> program(const char* how) {
  static const std::string folder = [] {
    auto made = fresh_folder("hostile");
    write_file(made + "/a.c",
               "#include <stdio.h>\nstatic __attribute__((noinline)) int f(int x) { return printf(\"%d\", x); }\nint "
               "main(int c, char **v) { return f(c); }\n");
    run("gcc -g -gz=zlib -O1 -o debug a.c && strip -o bare debug && printf 'V1 { global: g; };' >map && echo 'int "
        "g(void) { return 1; }' >g.c && "
        "gcc -shared -fPIC -Wl,--version-script=map -o lib.so g.c",
        made);
    return made;
  }();
  return read_file(folder + "/" + how);
}

// Uses everything an image offers; the claims that must hold for any input.
bool exercise(std::vector<uint8_t> bytes) {
  auto image = Image::from_memory(std::move(bytes), "hostile");
  if (!image) {
    CHECK(image.error().message.starts_with("hostile "));
    CHECK(image.error().message.size() > 15);
    return false;
  }
  ImageAddr end;
  for (auto& f : (*image)->functions()) {
    REQUIRE(f.range.begin >= end);
    REQUIRE(f.range.begin < f.range.end);
    end = f.range.end;
    display_name(**image, f);
    auto hit = (*image)->find(f.range.begin);
    REQUIRE((hit && hit->function == &f));
    size_t sum = 0;
    for (uint8_t byte : (*image)->bytes(f.range)) sum += byte;
    (void)sum;
  }
  for (auto& section : (*image)->sections()) {
    auto data = (*image)->bytes(section);
    if (!data.empty()) (void)(data.front() + data.back());
  }
  (*image)->symbol("main");
  (*image)->has_inlined("f");
  return true;
}

}  // namespace

TEST_CASE("hostile: a file cut off anywhere") {
  for (const char* how : {"bare", "lib.so"}) {
    CAPTURE(how);
    auto whole = program(how);
    REQUIRE(exercise(whole));
    for (size_t size = 0; size < whole.size(); size += size < 0x400 ? 7 : 61) {
      CAPTURE(size);
      // Section headers come last: a cut takes away some of them at least, and that is said.
      CHECK_FALSE(exercise({whole.begin(), whole.begin() + static_cast<ptrdiff_t>(size)}));
    }
  }
}

TEST_CASE("hostile: bytes flipped in headers and tables") {
  std::minstd_rand random(1);
  for (const char* how : {"debug", "bare", "lib.so"}) {
    auto whole = program(how);
    Elf64_Ehdr header;
    std::memcpy(&header, whole.data(), sizeof header);
    size_t sections = header.e_shoff, opened = 0;
    for (int round = 0; round < 1500; round++) {
      auto bytes = whole;
      for (unsigned flips = 1 + random() % 3; flips > 0; flips--) {
        size_t at = random() % 3 == 0   ? random() % 0x400
                    : random() % 2 == 0 ? sections + random() % (bytes.size() - sections)
                                        : random() % bytes.size();
        bytes[at] = random() % 4 == 0 ? 0xff : static_cast<uint8_t>(random());
      }
      CAPTURE(round);
      opened += exercise(std::move(bytes));
    }
    CHECK(opened > 300);  // most damage leaves something to read: the paths behind the checks are taken as well
  }
}

TEST_CASE("hostile: without section headers, the program headers damaged") {
  std::minstd_rand random(2);
  auto whole = program("lib.so");
  Elf64_Ehdr header;
  std::memcpy(&header, whole.data(), sizeof header);
  header.e_shoff = 0, header.e_shnum = 0, header.e_shstrndx = 0;
  std::memcpy(whole.data(), &header, sizeof header);
  auto plain = Image::from_memory(whole, "plain");
  REQUIRE(plain);
  uint64_t dynamic = (*plain)->section(".dynamic")->offset.value, hash = 0x200, tables = 0x1000;
  size_t opened = 0;
  for (int round = 0; round < 1500; round++) {
    auto bytes = whole;
    size_t places[] = {sizeof header + random() % (header.e_phnum * sizeof(Elf64_Phdr)), dynamic + random() % 0x180,
                       hash + random() % 0x400, tables + random() % (bytes.size() - tables)};
    bytes[places[random() % 4]] = random() % 4 == 0 ? 0xff : static_cast<uint8_t>(random());
    CAPTURE(round);
    opened += exercise(std::move(bytes));
  }
  CHECK(opened > 700);
}

TEST_CASE("hostile: sizes and counts at their limits") {
  auto whole = program("debug");
  auto with = [&](auto change) {
    auto bytes = whole;
    Elf64_Ehdr header;
    std::memcpy(&header, bytes.data(), sizeof header);
    change(bytes, header);
    std::memcpy(bytes.data(), &header, sizeof header);
    return exercise(std::move(bytes));
  };
  CHECK_FALSE(with([](auto&, auto& h) { h.e_shoff = ~0ull - 8; }));
  CHECK_FALSE(with([](auto&, auto& h) { h.e_phoff = ~0ull - 8; }));
  CHECK_FALSE(with([](auto&, auto& h) { h.e_phnum = 0xfff0; }));
  CHECK_FALSE(with([](auto&, auto& h) { h.e_phentsize = 1; }));
  CHECK_FALSE(with([](auto&, auto& h) { h.e_machine = EM_386; }));
  CHECK_FALSE(with([](auto&, auto& h) { h.e_type = ET_CORE; }));
  CHECK_FALSE(with([](auto&, auto& h) { h.e_ident[EI_CLASS] = ELFCLASS32; }));
  CHECK_FALSE(with([](auto&, auto& h) { h.e_ident[EI_DATA] = ELFDATA2MSB; }));
  // Every section at once claims to be larger than the file, or of another type.
  for (uint32_t type = 0; type < 20; type++)
    with([&](auto& b, auto& h) {
      for (size_t i = 1; i < h.e_shnum; i++) {
        Elf64_Shdr s;
        std::memcpy(&s, b.data() + h.e_shoff + i * sizeof s, sizeof s);
        s.sh_type = type, s.sh_link = static_cast<uint32_t>(i * 7919), s.sh_flags |= i % 2 ? SHF_COMPRESSED : 0;
        std::memcpy(b.data() + h.e_shoff + i * sizeof s, &s, sizeof s);
      }
    });
}
