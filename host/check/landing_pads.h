// Where exceptions come back to: for each call that may throw, its landing pad. From the language-specific data areas
// that .eh_frame names, in the form that GCC's and LLVM's C++ use (Itanium C++ ABI: Exception Handling, level II, the
// call-site table).
#pragma once

#include <vector>

#include "host/image/image.h"

namespace sonde::host::check {

class LandingPads {
 public:
  explicit LandingPads(const Image& image);

  // Where an exception out of the instruction at pc goes on in its function; 0: nowhere.
  uint64_t pad_of(uint64_t pc) const;

  struct Site {
    uint64_t begin, end, pad;
  };
  std::span<const Site> sites() const { return sites_; }

 private:
  void read_area(const Image& image, ImageAddr area, ImageRange function);

  std::vector<Site> sites_;  // sorted by begin
};

}  // namespace sonde::host::check
