// What elfutils' libdw and GNU libunwind say of the stack that a stepped program stands in. Both read its memory and registers
// through Tracee and find images and tables themselves; neither knows of sonde.
#pragma once

#include <memory>

#include "tests/step/tracee.h"
#include "tests/step/walks.h"

namespace sonde::stepping {

class Libdw {
 public:
  explicit Libdw(Tracee& tracee);
  ~Libdw();
  Chain chain(size_t limit);

 private:
  struct State;
  Tracee& tracee_;
  std::unique_ptr<State> state_;
};

class Libunwind {
 public:
  explicit Libunwind(Tracee& tracee);
  ~Libunwind();
  // With the stack pointer of each frame.
  Chain chain(size_t limit);

 private:
  struct State;
  Tracee& tracee_;
  std::unique_ptr<State> state_;
};

}  // namespace sonde::stepping
