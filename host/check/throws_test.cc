// Where code that throws is special (host/tables/specials.cc), held against its instructions, decoded.
#include <dlfcn.h>
#include <doctest/doctest.h>
#include <unistd.h>

#include <algorithm>

#include "host/plan/insn.h"
#include "host/tables/arena.h"

namespace sonde::host {

// The call of uw_install_context_1 in each of libgcc's functions that throw, and the move of sp at their end: found by their
// symbols and bytes. From behind the first, where calls return to, to behind the second their stacks are not believed.
TEST_CASE("specials: libgcc's functions from where they have written over their return addresses") {
  auto* image_of = dlsym(RTLD_DEFAULT, "_Unwind_RaiseException");
  auto images = loaded_images(getpid(), nullptr);
  REQUIRE(images);
  auto found = std::ranges::find_if(
      *images, [&](const LoadedImage& i) { return i.range.contains(Addr(reinterpret_cast<uint64_t>(image_of))); });
  REQUIRE(found != images->end());
  const LoadedImage& libgcc = *found;
  auto table = load_table(*libgcc.image, "");
  REQUIRE(table);
  Table view = (*table)->table();
  auto specials = find_specials(libgcc, &view);
  auto is_special = [](std::span<const ArenaSpecial> all, SpecialKind kind, Addr pc) {
    return std::ranges::any_of(all, [&](const ArenaSpecial& s) { return s.kind == kind && s.range.contains(pc); });
  };
  for (const char* name :
       {"_Unwind_RaiseException", "_Unwind_Resume", "_Unwind_ForcedUnwind", "_Unwind_Resume_or_Rethrow"}) {
    INFO(std::string(name));
    auto hit = libgcc.image->find(*libgcc.image->symbol(name));
    REQUIRE(hit);
    auto code = libgcc.image->bytes(hit->function->range);
    constexpr uint8_t kMove[] = {0x48, 0x89, 0xcc};
    auto end = std::ranges::search(code, kMove);
    REQUIRE(!end.empty());
    std::vector<size_t> calls;
    for (size_t at = 0; at < static_cast<size_t>(end.begin() - code.begin());) {
      auto insn = decode(code.subspan(at, std::min<size_t>(15, code.size() - at)), at);
      REQUIRE(insn);
      if (insn->flow == Flow::call) calls.push_back(at);
      at = insn->next();
    }
    REQUIRE(calls.size() > 3);
    auto at = [&](size_t offset) {
      return libgcc.to_target(hit->function->range.begin + static_cast<int64_t>(offset));
    };
    CHECK(!is_special(specials, SpecialKind::unreliable, at(calls[calls.size() - 2])));
    CHECK(is_special(specials, SpecialKind::unreliable, at(calls[calls.size() - 2] + 4)));
    CHECK(!is_special(specials, SpecialKind::unreliable, at(calls[calls.size() - 3] + 4)));
    CHECK(is_special(specials, SpecialKind::unreliable, at(static_cast<size_t>(end.begin() - code.begin()))));
  }
}

}  // namespace sonde::host
