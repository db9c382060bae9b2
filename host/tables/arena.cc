// Layout: TableArena, images, detours, steps, specials, then each distinct table at a multiple of 64 bytes.
#include "host/tables/arena.h"

#include <fmt/format.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>

namespace sonde::host {
namespace {

constexpr size_t kTableAlignment = 64;

class Bytes {
 public:
  template <class T>
  uint64_t append(const std::vector<T>& items) {
    return append({reinterpret_cast<const uint8_t*>(items.data()), items.size() * sizeof(T)}, 8);
  }
  uint64_t append(std::span<const uint8_t> data, size_t alignment) {
    bytes_.resize((bytes_.size() + alignment - 1) & ~(alignment - 1));
    uint64_t at = bytes_.size();
    bytes_.insert(bytes_.end(), data.begin(), data.end());
    return at;
  }
  size_t size() const { return bytes_.size(); }
  std::vector<uint8_t>& bytes() { return bytes_; }

 private:
  std::vector<uint8_t> bytes_;
};

// One piece of text, from the file as a whole: no gap in it, nothing in it that reading could stumble over.
bool readable_text(const Image& image) {
  const Segment* text = nullptr;
  for (const Segment& segment : image.segments()) {
    if (!segment.executable) continue;
    if (text || !segment.readable) return false;
    text = &segment;
  }
  return text && text->range.size() == text->file_size;
}

ImageEntry entry_of(const ArenaImage& image) {
  ImageEntry entry{};
  const LoadedImage& loaded = image.loaded;
  entry.begin = loaded.range.begin.value, entry.end = loaded.range.end.value, entry.bias = loaded.bias;
  entry.text_begin = UINT64_MAX;
  for (const Segment& segment : loaded.image->segments()) {
    if (!segment.executable) continue;
    entry.text_begin = std::min(entry.text_begin, loaded.to_target(segment.range.begin).value);
    entry.text_end = std::max(entry.text_end, loaded.to_target(segment.range.end).value);
  }
  if (entry.text_end == 0) entry.text_begin = 0;
  if (image.stays && readable_text(*loaded.image)) entry.flags = kImageStays;
  return entry;
}

// Adds the parts of `range` that nothing in `taken` covers yet.
void add_special(std::map<uint64_t, SpecialEntry>& taken, AddrRange range, SpecialKind kind) {
  uint64_t at = range.begin.value, end = range.end.value;
  auto next = taken.upper_bound(at);
  if (next != taken.begin() && std::prev(next)->second.end > at) at = std::prev(next)->second.end;
  while (at < end) {
    uint64_t stop = next == taken.end() ? end : std::min(end, next->first);
    if (at < stop) taken.emplace_hint(next, at, SpecialEntry{at, stop, static_cast<uint32_t>(kind), 0});
    if (next == taken.end() || stop == end) return;
    at = next->second.end;
    ++next;
  }
}

// Of an image whose text is known: which specials are its own, and the index of them.
std::vector<uint32_t> index_specials(ImageEntry& image, const std::vector<SpecialEntry>& specials) {
  auto begin = std::ranges::upper_bound(specials, image.text_begin, {}, &SpecialEntry::end);
  auto end = std::ranges::lower_bound(specials, image.text_end, {}, &SpecialEntry::begin);
  if (end < begin) end = begin;
  image.first_special = static_cast<uint32_t>(begin - specials.begin());
  image.special_count = static_cast<uint32_t>(end - begin);
  // About two buckets for each, so that nearly all hold one or none.
  const uint64_t size = image.text_end - image.text_begin, buckets = uint64_t{2} * image.special_count + 1;
  image.special_shift = 0;
  while (size >> image.special_shift > buckets) image.special_shift++;
  std::vector<uint32_t> index;
  uint32_t before = 0;
  for (uint64_t at = 0; at <= (size >> image.special_shift) + 1; at++) {
    uint64_t address = image.text_begin + (at << image.special_shift);
    while (before < image.special_count && begin[before].end <= address) before++;
    index.push_back(before);
  }
  return index;
}

// Rising within this process, and in practice above what any recorder before it used.
uint64_t next_generation() {
  static std::atomic<uint64_t> last;
  timespec now;
  clock_gettime(CLOCK_BOOTTIME, &now);
  uint64_t time = static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec);
  uint64_t before = last.load(), next;
  do next = std::max(time, before + 1);
  while (!last.compare_exchange_weak(before, next));
  return next;
}

template <class Entry>
bool overlap(const std::vector<Entry>& sorted, uint64_t* where) {
  for (size_t i = 1; i < sorted.size(); i++)
    if (sorted[i].begin < sorted[i - 1].end) return *where = sorted[i].begin, true;
  return false;
}

}  // namespace

