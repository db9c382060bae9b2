// Where detours may lie: the target's addresses, less what is occupied and what must stay free for the heap and the
// stack to grow into.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "host/plan/code_view.h"
#include "host/plan/interval_set.h"

namespace sonde::host {

class AddressSpace {
 public:
  AddressSpace(const CodeView& view, std::span<const AddrRange> used);

  bool is_free(uint64_t begin, uint64_t end) const { return !taken_.overlaps(begin, end); }
  void take(uint64_t begin, uint64_t end) { taken_.add(begin, end); }
  // Lowest start in [from, to) of `size` free bytes.
  std::optional<uint64_t> first_fit(uint64_t from, uint64_t to, uint64_t size) const {
    return taken_.first_gap(from, to, size);
  }
  // Page-aligned start of `size` free bytes within [from, to), below `near` if possible, as close to it as possible.
  std::optional<uint64_t> closest(uint64_t near, uint64_t from, uint64_t to, uint64_t size) const;

 private:
  IntervalSet taken_;
};

}  // namespace sonde::host
