#include "host/plan/runtime.h"
#include "host/plan/static_unwinder.h"

#include <doctest/doctest.h>
#include <fmt/format.h>

#include <cstdlib>
#include <fstream>

using namespace sonde::host;

namespace {
std::shared_ptr<const Image> build(const std::string& name, const std::string& source, const std::string& flags) {
  std::string base = fmt::format("{}/{}", SONDE_BINARY_DIR, name);
  std::ofstream(base + ".cc") << source;
  REQUIRE(std::system(fmt::format("g++ -O1 {} -o {} {}.cc", flags, base, base).c_str()) == 0);
  auto image = Image::open(base);
  REQUIRE(image.has_value());
  return *image;
}
// The same with _Unwind_GetIP compiled otherwise: mov 0x98(%rdi),%rax; ret; nopl becomes lea 0x98(%rdi),%rax; mov (%rax),%rax;
// ret; nop.
std::shared_ptr<const Image> in_other_words(const std::string& path) {
  const std::string usual("\x48\x8b\x87\x98\0\0\0\xc3\x0f\x1f\x40\0", 12),
      other("\x48\x8d\x87\x98\0\0\0\x48\x8b\0\xc3\x90", 12);
  std::ifstream in(path, std::ios::binary);
  std::string bytes{std::istreambuf_iterator<char>(in), {}};
  size_t at = bytes.find(usual);
  REQUIRE(at != bytes.npos);
  while (at != bytes.npos) bytes.replace(at, other.size(), other), at = bytes.find(usual);
  std::ofstream(path + ".other", std::ios::binary) << bytes;
  auto image = Image::open(path + ".other");
  REQUIRE(image.has_value());
  return *image;
}

const char* kThrows = "int main(int n, char**) { try { if (n) throw n; } catch (int) {} }";
}  // namespace

TEST_CASE("runtime: an unwinder that is linked in and stripped cannot be found") {
  CHECK(no_hijack_beside(*build("throws", kThrows, "")) == NoHijack::none);
  CHECK(no_hijack_beside(*build("throws_stripped", kThrows, "-s")) == NoHijack::none);
  CHECK(no_hijack_beside(*build("throws_static", kThrows, "-static-libgcc -static-libstdc++")) == NoHijack::none);
  CHECK(no_hijack_beside(*build("resumes_static", kThrows, "-static-libgcc")) == NoHijack::none);
  const char* catches = "void f(); int main() { try { f(); } catch (...) {} } void f() {}";
  CHECK(no_hijack_beside(*build("only_catches", catches, "-O0 -s")) == NoHijack::none);
  for (const char* flags : {"-static-libgcc -static-libstdc++ -s", "-static-libgcc -s",
                            "-static-libgcc -static-libstdc++ -s -shared -fPIC"}) {
    CAPTURE(std::string(flags));
    auto found = build("throws_hidden", kThrows, flags);
    CHECK(has_hidden_unwinder(*found));
    CHECK(no_hijack_beside(*found) == NoHijack::none);  // its code is known
    CHECK(no_hijack_beside(*in_other_words(found->path())) == NoHijack::no_unwinder);
  }
  auto c_library = Image::open("/lib/x86_64-linux-gnu/libc.so.6");
  REQUIRE(c_library);
  CHECK(no_hijack_beside(**c_library) == NoHijack::none);
  const char* never =
      "void f(); void g() noexcept { f(); } int main() { g(); } void f() {}";  // tables without landing pads
  CHECK(no_hijack_beside(*build("throws_never", never, "-O0 -s")) == NoHijack::none);
}

TEST_CASE("runtime: a static unwinder without symbols is found where its symbols say it is") {
  const char* cleans =
      "#include <cstdio>\nstruct C { ~C() { puts(\"\"); } };\nint main(int n, char**) { try { C c; if (n) throw n; } "
      "catch (int) {} }";
  for (const char* flags : {"-static-libgcc -static-libstdc++", "-static-libgcc",
                            "-static-libgcc -O2 -fcf-protection=none", "-static-libgcc -static-libstdc++ -no-pie"}) {
    CAPTURE(std::string(flags));
    auto named = build("unwinder_named", cleans, flags),
         stripped = build("unwinder_stripped", cleans, flags + std::string(" -s"));
    auto found = find_static_unwinder(*stripped);
    REQUIRE(found.has_value());
    CHECK(found->get_ip == named->symbol("_Unwind_GetIP"));
    CHECK(found->set_ip == named->symbol("_Unwind_SetIP"));
    CHECK(found->set_gr == named->symbol("_Unwind_SetGR"));
    CHECK(found->resume == named->symbol("_Unwind_Resume"));
  }
  CHECK(!find_static_unwinder(*build("unwinder_shared", cleans, "-s")));
}

TEST_CASE("runtime: a sanitizer shows in what it is compiled into or linked with, and in itself") {
  auto beside = [](const char* name, const char* flags) { return no_hijack_beside(*build(name, kThrows, flags)); };
  CHECK(beside("plain", "") == NoHijack::none);
  CHECK(beside("address", "-fsanitize=address") == NoHijack::sanitized);
  CHECK(beside("address_static", "-fsanitize=address -static-libasan -s") == NoHijack::sanitized);
  CHECK(beside("thread_static", "-fsanitize=thread -static-libtsan -s") == NoHijack::sanitized);
  CHECK(beside("leak", "-fsanitize=leak") == NoHijack::sanitized);
  CHECK(beside("thread", "-fsanitize=thread") == NoHijack::sanitized);
}

TEST_CASE("runtime: collectors that look return addresses up are left alone") {
  CHECK(no_hijack_in_image(*build("like_v8", "extern \"C\" void Builtins_Abort() {} int main() {}", "")) ==
        NoHijack::runtime_scans_stacks);
}
