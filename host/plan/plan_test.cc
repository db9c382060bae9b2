// Plans for real programs and libraries of the machine: nearly every function can be patched without traps, and fast.
#include "host/plan/plan.h"

#include <doctest/doctest.h>
#include <fmt/format.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <numeric>
#include <set>

#include "host/tables/exception_tables.h"

using namespace sonde;
using namespace sonde::host;

namespace {

LoadedImage load(const std::string& path, uint64_t bias) {
  auto image = Image::open(path);
  REQUIRE_MESSAGE(image, path);
  LoadedImage loaded{*image, (*image)->type() == 2 ? 0 : bias, {}};
  auto segments = (*image)->segments();
  loaded.range = {loaded.to_target(segments.front().range.begin), loaded.to_target(segments.back().range.end)};
  return loaded;
}

PlanRequest request_all(const LoadedImage& loaded, size_t limit = ~size_t{0}) {
  PlanRequest request{.image = &loaded,
                      .functions = {},
                      .first_site = 0,
                      .entry_trampoline = Addr(0x7ffff7ff0000),
                      .used = {{Addr(0x7ffff7f00000), Addr(0x7ffff7fff000)}},
                      .allow_traps = false,
                      .force_traps = false};
  request.functions.resize(std::min(limit, loaded.image->functions().size()));
  std::iota(request.functions.begin(), request.functions.end(), 0u);
  return request;
}

struct Summary {
  std::map<std::string, size_t> counts;
  size_t asked = 0, patched = 0;
};

Summary summarize(const LoadedImage& loaded, const ImagePlan& plan) {
  Summary s;
  for (auto& site : plan.sites) {
    // Split-off parts are entered by jumps; they are not functions.
    if (site.refusal == Refusal::cold_part) {
      s.counts["cold part"]++;
      continue;
    }
    s.asked++;
    bool refused = site.method == Method::refused;
    s.patched += !refused;
    if (site.loop_head) s.counts["loop head"]++;
    s.counts[refused ? fmt::format("refused: {}", describe(site.refusal)) : describe(site.method)]++;
    if (site.no_hijack != NoHijack::none && getenv("SONDE_TEST_VERBOSE"))
      fmt::print("  {} {:#x}: {}\n", display_name(*loaded.image, loaded.image->functions()[site.function]),
                 loaded.to_image(site.entry).value, describe(site.no_hijack));
    if (site.no_hijack != NoHijack::none) s.counts[fmt::format("entry only: {}", describe(site.no_hijack))]++;
    if (refused && getenv("SONDE_TEST_VERBOSE"))
      fmt::print("  {} {:#x}: {} at {}\n", display_name(*loaded.image, loaded.image->functions()[site.function]),
                 loaded.to_image(site.entry).value, describe(site.refusal), site.refusal_offset);
  }
  return s;
}

void print(const std::string& path, const Summary& s, double seconds) {
  fmt::print("{}: {} of {} ({:.1f} %), {:.2f} s\n", path, s.patched, s.asked,
             100.0 * static_cast<double>(s.patched) / static_cast<double>(s.asked), seconds);
  for (auto& [what, n] : s.counts) fmt::print("  {:6} {}\n", n, what);
}

// No byte is patched twice, every detour lies in an arena.
void check_consistent(const ImagePlan& plan) {
  size_t twice = 0, unmapped = 0;
  std::map<uint64_t, uint64_t> patched;
  for (auto& site : plan.sites) {
    if (site.method == Method::refused) continue;
    if (site.original.size() != site.bytes.size()) FAIL("lengths differ");
    for (auto [at, size] :
         {std::pair(site.patch, site.bytes.size()), std::pair(site.island, site.island_bytes.size())}) {
      if (size == 0) continue;
      auto next = patched.lower_bound(at.value);
      twice += next != patched.end() && next->first < at.value + size;
      twice += next != patched.begin() && std::prev(next)->second > at.value;
      patched[at.value] = at.value + size;
    }
    AddrRange whole{site.detour - 8, site.detour - 8 + static_cast<int64_t>(site.detour_bytes.size())};
    bool mapped = false;
    for (auto& arena : plan.arenas) mapped |= arena.begin <= whole.begin && whole.end <= arena.end;
    unmapped += !mapped;
  }
  CHECK(twice == 0);
  CHECK(unmapped == 0);
}

// Where exceptions come back to is left as it was, but for an instruction that a trap stands for.
void check_landing_pads(const LoadedImage& loaded, const ImagePlan& plan) {
  std::set<uint64_t> pads;
  for (auto& r : read_exception_tables(*loaded.image).ranges) pads.insert(r.pad + loaded.bias);
  size_t covered = 0;
  for (auto& site : plan.sites)
    for (auto [at, size] : {std::pair(site.patch, site.bytes.size()), std::pair(site.island, site.island_bytes.size())})
      if (size) covered += pads.lower_bound(at.value + 1) != pads.lower_bound(at.value + size);
  CHECK(covered == 0);
}

}  // namespace

