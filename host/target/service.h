// Carries out what threads of the target ask for while they wait: libraries changed, so plan and arm
// the new ones; the process ends, so see which calls are in flight. Stops
// the process for just that long, without being its tracer before or after.
#pragma once

#include <algorithm>
#include <chrono>

#include "host/target/target.h"

namespace sonde::host {

class Service {
 public:
  using OnExit = std::function<void(pid_t pid)>;
  // on_exit: a process of the target is about to end and waits.
  Service(Target& target, SessionHeader* session, Selector select, OnExit on_exit)
      : target_(target), session_(session), select_(std::move(select)), on_exit_(std::move(on_exit)) {}

  // Looks for a request and carries it out. True if there was one. An error leaves the new images unprobed and the
  // waiting thread released; the target goes on.
  Result<bool> poll();

  // The process that Target knows is gone, its number may be another's: what its children load from now on stays unprobed,
  // as it did before.
  void program_ended() { program_ended_ = true; }

  void note_pause(std::chrono::nanoseconds pause) {
    longest_pause_ns_ = std::max<int64_t>(longest_pause_ns_, pause.count());
  }
  // The longest time for which threads were stopped, in nanoseconds.
  int64_t longest_pause_ns() const { return longest_pause_ns_; }

 private:
  Target& target_;
  SessionHeader* session_;
  Selector select_;
  OnExit on_exit_;
  int64_t longest_pause_ns_ = 0;
  bool program_ended_ = false;
};

}  // namespace sonde::host
