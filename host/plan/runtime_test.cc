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
  CHECK(no_hijack_in_image(*build("throws", kThrows, "")) == NoHijack::none);
  CHECK(no_hijack_in_image(*build("throws_stripped", kThrows, "-s")) == NoHijack::none);
  CHECK(no_hijack_in_image(*build("throws_static", kThrows, "-static-libgcc -static-libstdc++")) == NoHijack::none);
  CHECK(no_hijack_in_image(*build("throws_hidden", kThrows, "-static-libgcc -static-libstdc++ -s")) ==
        NoHijack::no_unwinder);
}

TEST_CASE("runtime: a sanitizer shows in what it is compiled into or linked with, and in itself") {
  CHECK(!is_sanitized(*build("plain", kThrows, "")));
  CHECK(is_sanitized(*build("address", kThrows, "-fsanitize=address")));
  CHECK(is_sanitized(*build("address_static", kThrows, "-fsanitize=address -static-libasan -s")));
  CHECK(is_sanitized(*build("thread_static", kThrows, "-fsanitize=thread -static-libtsan -s")));
  CHECK(is_sanitized(*build("leak", kThrows, "-fsanitize=leak")));
  CHECK(is_sanitized(*build("thread", kThrows, "-fsanitize=thread")));
}

TEST_CASE("runtime: collectors that look return addresses up are left alone") {
  CHECK(no_hijack_in_image(*build("like_v8", "extern \"C\" void Builtins_Abort() {} int main() {}", "")) ==
        NoHijack::runtime_scans_stacks);
}
