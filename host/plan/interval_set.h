// A set of addresses as disjoint ranges.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>

namespace sonde::host {

class IntervalSet {
 public:
  void add(uint64_t begin, uint64_t end) {
    if (begin >= end) return;
    auto it = ranges_.upper_bound(begin);
    if (it != ranges_.begin() && std::prev(it)->second >= begin) --it;
    while (it != ranges_.end() && it->first <= end) {
      begin = std::min(begin, it->first), end = std::max(end, it->second);
      it = ranges_.erase(it);
    }
    ranges_.emplace(begin, end);
  }

  bool overlaps(uint64_t begin, uint64_t end) const {
    auto it = ranges_.lower_bound(end);  // the first that begins at or behind the end
    return it != ranges_.begin() && std::prev(it)->second > begin;
  }

  // Lowest start in [from, to) of `size` addresses that are not in the set.
  std::optional<uint64_t> first_gap(uint64_t from, uint64_t to, uint64_t size) const {
    auto it = ranges_.upper_bound(from);
    if (it != ranges_.begin()) from = std::max(from, std::prev(it)->second);
    for (; from < to; ++it) {
      if (it == ranges_.end() || it->first - from >= size) return from;
      from = it->second;
    }
    return std::nullopt;
  }

  auto begin() const { return ranges_.begin(); }
  auto end() const { return ranges_.end(); }

 private:
  std::map<uint64_t, uint64_t> ranges_;  // begin -> end
};

}  // namespace sonde::host