Result<std::vector<uint8_t>> build_arena(const ArenaInput& input) {
  Bytes out;
  TableArena arena{};
  out.append({reinterpret_cast<const uint8_t*>(&arena), sizeof arena}, 8);

  std::vector<const ArenaImage*> order;
  for (const ArenaImage& image : input.images) order.push_back(&image);
  std::sort(order.begin(), order.end(),
            [](const ArenaImage* a, const ArenaImage* b) { return a->loaded.range.begin < b->loaded.range.begin; });
  std::vector<ImageEntry> images;
  for (const ArenaImage* image : order) images.push_back(entry_of(*image));
  uint64_t where;
  if (overlap(images, &where)) return fail(fmt::format("unwind tables: two images at {:#x}", where));

  std::vector<DetourEntry> detours;
  std::vector<DetourStepEntry> steps;
  std::vector<const ArenaDetour*> detour_order;
  for (const ArenaDetour& detour : input.detours) detour_order.push_back(&detour);
  std::sort(detour_order.begin(), detour_order.end(),
            [](const ArenaDetour* a, const ArenaDetour* b) { return a->range.begin < b->range.begin; });
  for (const ArenaDetour* detour : detour_order) {
    detours.push_back({detour->range.begin.value, detour->range.end.value, detour->patch.value, detour->site,
                       static_cast<uint32_t>(steps.size()), static_cast<uint32_t>(detour->steps.size()), 0});
    steps.insert(steps.end(), detour->steps.begin(), detour->steps.end());
  }
  if (overlap(detours, &where)) return fail(fmt::format("unwind tables: two detours at {:#x}", where));

  std::map<uint64_t, SpecialEntry> taken;
  for (const ArenaSpecial& special : input.specials) add_special(taken, special.range, special.kind);
  std::vector<SpecialEntry> specials;
  for (const auto& [begin, special] : taken) specials.push_back(special);

  arena.generation = next_generation();
  arena.image_count = static_cast<uint32_t>(images.size());
  arena.detour_count = static_cast<uint32_t>(detours.size());
  arena.step_count = static_cast<uint32_t>(steps.size());
  arena.special_count = static_cast<uint32_t>(specials.size());
  arena.trampolines = input.trampolines.value, arena.entries = input.entries.value;
  arena.row_cache = input.row_cache.value;
  arena.images_offset = out.append(images);
  arena.detours_offset = out.append(detours);
  arena.steps_offset = out.append(steps);
  specials.push_back({UINT64_MAX, UINT64_MAX, 0, 0});  // not counted: look-ups may stop at it
  arena.specials_offset = out.append(specials);

  std::map<const ImageTable*, uint64_t> placed;  // a file mapped twice has one table
  for (size_t i = 0; i < order.size(); i++) {
    const ImageTable* table = order[i]->table.get();
    if (!table) continue;
    auto [at, fresh] = placed.try_emplace(table, 0);
    if (fresh) at->second = out.append(table->bytes(), kTableAlignment);
    images[i].table_offset = at->second;
  }
  for (ImageEntry& image : images) image.special_index = out.append(index_specials(image, specials));
  arena.size = out.size();
  std::memcpy(out.bytes().data(), &arena, sizeof arena);
  if (!images.empty())
    std::memcpy(out.bytes().data() + arena.images_offset, images.data(), images.size() * sizeof(ImageEntry));
  return std::move(out.bytes());
}

}  // namespace sonde::host
