// The block that walkers read (core/unwind/arena.h) about one program that lies where it was linked to. usage: arena_of PROGRAM FILE
#include <fmt/format.h>
#include <stdio.h>

#include <algorithm>
#include <fstream>
#include <optional>

#include "host/check/proven_table.h"
#include "host/tables/arena.h"

using namespace sonde::host;

int main(int count, char** words) {
  if (count != 3) return 2;
  auto give_up = [](const std::string& what) { fmt::print(stderr, "arena_of: {}\n", what), exit(1); };
  auto image = Image::open(words[1]);
  if (!image) give_up(image.error().message);
  LoadedImage loaded{*image, 0, {sonde::Addr(~uint64_t{0}), sonde::Addr()}};
  for (const Segment& s : (*image)->segments()) {
    loaded.range.begin = std::min(loaded.range.begin, sonde::Addr(s.range.begin.value));
    loaded.range.end = std::max(loaded.range.end, sonde::Addr(s.range.end.value));
  }
  auto table = load_proven_table(**image);
  if (!table) give_up(table.error().message);
  const sonde::Table view = (*table)->table();
  ArenaInput input;
  input.specials = find_specials(loaded, &view);
  input.images.push_back({loaded, *table, true});
  auto arena = build_arena(input);
  if (!arena) give_up(arena.error().message);
  std::ofstream out(words[2], std::ios::binary);
  out.write(reinterpret_cast<const char*>(arena->data()), static_cast<std::streamsize>(arena->size()));
  return out.flush() ? 0 : 1;
}
