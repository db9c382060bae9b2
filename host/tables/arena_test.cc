// The arena against its input, and special code of this process against what the loader and the kernel say about it.
#include "host/tables/arena.h"

#include <dlfcn.h>
#include <doctest/doctest.h>
#include <signal.h>
#include <sys/auxv.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <random>

#include "core/walk/arena_view.h"
#include "include/sonde/special.h"

extern "C" const char test_special_first, test_special_second, test_special_third, test_special_fourth,
    test_special_fifth, test_special_data;
asm(R"(
  .pushsection .text
  test_special_first: nop; nop; nop
  test_special_second: nop; nop
  test_special_third: nop; nop
  test_special_fourth: nop
  test_special_fifth: mov $15, %rax; syscall
  test_special_end: nop
  .popsection
  .pushsection .data
  test_special_data: .quad 0
  .popsection
)");
SONDE_SPECIAL(test_special_first, test_special_second, SONDE_SPECIAL_UNRELIABLE)
SONDE_SPECIAL(test_special_second, test_special_third, SONDE_SPECIAL_OUTERMOST)
SONDE_SPECIAL(test_special_third, test_special_fourth, SONDE_SPECIAL_SIGNAL_RETURN)
SONDE_SPECIAL(test_special_fourth, test_special_fifth, 77)
SONDE_SPECIAL(test_special_fifth, test_special_end, SONDE_SPECIAL_UNRELIABLE)
SONDE_SPECIAL(test_special_end, test_special_first, SONDE_SPECIAL_OUTERMOST)  // empty
SONDE_SPECIAL(test_special_data, test_special_data + 8, SONDE_SPECIAL_OUTERMOST)

