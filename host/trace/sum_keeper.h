// The recorder's part of a recording with --sum: takes the threads' trees out of the rings' areas, which would hold
// records otherwise, and completes them with the calls in flight.
#pragma once

#include <vector>

#include "host/target/target.h"
#include "host/trace/file.h"
#include "host/trace/session.h"
#include "host/trace/sum_tree.h"

namespace sonde::host {

class SumKeeper {
 public:
  explicit SumKeeper(const Session& session) : session_(session) {}

  // The tree in the ring's area is the thread's, as it stands now.
  void take(uint32_t ring, uint32_t thread);
  // The ring will be another thread's.
  void clear(uint32_t ring);
  // A call of the thread that will hardly end any more, looked at `now`. origin: the thread in whose tree it is known, if
  // that is not this one's (its process was forked off since).
  void end_later(uint32_t thread, uint32_t origin, const InFlight& call, uint64_t now);
  // The trees do not change any more: those calls are ended, as far as they did not end by themselves.
  void finish();
  // Writes the trees that changed since they were last written. last: they will not change any more.
  void write(TraceWriter& writer, bool last);
  void account(uint32_t thread, TraceThread& info) const;

  bool has(uint32_t thread) const { return thread < kept_.size() && !kept_[thread].tree.empty(); }
  uint64_t calls() const;

 private:
  struct Kept {
    SumTree tree;
    uint64_t still_running = 0;  // of those in flight, known as such
    bool changed = false;
  };
  struct Ending {
    uint32_t thread, origin;
    InFlight call;
    uint64_t now;
  };
  Kept& at(uint32_t thread);
  void end(const Ending& ending);

  const Session& session_;
  std::vector<Kept> kept_;  // by thread
  std::vector<Ending> endings_;
};

}  // namespace sonde::host
