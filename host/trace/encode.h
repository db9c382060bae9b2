// Records before compression. What repeats (the first words of records, the frames of stacks) goes into a dictionary,
// ticks become differences of few bytes, and each kind of value gets a column of its own: 24 bytes of a call become
// about 5, which compress in a fifth of the time. docs/formats.md has the layout.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "core/event/record.h"

namespace sonde::host {

class RecordEncoder {
 public:
  RecordEncoder();
  // Appends the encoded form to `out`. `words` are whole records, which must have been checked; holes are left out.
  void encode(std::span<const uint64_t> words, std::vector<uint8_t>& out);

 private:
  struct Cached {
    uint64_t word;
    uint32_t index, chunk;  // valid for this chunk only
  };
  struct Columns;
  static constexpr unsigned kCacheBits = 11;

  // Number in the dictionary; a word that is not cached gets a new one, the dictionary's size before.
  uint32_t number(uint64_t word);

  std::unique_ptr<Cached[]> cache_;
  uint32_t chunk_ = 0;
  std::vector<uint64_t> dictionary_;
  std::vector<uint8_t> columns_;
};

// Whole records again, or nothing if the bytes contradict themselves. Any bytes are safe.
std::optional<std::vector<uint64_t>> decode_records(std::span<const uint8_t> bytes);

}  // namespace sonde::host