namespace sonde::host {
namespace {

template <class T>
std::span<const T> part(const std::vector<uint8_t>& arena, uint64_t offset, uint32_t count) {
  REQUIRE(offset % 8 == 0);
  REQUIRE(offset + count * sizeof(T) <= arena.size());
  return {reinterpret_cast<const T*>(arena.data() + offset), count};
}
const TableArena& head(const std::vector<uint8_t>& arena) { return *reinterpret_cast<const TableArena*>(arena.data()); }

LoadedImage loaded_for(const void* address) {
  std::vector<std::string> problems;
  auto images = loaded_images(getpid(), &problems);
  REQUIRE(images);
  for (const LoadedImage& image : *images)
    if (image.range.contains(Addr(reinterpret_cast<uint64_t>(address)))) return image;
  FAIL("no image there");
  return {};
}

bool is_special(const std::vector<ArenaSpecial>& specials, SpecialKind kind, Addr at) {
  for (const ArenaSpecial& special : specials)
    if (special.kind == kind && special.range.contains(at)) return true;
  return false;
}

std::vector<ArenaSpecial> specials_of(const LoadedImage& image) {
  auto table = load_table(*image.image, "");
  REQUIRE(table);
  Table view = (*table)->table();
  return find_specials(image, &view);
}

TEST_CASE("arena: tables of this process's images answer at their addresses") {
  std::vector<std::string> problems;
  auto images = loaded_images(getpid(), &problems);
  REQUIRE(images);
  ArenaInput input;
  input.trampolines = Addr(0x1000), input.entries = Addr(0x2000);
  for (auto it = images->rbegin(); it != images->rend(); ++it) {
    auto table = load_table(*it->image, "");
    REQUIRE(table);
    input.images.push_back({*it, *table});
  }
  input.images.push_back(input.images.front());  // the same file once more, elsewhere
  input.images.back().loaded.range = {Addr(0x10000), Addr(0x20000)};
  auto arena = build_arena(input);
  REQUIRE(arena);
  CHECK(head(*arena).size == arena->size());
  CHECK(head(*arena).trampolines == 0x1000);
  auto entries = part<ImageEntry>(*arena, head(*arena).images_offset, head(*arena).image_count);
  REQUIRE(entries.size() == images->size() + 1);
  CHECK(entries[0].begin == 0x10000);
  for (size_t i = 0; i + 1 < entries.size(); i++) CHECK(entries[i].end <= entries[i + 1].begin);
  size_t answered = 0;
  for (const ImageEntry& entry : entries) {
    for (const ArenaImage& image : input.images) {
      if (image.loaded.range.begin.value != entry.begin) continue;
      auto opened = Table::open(std::span(*arena).subspan(entry.table_offset, image.table->bytes().size()));
      REQUIRE(opened);
      for (uint64_t at = entry.text_begin; at < entry.text_end; at += 997) {
        const Row* expected = image.table->table().lookup(image.loaded.to_image(Addr(at)));
        const Row* row = opened->lookup(ImageAddr(at - entry.bias));
        CHECK((row ? *row : Row{.cfa_offset = -1}) == (expected ? *expected : Row{.cfa_offset = -1}));
        answered += row != nullptr;
      }
    }
  }
  CHECK(answered > 1000);
}

TEST_CASE("arena: detours keep their steps, earlier specials win") {
  ArenaInput input;
  input.detours = {{{Addr(0x5000), Addr(0x5040)}, Addr(0x900), 7, {{0, -1, 0, 0}, {5, 2, 8, 0}}},
                   {{Addr(0x4000), Addr(0x4020)}, Addr(0x800), 6, {{3, 1, 0, 0}}}};
  input.specials = {{{Addr(0x120), Addr(0x140)}, SpecialKind::return_trampoline},
                    {{Addr(0x100), Addr(0x200)}, SpecialKind::plt},
                    {{Addr(0x1f0), Addr(0x210)}, SpecialKind::vdso},
                    {{Addr(0x120), Addr(0x130)}, SpecialKind::vdso},
                    {{Addr(0x300), Addr(0x300)}, SpecialKind::vdso}};
  auto arena = build_arena(input);
  REQUIRE(arena);
  auto detours = part<DetourEntry>(*arena, head(*arena).detours_offset, head(*arena).detour_count);
  REQUIRE(detours.size() == 2);
  CHECK(detours[0].site == 6);
  CHECK(detours[1].begin == 0x5000);
  CHECK(detours[1].patch == 0x900);
  auto steps = part<DetourStepEntry>(*arena, head(*arena).steps_offset, head(*arena).step_count);
  REQUIRE(detours[1].first_step + detours[1].step_count == steps.size());
  CHECK(steps[detours[1].first_step + 1].original == 2);
  CHECK(steps[detours[0].first_step].offset == 3);

  auto specials = part<SpecialEntry>(*arena, head(*arena).specials_offset, head(*arena).special_count);
  struct Expected {
    uint64_t begin, end;
    SpecialKind kind;
  } expected[] = {{0x100, 0x120, SpecialKind::plt},
                  {0x120, 0x140, SpecialKind::return_trampoline},
                  {0x140, 0x200, SpecialKind::plt},
                  {0x200, 0x210, SpecialKind::vdso}};
  REQUIRE(specials.size() == std::size(expected));
  for (size_t i = 0; i < specials.size(); i++) {
    CHECK(specials[i].begin == expected[i].begin);
    CHECK(specials[i].end == expected[i].end);
    CHECK(specials[i].kind == static_cast<uint32_t>(expected[i].kind));
  }

  auto again = build_arena(input);
  REQUIRE(again);
  CHECK(head(*arena).generation != 0);
  CHECK(head(*again).generation != head(*arena).generation);
  input.detours[1].range = {Addr(0x5010), Addr(0x5020)};
  CHECK(!build_arena(input));
}

TEST_CASE("specials: the restorer that libc registered with the kernel") {
  struct KernelSigaction {
    void* handler;
    unsigned long flags;
    void* restorer;
    uint64_t mask;
  } action{};
  struct sigaction old, mine{};
  mine.sa_handler = [](int) {};
  REQUIRE(sigaction(SIGUSR2, &mine, &old) == 0);
  REQUIRE(syscall(SYS_rt_sigaction, SIGUSR2, nullptr, &action, 8) == 0);
  sigaction(SIGUSR2, &old, nullptr);
  auto specials = specials_of(loaded_for(action.restorer));
  Addr restorer(reinterpret_cast<uint64_t>(action.restorer));
  CHECK(is_special(specials, SpecialKind::signal_return, restorer));
  CHECK(!is_special(specials, SpecialKind::signal_return, restorer - 1));
}

TEST_CASE("specials: entry point, linker start, vDSO, linkage stubs") {
  auto* entry = reinterpret_cast<void*>(getauxval(AT_ENTRY));
  auto specials = specials_of(loaded_for(entry));
  CHECK(is_special(specials, SpecialKind::outermost, Addr(getauxval(AT_ENTRY))));
  CHECK(!is_special(specials, SpecialKind::outermost, Addr(getauxval(AT_ENTRY)) - 1));
  CHECK(!is_special(specials, SpecialKind::outermost, Addr(reinterpret_cast<uint64_t>(&loaded_for))));

  auto* linker_base = reinterpret_cast<void*>(getauxval(AT_BASE));
  LoadedImage linker = loaded_for(linker_base);
  specials = specials_of(linker);
  Addr start = linker.to_target(linker.image->entry());
  CHECK(is_special(specials, SpecialKind::outermost, start));
  CHECK(is_special(specials, SpecialKind::outermost, start + 8));  // _dl_start_user
  size_t resolvers = 0;
  for (const ArenaSpecial& special : specials) resolvers += special.kind == SpecialKind::lazy_resolver;
  CHECK(resolvers >= 3);  // fxsave, xsave, xsavec

  auto* vdso = reinterpret_cast<void*>(getauxval(AT_SYSINFO_EHDR));
  LoadedImage kernel = loaded_for(vdso);
  auto clock = kernel.image->symbol("__vdso_clock_gettime");
  REQUIRE(clock);
  CHECK(is_special(specials_of(kernel), SpecialKind::vdso, kernel.to_target(*clock)));

  LoadedImage libc = loaded_for(dlsym(RTLD_NEXT, "clone"));
  specials = specials_of(libc);
  const Section* plt = libc.image->section(".plt");
  REQUIRE(plt);
  CHECK(is_special(specials, SpecialKind::plt, libc.to_target(plt->addr)));
  CHECK(is_special(specials, SpecialKind::plt, libc.to_target(plt->addr + static_cast<int64_t>(plt->size - 1))));
  CHECK(!is_special(specials, SpecialKind::plt, libc.to_target(plt->addr - 1)));
  size_t shared_by_child = 0;
  for (const ArenaSpecial& special : specials) shared_by_child += special.kind == SpecialKind::clone_return;
  CHECK(shared_by_child == 2);  // clone, clone3
  for (const ArenaSpecial& special : specials)
    if (special.kind == SpecialKind::clone_return)
      CHECK(is_special(specials, SpecialKind::bare, special.range.begin - 2));
}

TEST_CASE("specials: the kernel's page of return probes, by its name") {
  auto maps = parse_maps(
      "7ffff7fc1000-7ffff7fc3000 r-xp 00000000 00:00 0                          [vdso]\n"
      "7fffffffe000-7ffffffff000 --xp 00000000 00:00 0                          [uprobes]\n");
  REQUIRE(maps);
  auto specials = mapped_specials(*maps);
  REQUIRE(specials.size() == 1);
  ArenaInput input;
  input.specials = specials;
  auto arena = build_arena(input);
  REQUIRE(arena);
  ArenaView view(&head(*arena));
  CodeAddr returned_to{Addr(0x7fffffffe000), true};
  REQUIRE(view.special(returned_to.lookup()));
  CHECK(view.special(returned_to.lookup())->kind == static_cast<uint32_t>(SpecialKind::unreliable));
  CHECK(!view.special(Addr(0x7ffff7fc1000)));
}

TEST_CASE("specials: what a program declares") {
  auto at = [](const char& symbol) { return Addr(reinterpret_cast<uint64_t>(&symbol)); };
  auto specials = specials_of(loaded_for(&test_special_first));
  CHECK(is_special(specials, SpecialKind::unreliable, at(test_special_first)));
  CHECK(!is_special(specials, SpecialKind::unreliable, at(test_special_first) - 1));
  CHECK(is_special(specials, SpecialKind::unreliable, at(test_special_second) - 1));
  CHECK(is_special(specials, SpecialKind::outermost, at(test_special_second)));
  CHECK(!is_special(specials, SpecialKind::unreliable, at(test_special_second)));
  CHECK(is_special(specials, SpecialKind::signal_return, at(test_special_third)));
  CHECK(is_special(specials, SpecialKind::unreliable, at(test_special_fourth)));  // of a kind that is not known
  size_t empty = 0, data = 0;
  for (const ArenaSpecial& special : specials) {
    empty += special.range.begin >= special.range.end;
    data += special.range.contains(Addr(reinterpret_cast<uint64_t>(&test_special_data)));
  }
  CHECK(empty == 0);
  CHECK(data == 0);
  // Before what sonde knows by itself: the third has the bytes of a signal's return.
  ArenaInput input;
  LoadedImage own = loaded_for(&test_special_first);
  auto table = load_table(*own.image, "");
  REQUIRE(table);
  input.images = {{own, *table}};
  input.specials = specials;
  auto arena = build_arena(input);
  REQUIRE(arena);
  ArenaView view(&head(*arena));
  const SpecialEntry* found = view.special(*view.text(at(test_special_fifth)), at(test_special_fifth));
  REQUIRE(found);
  CHECK(found->kind == static_cast<uint32_t>(SpecialKind::unreliable));
}

TEST_CASE("specials: an image's index finds what a linear search finds (S21)") {
  LoadedImage own = loaded_for(&test_special_first);
  auto table = load_table(*own.image, "");
  REQUIRE(table);
  uint64_t begin = 0, size = 0;
  for (const Segment& segment : own.image->segments())
    if (segment.executable) begin = own.to_target(segment.range.begin).value, size = segment.range.size();
  std::mt19937_64 random(3);
  size_t hits = 0, missed = 0;
  for (unsigned count : {0, 1, 2, 10, 1000, 20000}) {
    ArenaInput input;
    input.images = {{own, *table}};
    for (unsigned i = 0; i < count; i++) {  // half of them close together, some across the text's borders
      uint64_t at = begin - 50 + random() % (i % 2 ? size + 100 : 5000);
      input.specials.push_back({{Addr(at), Addr(at + 1 + random() % 60)}, static_cast<SpecialKind>(random() % 5)});
    }
    auto arena = build_arena(input);
    REQUIRE(arena);
    auto entries = part<SpecialEntry>(*arena, head(*arena).specials_offset, head(*arena).special_count);
    ArenaView view(&head(*arena));
    for (unsigned i = 0; i < 2000; i++) {
      Addr pc(begin + random() % (i % 2 ? size : 5100));
      const SpecialEntry* expected = nullptr;
      for (const SpecialEntry& entry : entries)
        if (entry.begin <= pc.value && pc.value < entry.end) expected = &entry;
      const ImageEntry* image = view.text(pc);
      REQUIRE(image);
      if (view.special(*image, pc) != expected || view.special(pc) != expected) FAIL("at ", pc.value, " of ", count);
      expected ? hits++ : missed++;
    }
  }
  CHECK(hits > 2000);
  CHECK(missed > 2000);
}

TEST_CASE("specials: swapcontext between the new stack pointer and its pc") {
  auto* begin = static_cast<const uint8_t*>(dlsym(RTLD_NEXT, "swapcontext"));
  auto specials = specials_of(loaded_for(begin));
  auto find = [&](std::initializer_list<uint8_t> bytes) {
    auto hit = std::search(begin, begin + 512, bytes.begin(), bytes.end());
    REQUIRE(hit != begin + 512);
    return Addr(reinterpret_cast<uint64_t>(hit));
  };
  Addr load = find({0x48, 0x8b, 0xa2, 0xa0, 0, 0, 0}), push = find({0x48, 0x8b, 0x8a, 0xa8, 0, 0, 0, 0x51}) + 7;
  CHECK(!is_special(specials, SpecialKind::unreliable, load));
  CHECK(is_special(specials, SpecialKind::unreliable, load + 7));
  CHECK(is_special(specials, SpecialKind::unreliable, push));
  CHECK(!is_special(specials, SpecialKind::unreliable, push + 1));
}

uint64_t returns_to;
void in_context() { returns_to = reinterpret_cast<uint64_t>(__builtin_return_address(0)); }

TEST_CASE("specials: where a function started by makecontext returns to") {
  static ucontext_t main_context, context;
  static char stack[65536];
  getcontext(&context);
  context.uc_stack.ss_sp = stack, context.uc_stack.ss_size = sizeof stack;
  context.uc_link = &main_context;
  makecontext(&context, in_context, 0);
  swapcontext(&main_context, &context);
  auto specials = specials_of(loaded_for(reinterpret_cast<void*>(returns_to)));
  CHECK(is_special(specials, SpecialKind::outermost, Addr(returns_to) - 1));
}

// Of the cross compiler's library, as if it lay at address 0. Nothing if that is not installed.
std::vector<ArenaSpecial> aarch64_specials(const std::string& name, std::shared_ptr<const Image>* image) {
  auto opened = Image::open("/usr/aarch64-linux-gnu/lib/" + name);
  if (!opened) {
    MESSAGE("skipped: g++-aarch64-linux-gnu is not installed");
    return {};
  }
  *image = *opened;
  auto table = load_table(**image, "");
  REQUIRE(table);
  const Table view = (*table)->table();
  return find_specials({*image, 0, {}}, &view);
}

// The instruction `number` of a function.
Addr insn(const Image& image, const char* function, int64_t number) {
  auto at = image.symbol(function);
  REQUIRE(at);
  return Addr(at->value) + 4 * number;
}
uint32_t word_at(const Image& image, Addr at) {
  auto bytes = image.bytes(ImageRange{ImageAddr(at.value), ImageAddr(at.value + 4)});
  uint32_t word = 0;
  if (bytes.size() == 4) std::memcpy(&word, bytes.data(), 4);
  return word;
}
Addr find_word(const Image& image, Addr from, uint32_t word) {
  for (int64_t i = 0; i < 1024; i++)
    if (word_at(image, from + 4 * i) == word) return from + 4 * i;
  FAIL("no such instruction");
  return from;
}

TEST_CASE("specials: AArch64 code that changes contexts, and what started ones return to (S20, S29)") {
  std::shared_ptr<const Image> libc;
  auto specials = aarch64_specials("libc.so.6", &libc);
  if (!libc) return;
  auto unreliable = [&](Addr at) { return is_special(specials, SpecialKind::unreliable, at); };
  Addr set = insn(*libc, "setcontext", 0), load = find_word(*libc, set, 0xa954cc12),
       jump = find_word(*libc, load, 0xd61f0200);
  CHECK(!unreliable(load));  // nothing is loaded yet
  CHECK(unreliable(load + 4));
  CHECK(unreliable(jump));
  CHECK(!unreliable(jump + 4));
  Addr swap = insn(*libc, "swapcontext", 0), save = find_word(*libc, swap, 0xa90bf81f),
       back = find_word(*libc, save, 0xaa0103fe);
  CHECK(!unreliable(save + 4));
  CHECK(unreliable(save + 8));  // behind adr x30
  CHECK(unreliable(back));
  CHECK(!unreliable(back + 4));
  size_t ends = 0;
  for (const ArenaSpecial& special : specials)
    if (special.kind == SpecialKind::outermost && word_at(*libc, special.range.begin + 4) == 0xaa1303e0) ends++;
  CHECK(ends == 1);
}

TEST_CASE("specials: AArch64 functions that throw, and the lazy resolver (S20)") {
  std::shared_ptr<const Image> libgcc, linker;
  auto specials = aarch64_specials("libgcc_s.so.1", &libgcc);
  if (!libgcc) return;
  auto unreliable = [&](Addr at) { return is_special(specials, SpecialKind::unreliable, at); };
  for (const char* name :
       {"_Unwind_RaiseException", "_Unwind_Resume", "_Unwind_ForcedUnwind", "_Unwind_Resume_or_Rethrow"}) {
    INFO(name);
    Addr begin = insn(*libgcc, name, 0), move = find_word(*libgcc, begin, 0x8b2463ff),
         load = find_word(*libgcc, begin, 0xa9407bfd);
    CHECK(!unreliable(begin));
    CHECK(unreliable(load));
    CHECK(unreliable(move + 4));
    Addr store = find_word(*libgcc, begin, 0xf90007a1);  // str x1,[x29,#8]
    CHECK(unreliable(store));
    int calls = 0;
    for (Addr at = store; calls < 2; at = at - 4) {
      bool is_call = (word_at(*libgcc, at) & 0xfc000000) == 0x94000000;
      calls += is_call;
      CHECK(unreliable(at + 3));
      if (calls == 2) CHECK(!unreliable(at));  // its return address is looked up one byte before
    }
  }
  specials = aarch64_specials("ld-linux-aarch64.so.1", &linker);
  REQUIRE(linker);
  size_t resolvers = 0;
  for (const ArenaSpecial& special : specials)
    if (special.kind == SpecialKind::lazy_resolver) {
      resolvers++;
      CHECK(word_at(*linker, special.range.begin + 4) == 0xa9b327e8);  // stp x8,x9,[sp,#-208]!
    }
  CHECK(resolvers == 1);
}

}  // namespace
}  // namespace sonde::host
