// Searches in a TableArena: which image, special code, detour holds an address. Signal-safe.
#pragma once

#include "core/base/addr.h"
#include "core/unwind/arena.h"
#include "core/unwind/table.h"

namespace sonde {

// A process has one place that holds the arena its walks use. What was written into an arena, its special ranges and their
// number among it, is seen by whoever finds it there; an arena is never changed after that (semantics: S23).
inline const TableArena* current_arena(const TableArena* const& place) {
  return __atomic_load_n(&place, __ATOMIC_ACQUIRE);
}
inline void publish_arena(const TableArena*& place, const TableArena* arena) {
  __atomic_store_n(&place, arena, __ATOMIC_RELEASE);
}

class ArenaView {
 public:
  explicit ArenaView(const TableArena* arena) : arena_(arena) {}

  const TableArena& header() const { return *arena_; }

  // Of the entries sorted by begin, not overlapping, the one whose [begin, end) holds pc, or null.
  const ImageEntry* image(Addr pc) const { return holding<ImageEntry>(arena_->images_offset, arena_->image_count, pc); }
  const SpecialEntry* special(Addr pc) const {
    return holding<SpecialEntry>(arena_->specials_offset, arena_->special_count, pc);
  }
  // The same for a pc in the text of an image, in a time that does not depend on how many there are (semantics: S21).
  const SpecialEntry* special(const ImageEntry& image, Addr pc) const {
    if (!image.special_index) return special(pc);
    const auto* entries = at<SpecialEntry>(arena_->specials_offset) + image.first_special;
    const uint32_t* index = at<uint32_t>(image.special_index) + ((pc.value - image.text_begin) >> image.special_shift);
    uint32_t first = index[0], last = index[1];  // that many end at or before the bucket, and before the next
    while (last - first > 2) {
      uint32_t middle = first + (last - first) / 2;
      if (entries[middle].end <= pc.value) first = middle + 1;
      else last = middle;
    }
    // Without branches; nothing steps over the entry behind the image's last one, which ends further up.
    first += entries[first].end <= pc.value;
    first += entries[first].end <= pc.value;
    return entries[first].begin <= pc.value ? &entries[first] : nullptr;
  }
  const DetourEntry* detour(Addr pc) const {
    return holding<DetourEntry>(arena_->detours_offset, arena_->detour_count, pc);
  }
  // The image if pc lies in its text.
  const ImageEntry* text(Addr pc) const {
    const ImageEntry* entry = image(pc);
    return entry && entry->text_begin <= pc.value && pc.value < entry->text_end ? entry : nullptr;
  }

  // A detour whose patch lies at most `within` bytes before pc. They are sorted otherwise: linear, for rare cases.
  const DetourEntry* detour_of_patch(Addr pc, uint64_t within) const {
    const auto* detours = at<DetourEntry>(arena_->detours_offset);
    for (uint32_t i = 0; i < arena_->detour_count; i++)
      if (pc.value - detours[i].patch <= within) return &detours[i];
    return nullptr;
  }

  // Where `offset` bytes into a detour stand for: the last step at or before it, or null in front of the first.
  const DetourStepEntry* detour_step(const DetourEntry& detour, uint64_t offset) const {
    const auto* steps = at<DetourStepEntry>(arena_->steps_offset) + detour.first_step;
    const DetourStepEntry* found = nullptr;
    for (uint32_t i = 0; i < detour.step_count && steps[i].offset <= offset; i++) found = &steps[i];
    return found;
  }

  bool has_table(const ImageEntry& image) const { return image.table_offset != 0; }
  Table table(const ImageEntry& image) const { return Table::at(at<char>(image.table_offset)); }

 private:
  template <class T>
  const T* at(uint64_t offset) const {
    return reinterpret_cast<const T*>(reinterpret_cast<const char*>(arena_) + offset);
  }
  template <class T>
  const T* holding(uint64_t offset, uint32_t count, Addr pc) const {
    const T* entry = at<T>(offset);
    if (!count || pc.value < entry->begin) return nullptr;
    while (count > 1) {  // entry->begin <= pc
      uint32_t half = count / 2;
      entry += entry[half].begin <= pc.value ? half : 0;
      count -= half;
    }
    return pc.value < entry->end ? entry : nullptr;
  }

  const TableArena* arena_;
};

}  // namespace sonde
