#include "tests/probe/own_tables.h"

#include <doctest/doctest.h>

#include <unistd.h>

#include <vector>

#include "host/tables/arena.h"
#include "host/target/agent_view.h"

namespace sonde::test {

const TableArena* own_arena() {
  static std::vector<uint8_t> bytes = [] {
    host::ArenaInput input;
    auto images = host::loaded_images(getpid(), nullptr);
    REQUIRE(images);
    for (auto& loaded : *images) {
      if (auto agent = host::view_agent(loaded)) {
        input.trampolines = agent->trampolines, input.entries = agent->entries;
        input.specials.insert(input.specials.end(), agent->specials.begin(), agent->specials.end());
      }
      auto table = host::load_table(*loaded.image);
      REQUIRE(table);
      Table view = (*table)->table();
      auto specials = host::find_specials(loaded, &view);
      input.specials.insert(input.specials.end(), specials.begin(), specials.end());
      input.images.push_back({loaded, *table});
    }
    return *host::build_arena(input);
  }();
  return reinterpret_cast<const TableArena*>(bytes.data());
}

}  // namespace sonde::test