TEST_CASE("ten thousand functions of a very large image are planned in seconds") {
  std::string path = "/usr/lib/x86_64-linux-gnu/libLLVM-14.so.1";
  if (!std::filesystem::exists(path)) {
    MESSAGE("not installed, not planned: " << path);
    return;
  }
  LoadedImage loaded = load(path, 0x7fff00000000);
  PlanRequest request = request_all(loaded, 10000);
  auto start = std::chrono::steady_clock::now();
  auto plan = plan_image(request);
  double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  REQUIRE(plan);
  check_consistent(*plan);
  print(path, summarize(loaded, *plan), seconds);
  CHECK(seconds < 10);  // about one on an idle machine
}

TEST_CASE("a later plan of the same image leaves the earlier one's bytes alone") {
  LoadedImage loaded = load("/lib/x86_64-linux-gnu/libc.so.6", 0x7ffff7000000);
  PlanRequest first = request_all(loaded), second = first;
  std::erase_if(first.functions, [](uint32_t f) { return f % 2 == 0; });
  auto plan = plan_image(first);
  REQUIRE(plan);
  second.kept = plan->kept;
  auto later = plan_image(second);
  REQUIRE(later);
  size_t overlapping = 0, again = 0;
  for (auto& site : later->sites) {
    AddrRange bytes{site.patch, site.patch + static_cast<int64_t>(site.bytes.size())};
    for (auto& kept : plan->kept) overlapping += bytes.overlaps(kept);
    again += site.function % 2 && site.method != Method::refused;
  }
  CHECK(overlapping == 0);
  CHECK(again == 0);
}

TEST_CASE("nearly all functions of real files are patched without traps") {
  const char* files[] = {"/lib/x86_64-linux-gnu/libc.so.6",
                         "/usr/lib/x86_64-linux-gnu/libsqlite3.so.0",
                         "/usr/bin/python3",
                         "/usr/lib/x86_64-linux-gnu/libstdc++.so.6",
                         "/usr/lib/gcc/x86_64-linux-gnu/12/cc1",
                         "/lib64/ld-linux-x86-64.so.2",
                         "/usr/bin/env"};
  for (std::string path : files) {
    if (!std::filesystem::exists(path)) {
      MESSAGE("not installed, not planned: " << path);
      continue;
    }
    CAPTURE(path);
    LoadedImage loaded = load(path, 0x7ffff7000000);
    PlanRequest request = request_all(loaded);
    auto start = std::chrono::steady_clock::now();
    auto plan = plan_image(request);
    double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    REQUIRE(plan);
    check_consistent(*plan);
    check_landing_pads(loaded, *plan);
    Summary s = summarize(loaded, *plan);
    print(path, s, seconds);
    CHECK(s.patched * 100 >= s.asked * 95);
  }
}
