// Where an exception out of an instruction goes on, for the checker's flow.
#pragma once

#include "host/tables/exception_tables.h"

namespace sonde::host::check {

class LandingPads {
 public:
  // What cannot be read gives no landing pads: their code then counts as not reached.
  explicit LandingPads(const Image& image) : ranges_(read_exception_tables(image).ranges) {}

  // Where an exception out of the instruction at pc goes on in its function; 0: nowhere.
  uint64_t pad_of(uint64_t pc) const;

 private:
  std::vector<ThrowingRange> ranges_;
};

}  // namespace sonde::host::check
