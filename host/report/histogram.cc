#include "host/report/histogram.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace sonde::host {

namespace {

// Values below 2^kSubBits have a bucket each; above, each power of two has 2^kSubBits buckets.
uint32_t bucket_of(uint64_t value) {
  constexpr unsigned sub = Histogram::kSubBits;
  if (value < (1u << sub)) return static_cast<uint32_t>(value);
  unsigned shift = std::bit_width(value) - 1 - sub;
  return static_cast<uint32_t>(((shift + 1) << sub) + ((value >> shift) - (1u << sub)));
}

uint64_t middle_of(uint32_t bucket) {
  constexpr unsigned sub = Histogram::kSubBits;
  if (bucket < (1u << sub)) return bucket;
  unsigned shift = (bucket >> sub) - 1;
  uint64_t low = (uint64_t(bucket & ((1u << sub) - 1)) + (1u << sub)) << shift;
  return low + ((uint64_t(1) << shift) >> 1);
}

}  // namespace

void Histogram::add(uint64_t value) {
  ++count_;
  sum_ += value;
  min_ = std::min(min_, value);
  max_ = std::max(max_, value);
  if (!buckets_.empty()) return count_in_bucket(value);
  exact_.push_back(value);
  if (exact_.size() <= kExact) return;
  for (uint64_t known : exact_) count_in_bucket(known);
  exact_ = {};
}

void Histogram::count_in_bucket(uint64_t value) {
  uint32_t bucket = bucket_of(value);
  if (buckets_.empty()) first_ = bucket;
  if (bucket < first_) {
    buckets_.insert(buckets_.begin(), first_ - bucket, 0);
    first_ = bucket;
  }
  if (bucket - first_ >= buckets_.size()) buckets_.resize(bucket - first_ + 1);
  ++buckets_[bucket - first_];
}

uint64_t Histogram::percentile(double fraction) const {
  if (count_ == 0) return 0;
  uint64_t rank =
      std::clamp<uint64_t>(static_cast<uint64_t>(std::ceil(fraction * static_cast<double>(count_))), 1, count_);
  if (buckets_.empty()) {
    std::vector<uint64_t> sorted = exact_;
    std::nth_element(sorted.begin(), sorted.begin() + (rank - 1), sorted.end());
    return sorted[rank - 1];
  }
  uint64_t seen = 0;
  for (uint32_t i = 0; i < buckets_.size(); ++i) {
    seen += buckets_[i];
    if (seen >= rank) return std::clamp(middle_of(first_ + i), min_, max_);
  }
  return max_;
}

}  // namespace sonde::host
