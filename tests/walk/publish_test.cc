// One thread publishes arena after arena while others walk and look up, all under ThreadSanitizer (CMakeLists.txt). No
// reader may ever see a range that is not of the arena it holds, and what one arena's walks have remembered is never
// another's (semantics: S23).
#include <atomic>
#include <memory>
#include <random>
#include <thread>

#include "core/walk/arena_view.h"
#include "core/walk/world_test.h"

using namespace sonde;
using namespace sonde::test;

namespace {

constexpr uint64_t kLeaf = 0x400100, kMiddle = 0x400200, kStart = 0x400300, kRanges = 0x401000;

struct Version : World<X86_64> {
  RowCache cache;
  std::vector<uint64_t> kept;
  uint64_t in_middle, in_start;

  // Every second version says that the middle function is not to be believed; its other ranges all name the version.
  explicit Version(uint64_t number) {
    std::mt19937 random(static_cast<unsigned>(number));
    rows[kLeaf] = rows[kMiddle] = row(X86_64::rsp, 32), rows[kStart] = outermost();
    nops(kLeaf, 0x20);
    in_middle = call_site(kMiddle + 0x20), in_start = call_site(kStart + 0x20);
    uint64_t sp = kStackEnd - 0x1000;
    word(sp + 24, in_middle), word(sp + 56, in_start);
    at(kLeaf + 8, sp);
    generation = number;
    if (number % 2) specials.push_back({kMiddle, kMiddle + 0x40, static_cast<uint32_t>(SpecialKind::unreliable), 0});
    for (uint64_t begin = kRanges; begin < kTextEnd - 64; begin += 16 + random() % 200)
      specials.push_back({begin, begin + 16, static_cast<uint32_t>(SpecialKind::plt), static_cast<uint32_t>(number)});
    arena();
    kept = block;
    reinterpret_cast<TableArena*>(kept.data())->row_cache = reinterpret_cast<uint64_t>(&cache);
  }
  const TableArena* table() const { return reinterpret_cast<const TableArena*>(kept.data()); }
};

}  // namespace

TEST_CASE("publish: no reader sees a torn arena, and walks remember by arena") {
  constexpr uint64_t kVersions = 60;
  static Version memory(2);  // the stack and the code are the same in all
  const TableArena* place = nullptr;
  std::vector<std::unique_ptr<Version>> versions;  // none is given back while readers may hold it
  versions.push_back(std::make_unique<Version>(1));
  std::atomic<bool> done = false;
  std::atomic<uint64_t> wrong = 0, walks = 0, found = 0, seen = 0;
  publish_arena(place, versions[0]->table());
  auto reader = [&](unsigned seed) {
    std::mt19937 random(seed);
    AnyMemory reads = memory.any_memory();
    uint64_t last = 0;
    while (!done.load(std::memory_order_relaxed)) {
      const TableArena* arena = current_arena(place);
      if (arena->generation < last) wrong++;
      seen += arena->generation != last, last = arena->generation;
      ArenaView view(arena);
      for (int i = 0; i < 50; i++) {
        Addr pc(kRanges + random() % (World<X86_64>::kTextEnd - kRanges));
        const SpecialEntry* entry = view.special(pc);
        if (!entry) continue;
        found++;
        if (pc.value < entry->begin || pc.value >= entry->end || entry->reserved != arena->generation) wrong++;
      }
      Frame frames[8];
      WalkResult result =
          walk(arena, reinterpret_cast<RowCache*>(arena->row_cache), reads, memory.start, std::span<Frame>(frames));
      Reason expected = arena->generation % 2 ? Reason::special_code : Reason::end;
      if (result.reason != expected || frames[1].pc != Addr(memory.in_middle)) wrong++;
      walks++;
    }
  };
  std::vector<std::thread> readers;
  for (unsigned i = 0; i < 3; i++) readers.emplace_back(reader, i);
  for (uint64_t i = 1; i < kVersions; i++) {
    versions.push_back(std::make_unique<Version>(i + 1));
    publish_arena(place, versions.back()->table());
    uint64_t before = walks;
    while (walks < before + 20) std::this_thread::yield();
  }
  done = true;
  for (auto& thread : readers) thread.join();
  CHECK(wrong == 0);
  CHECK(seen >= kVersions);
  CHECK(found > 1000);
}
