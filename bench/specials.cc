// A look-up among 100,000 special ranges against one among 10 (semantics: S21), both by an image's index, in turns; and what a
// binary search over all of them would take. The addresses are those of one deep stack, 64 of them, and 512.
//
// usage: specials_bench
#include <fmt/format.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <random>
#include <vector>

#include "core/walk/arena_view.h"
#include "host/tables/arena.h"

using namespace sonde;

namespace {

double now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) * 1e9 + static_cast<double>(t.tv_nsec);
}

// Arenas over this program's own text, with ranges all over it.
std::vector<uint8_t> arena_with(const host::LoadedImage& own, AddrRange text, unsigned count) {
  host::ArenaInput input;
  input.images = {{own, nullptr}};
  std::mt19937_64 random(count);
  for (unsigned i = 0; i < count; i++) {
    Addr at = text.begin + static_cast<int64_t>(text.size() / count * i);
    input.specials.push_back({{at, at + 1 + static_cast<int64_t>(random() % 2)}, SpecialKind::unreliable});
  }
  auto arena = host::build_arena(input);
  if (!arena) std::fprintf(stderr, "%s\n", arena.error().message.c_str()), std::exit(1);
  return *arena;
}

template <class LookUp>
double ns_each(const std::vector<Addr>& pcs, LookUp look_up) {
  constexpr unsigned kTimes = 400;
  uint64_t found = 0;
  double begin = now_ns();
  for (unsigned i = 0; i < kTimes; i++)
    for (Addr pc : pcs) found += look_up(pc) != nullptr;
  asm volatile("" ::"r"(found));
  return (now_ns() - begin) / kTimes / static_cast<double>(pcs.size());
}

double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v[v.size() / 2];
}

}  // namespace

int main() {
  auto images = host::loaded_images(getpid(), nullptr);
  if (!images) return std::fprintf(stderr, "%s\n", images.error().message.c_str()), 1;
  const host::LoadedImage* own = nullptr;
  AddrRange text{};
  for (const auto& image : *images)
    if (image.range.contains(Addr(reinterpret_cast<uint64_t>(&main)))) own = &image;
  for (const auto& segment : own->image->segments())
    if (segment.executable) text = {own->to_target(segment.range.begin), own->to_target(segment.range.end)};
  auto few_bytes = arena_with(*own, text, 10), many_bytes = arena_with(*own, text, 100000);
  ArenaView few(reinterpret_cast<const TableArena*>(few_bytes.data()));
  ArenaView many(reinterpret_cast<const TableArena*>(many_bytes.data()));
  std::printf("special ranges in the arenas: %u, %u\n", few.header().special_count, many.header().special_count);
  for (unsigned count : {64, 512}) {
    std::vector<Addr> pcs;
    std::mt19937_64 random(1);
    for (unsigned i = 0; i < count; i++) pcs.push_back(text.begin + static_cast<int64_t>(random() % text.size()));
    std::vector<double> ratios, a, b, c;
    for (int round = 0; round < 41; round++) {
      a.push_back(ns_each(pcs, [&](Addr pc) { return few.special(*few.text(pc), pc); }));
      b.push_back(ns_each(pcs, [&](Addr pc) { return many.special(*many.text(pc), pc); }));
      c.push_back(ns_each(pcs, [&](Addr pc) { return many.special(pc); }));
      ratios.push_back(b.back() / a.back());
    }
    std::printf(
        "%u addresses in turn, ns a look-up: among 10 %.2f, among 100,000 %.2f, ratio %.2f (median of 41); by binary "
        "search %.2f\n",
        count, median(a), median(b), median(ratios), median(c));
  }
}
