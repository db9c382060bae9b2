#include "tests/step/walks.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <optional>

#include "core/isa/code.h"
#include "core/unwind/step.h"
#include "core/walk/arena_view.h"
#include "host/check/proven_table.h"
#include "host/tables/arena.h"
#include "host/tables/print.h"

namespace sonde::stepping {

void Walks::refresh() {
  if (generation_ == program_.code_generation()) return;
  const uint64_t pc = program_.pc();
  auto still_there = [&](const host::LoadedImage& loaded) {
    return std::ranges::any_of(program_.mappings(), [&](const host::Mapping& m) {
      return m.executable && m.range.begin >= loaded.range.begin && m.range.end <= loaded.range.end;
    });
  };
  // The dynamic linker maps many files before anything runs in them.
  if (generation_ && image_at(pc) && std::ranges::all_of(images_, still_there)) return;
  generation_ = program_.code_generation();
  images_ = program_.images();
  tables_.clear();
  host::ArenaInput input;
  input.specials = program_.specials();
  for (const host::LoadedImage& loaded : images_) {
    auto table = host::load_proven_table(*loaded.image);
    tables_.push_back(table ? *table : nullptr);
    std::optional<Table> view;
    if (table) view = (*table)->table();
    auto specials = host::find_specials(loaded, view ? &*view : nullptr);
    input.specials.insert(input.specials.end(), specials.begin(), specials.end());
    input.images.push_back({loaded, tables_.back()});
  }
  if (auto arena = host::build_arena(input)) arena_ = std::move(*arena);
  cache_ = std::make_unique<RowCache>();
}

Walk Walks::walk(bool reliable_only, bool with_cache) {
  constexpr unsigned kMost = 4096;
  static Frame frames[kMost + 1];
  AnyMemory memory = program_.any_memory();
  Walk walk;
  auto from = [&]<class Isa>(const RegSet<Isa>& regs) {
    WalkStart<Isa> start{.regs = regs, .source = Source::regs_pc};
    start.reliable_only = reliable_only;
    start.max_frames = kMost;
    return sonde::walk(arena(), with_cache ? cache_.get() : nullptr, memory, start, std::span<Frame>(frames));
  };
  walk.result = std::visit(from, program_.registers());
  walk.frames.assign(frames, frames + walk.result.frames);
  return walk;
}

const host::LoadedImage* Walks::image_at(uint64_t pc) const {
  auto found =
      std::ranges::upper_bound(images_, Addr(pc), {}, [](const host::LoadedImage& i) { return i.range.begin; });
  return found == images_.begin() || !std::prev(found)->range.contains(Addr(pc)) ? nullptr : &*std::prev(found);
}

Chain Walks::plain(size_t limit) {
  return std::visit([&](const auto& regs) { return plain_from(regs, limit); }, program_.registers());
}

template <class Isa>
Chain Walks::plain_from(RegSet<Isa> regs, size_t limit) {
  Chain chain;
  AnyMemory memory = program_.any_memory();
  bool is_return = false;
  while (chain.pcs.size() < limit) {
    CodeAddr code{regs.pc(), is_return};
    chain.pcs.push_back(code.pc.value);
    const host::LoadedImage* image = image_at(code.lookup().value);
    if (!image) break;
    const host::SharedTable& shared = tables_[static_cast<size_t>(image - images_.data())];
    if (!shared) break;
    const Table table = shared->table();
    const Row* row = table.lookup(image->to_image(code.lookup()));
    RegSet<Isa> caller;
    if (!row || step(table, *row, regs, memory, Code<Isa>::kSignatureBits, &caller) != StepStatus::ok) break;
    is_return = !(row->flags & kRowSignalFrame);
    regs = caller;
  }
  return chain;
}

namespace {

// Code of an image, and its function if that has a name: "file:function".
struct Where {
  Where(const host::LoadedImage& loaded, uint64_t at)
      : image(*loaded.image),
        in_image(loaded.to_image(Addr(at))),
        hit(image.find(in_image)),
        file(std::filesystem::path(image.path()).filename()) {}
  bool named() const { return hit && !hit->function->name.empty(); }
  std::string function() const { return file + ":" + host::display_name(image, *hit->function); }

  const host::Image& image;
  ImageAddr in_image;
  decltype(image.find(in_image)) hit;
  std::string file;
};

}  // namespace

std::string Walks::name(uint64_t pc, bool is_return) const {
  const host::LoadedImage* image = image_at(pc - is_return);
  if (!image) return "generated code";
  Where where(*image, pc - is_return);
  if (!where.named()) return fmt::format("{}:{:#x}", where.file, where.in_image.value + is_return);
  return fmt::format("{}+{:#x}", where.function(), where.hit->offset + is_return);
}

std::string Walks::place(uint64_t pc, bool is_return) const {
  const host::LoadedImage* image = image_at(pc - is_return);
  if (!image) return "generated code";
  Where where(*image, pc - is_return);
  if (where.named()) return where.function();
  std::string section = "?";
  for (const host::Section& s : where.image.sections())
    if (s.addr && s.addr <= where.in_image && where.in_image < s.addr + static_cast<int64_t>(s.size)) section = s.name;
  if (section != ".text") return where.file + ":" + section;
  uint64_t begin = where.hit ? where.hit->function->range.begin.value : where.in_image.value & ~uint64_t{15};
  return fmt::format("{}:{:#x}", where.file, begin);
}

std::string Walks::row(uint64_t pc, bool is_return) const {
  const uint64_t at = is_return ? pc - 1 : pc;
  const host::LoadedImage* image = image_at(at);
  if (!image) return "no image";
  const host::SharedTable& shared = tables_[static_cast<size_t>(image - images_.data())];
  if (!shared) return "no table";
  const Table table = shared->table();
  return host::format_row(table, table.lookup(image->to_image(Addr(at))));
}

}  // namespace sonde::stepping
