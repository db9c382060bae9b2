// See landing_pads.h.
#include "host/check/landing_pads.h"

#include <algorithm>

namespace sonde::host::check {

uint64_t LandingPads::pad_of(uint64_t pc) const {
  auto it = std::ranges::upper_bound(ranges_, pc, {}, &ThrowingRange::begin);
  return it != ranges_.begin() && pc < (it - 1)->end ? (it - 1)->pad : 0;
}

}  // namespace sonde::host::check
