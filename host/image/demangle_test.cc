// Names against c++filt, and manglings that stand for more text than anybody wants.
#include <doctest/doctest.h>
#include <fmt/format.h>

#include <chrono>

#include "host/image/names.h"
#include "host/image/testing.h"

using namespace sonde::host;
using namespace sonde::host::testing;

TEST_CASE("demangle: libstdc++'s names are those of c++filt") {
  auto image = open_image("/usr/lib/x86_64-linux-gnu/libstdc++.so.6");
  auto folder = fresh_folder("demangle");
  std::string list;
  std::vector<std::string> raw;
  for (auto& f : image->functions())
    if (!f.name.empty()) raw.push_back(f.name), list += f.name + "\n";
  REQUIRE(raw.size() > 3000);
  write_file(folder + "/names", list);
  auto expected = run("c++filt --no-verbose <names", folder);
  REQUIRE(expected.size() == raw.size());
  for (size_t i = 0; i < raw.size(); i++) REQUIRE(demangle(raw[i]) == expected[i]);
}

TEST_CASE("demangle: Rust, C and broken names") {
  struct {
    const char *raw, *text;
  } cases[] = {
      {"main", "main"},
      {"_ZN4core3fmt9Formatter9write_str17h0123456789abcdefE", "core::fmt::Formatter::write_str"},
      {"_ZN71_$LT$Test$u20$$u2b$$u20$$u27$static$u20$as$u20$foo..Bar$LT$Test$GT$$GT$3bar17h930b740aa94f1d3aE",
       "<Test + 'static as foo::Bar<Test>>::bar"},
      {"_RNvC6_123foo3bar", "123foo::bar"},
      {"_RNvMs_NtCs3ssYzQotkvD_3foo3barINtB4_3VecmE4push", "_RNvMs_NtCs3ssYzQotkvD_3foo3barINtB4_3VecmE4push"},
      {"_ZN1", "_ZN1"},
      {"_Z", "_Z"},
      {"_R", "_R"},
      {"", ""},
      {"_Z3fooi.cold", "foo(int) [clone .cold]"},
      {"line\nbreak\ttab", "line\\x0abreak\\x09tab"},
      {"caf\xc3\xa9_\xe2\x82\xac", "caf\xc3\xa9_\xe2\x82\xac"},
      {"bad_\xff\xfe_bytes", "bad_\\xff\\xfe_bytes"},
      {"c1\xc2\x9b"
       "31m",
       "c1\\xc2\\x9b31m"},
      {"cut\xe2\x82", "cut\\xe2\\x82"},
      {"\x7f\x1b[0m", "\\x7f\\x1b[0m"},
  };
  for (auto& [raw, text] : cases) {
    CAPTURE(raw);
    if (std::string(raw).starts_with("_RNvMs_")) {
      // Its impl path has no type: whatever is printed, it is not empty.
      CHECK_FALSE(demangle(raw).empty());
      continue;
    }
    CHECK(demangle(raw) == text);
  }
}

TEST_CASE("demangle: time and length are bounded") {
  // Each pair doubles the text of the one before: 2^60 ints in 400 bytes.
  std::string pairs = "_Z1fISt4pairIiiE";
  for (int i = 0; i < 60; i++) {
    std::string s = i == 0 ? "S0_" : fmt::format("S{}_", "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"[std::min(i, 35)]);
    pairs += "St4pairI" + s + s + "E";
  }
  pairs += "EvT_";
  std::string deep = "_Z1f" + std::string(1500, 'P') + "i";
  std::string nested = "_Z1f";
  for (int i = 0; i < 300; i++) nested += "1aI";
  std::string huge = "_Z" + std::string(100000, 'N');
  auto start = std::chrono::steady_clock::now();
  for (auto& name : {pairs, deep, nested, huge}) CHECK(demangle(name).size() <= 4 * 4096);
  CHECK(demangle(pairs) == pairs);
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::milliseconds(500));
}

TEST_CASE("names: parameters, tags and clone suffixes") {
  struct {
    const char *full, *plain;
  } cases[] = {
      {"net::send(int)", "net::send"},
      {"main", "main"},
      {"S::operator()(int) const", "S::operator()"},
      {"S::operator<(S const&) const", "S::operator<"},
      {"S::operator<<(S const&)", "S::operator<<"},
      {"S::operator->()", "S::operator->"},
      {"S::operator int()", "S::operator int"},
      {"S::operator[](int)", "S::operator[]"},
      {"f<(E)1>(int)", "f<(E)1>"},
      {"g<void (*)(int)>(char)", "g<void (*)(int)>"},
      {"(anonymous namespace)::anon(int)", "(anonymous namespace)::anon"},
      {"a::(anonymous namespace)::b()", "a::(anonymous namespace)::b"},
      {"sonde::demangle[abi:cxx11](char)", "sonde::demangle"},
      {"my_operator(int)", "my_operator"},
      {"operator\"\" _kg(long double)", "operator\"\" _kg"},
  };
  for (auto& [full, plain] : cases) CHECK(without_parameters(full) == plain);
  CHECK(without_clone_suffix("f.part.0") == "f");
  CHECK(without_clone_suffix("f.constprop.0.isra.0") == "f");
  CHECK(without_clone_suffix("f.lto_priv.12.constprop.3") == "f");
  CHECK(without_clone_suffix("main.main") == "main.main");
  CHECK(without_clone_suffix("f.cold") == "f.cold");
  CHECK(without_clone_suffix(".part.0") == ".part.0");
  CHECK(without_clone_suffix("f.") == "f.");
  CHECK(without_clone_suffix("") == "");
}

TEST_CASE("names: edit distance") {
  CHECK(edit_distance("kitten", "sitting", 10) == 3);
  CHECK(edit_distance("", "abc", 10) == 3);
  CHECK(edit_distance("abc", "abc", 0) == 0);
  CHECK(edit_distance("kitten", "sitting", 2) == 3);
  CHECK(edit_distance("a", "abcdefgh", 2) == 3);
}
