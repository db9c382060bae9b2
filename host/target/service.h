// Carries out what threads of the target ask for while they wait: libraries changed, so plan and arm the new ones. Stops
// the process for just that long, without being its tracer before or after.
#pragma once

#include "host/target/target.h"

namespace sonde::host {

class Service {
 public:
  Service(Target& target, SessionHeader* session, Selector select)
      : target_(target), session_(session), select_(std::move(select)) {}

  // Looks for a request and carries it out. True if there was one. An error leaves the new images unprobed and the
  // waiting thread released; the target goes on.
  Result<bool> poll();

  // The longest time for which threads were stopped, in nanoseconds.
  int64_t longest_pause_ns() const { return longest_pause_ns_; }

 private:
  Target& target_;
  SessionHeader* session_;
  Selector select_;
  int64_t longest_pause_ns_ = 0;
};

}  // namespace sonde::host
