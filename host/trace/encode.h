// Records before compression, straight from where they lie. What repeats (the first words of records, the frames of
// stacks) goes into a dictionary, ticks become differences of few bytes, and each kind of value gets a column of its own:
// 24 bytes of a call become about 3. Sixteen records share one byte that says how wide their values are, so that the
// work for one of them is a few instructions without a branch that depends on it. docs/formats.md has the layout.
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
  // A chunk holds no more. Its memory is reserved at once and used as far as records come.
  static constexpr size_t kMostRecords = 32 << 10, kMostWords = 128 << 10;
  static constexpr size_t kGroup = 16;

  enum class Stop { taken, full, no_record, no_end };
  struct Taken {
    size_t words = 0;  // whole records, holes among them
    uint64_t calls = 0, entries = 0, stacks = 0;
    Stop stop = Stop::taken;  // full: finish() must come first; no_record, no_end: what stands behind `words` is none
  };

  RecordEncoder();
  // Adds the records of words[0, count), which ends where a record must end, until `most` words or more are taken. Holes
  // are left out. Each word is read once and checked before it is used: it may change meanwhile.
  Taken take(const uint64_t* words, size_t count, size_t most);
  // Records since the last finish().
  uint32_t records() const { return records_ + group_.size; }
  // Appends their encoded form to `out` and begins anew.
  void finish(std::vector<uint8_t>& out);

 private:
  struct Cached {
    uint64_t word;
    uint32_t index, chunk;  // valid for this chunk only
  };
  struct Group {
    uint64_t times[kGroup], durations[kGroup];
    uint32_t numbers[kGroup];
    uint64_t time_bits = 0, duration_bits = 0;
    uint32_t size = 0, number_bits = 0;
    bool foreseen = true;
  };
  static constexpr unsigned kCacheBits = 11;

  // Number in the dictionary; a word that is not cached gets a new one, the dictionary's size before.
  uint32_t number(uint64_t word);
  void add(uint64_t head, uint64_t time, uint64_t duration);
  size_t take_calls(const uint64_t* words, size_t count);
  void close_group();
  void reset();

  std::unique_ptr<Cached[]> cache_;
  std::unique_ptr<uint64_t[]> dictionary_;
  std::unique_ptr<uint32_t[]> next_;  // by number: that of the record that followed the last time
  std::unique_ptr<uint8_t[]> columns_;
  uint8_t *control_, *numbers_, *times_, *durations_, *frames_;  // where the next byte of each column goes
  Group group_;
  uint64_t last_;
  size_t words_;
  uint32_t chunk_ = 0, records_, known_, previous_;
};

// Whole records again, or nothing if the bytes contradict themselves. Any bytes are safe.
std::optional<std::vector<uint64_t>> decode_records(std::span<const uint8_t> bytes);

}  // namespace sonde::host
