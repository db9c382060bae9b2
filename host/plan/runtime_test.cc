#include "host/plan/runtime.h"

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
const char* kThrows = "int main(int n, char**) { try { if (n) throw n; } catch (int) {} }";
}  // namespace

TEST_CASE("runtime: an unwinder that is linked in and stripped cannot be found") {
  CHECK(no_hijack_beside(*build("throws", kThrows, "")) == NoHijack::none);
  CHECK(no_hijack_beside(*build("throws_stripped", kThrows, "-s")) == NoHijack::none);
  CHECK(no_hijack_beside(*build("throws_static", kThrows, "-static-libgcc -static-libstdc++")) == NoHijack::none);
  CHECK(no_hijack_beside(*build("throws_hidden", kThrows, "-static-libgcc -static-libstdc++ -s")) ==
        NoHijack::no_unwinder);
  CHECK(no_hijack_beside(*build("resumes_hidden", kThrows, "-static-libgcc -s")) == NoHijack::no_unwinder);
  CHECK(no_hijack_beside(*build("resumes_static", kThrows, "-static-libgcc")) == NoHijack::none);
  const char* catches = "void f(); int main() { try { f(); } catch (...) {} } void f() {}";
  CHECK(no_hijack_beside(*build("only_catches", catches, "-O0 -s")) == NoHijack::none);
  CHECK(no_hijack_beside(*build("library_hidden", kThrows, "-static-libgcc -static-libstdc++ -s -shared -fPIC")) ==
        NoHijack::no_unwinder);
  auto c_library = Image::open("/lib/x86_64-linux-gnu/libc.so.6");
  REQUIRE(c_library);
  CHECK(no_hijack_beside(**c_library) == NoHijack::none);
  const char* never =
      "void f(); void g() noexcept { f(); } int main() { g(); } void f() {}";  // tables without landing pads
  CHECK(no_hijack_beside(*build("throws_never", never, "-O0 -s")) == NoHijack::none);
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
