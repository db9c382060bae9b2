// Durations of one function: exact up to kExact values, then counted in buckets whose width is at most 1/128 of their
// value, so that a percentile is at most 0.4 % off. Count, sum, minimum and maximum are always exact.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace sonde::host {

class Histogram {
 public:
  static constexpr size_t kExact = 128;
  static constexpr unsigned kSubBits = 7;

  void add(uint64_t value);
  uint64_t count() const { return count_; }
  uint64_t sum() const { return sum_; }
  uint64_t min() const { return count_ ? min_ : 0; }
  uint64_t max() const { return max_; }
  // The value at rank ceil(fraction * count), from 1; 0 if there is none.
  uint64_t percentile(double fraction) const;

 private:
  void count_in_bucket(uint64_t value);
  uint64_t count_ = 0, sum_ = 0, min_ = ~0ull, max_ = 0;
  std::vector<uint64_t> exact_;
  std::vector<uint64_t> buckets_;  // from bucket first_ on
  uint32_t first_ = 0;
};

}  // namespace sonde::host
