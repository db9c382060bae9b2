// Drains the rings of a session into a trace file and keeps the account. The target is not trusted: indices are copied,
// then checked, and every record is measured before it is taken; a ring that makes no sense is closed and reported.
#pragma once

#include <string>
#include <vector>

#include "host/trace/file.h"
#include "host/trace/session.h"

namespace sonde::host {

class Recorder {
 public:
  Recorder(Session& session, TraceWriter& writer)
      : session_(session), writer_(writer), rings_(session.layout().ring_count) {}

  // Takes what is there. True if there was anything.
  bool poll();

  // A record for a thread of the target that the agent did not write itself (calls in flight at the end).
  void append(uint32_t pid, uint32_t tid, std::span<const uint64_t> record);

  // Takes the rest and fills the account: threads, losses, notes.
  void finish(TraceMeta& meta);

  uint64_t events() const { return events_; }

 private:
  struct RingView {
    uint32_t thread = 0;  // index into threads_, valid if seen
    bool seen = false, closed = false;
    uint64_t taken_ticks = 0, head = 0;
  };
  struct Thread {
    TraceThread info;
    std::vector<uint64_t> pending;  // words not written yet
  };
  void look_at(uint32_t ring);
  bool drain(uint32_t ring);
  void take(Thread& thread, std::span<const uint64_t> words);
  bool take_records(uint32_t ring, uint64_t begin, uint64_t end);
  void close_ring(uint32_t ring, const std::string& why);
  void flush(uint32_t thread);
  void keep_account(uint32_t ring);
  void recycle_ended();
  uint32_t new_thread(uint32_t pid, uint32_t tid);

  Session& session_;
  TraceWriter& writer_;
  std::vector<RingView> rings_;
  std::vector<Thread> threads_;
  std::vector<std::string> notes_;
  uint64_t events_ = 0;
  int64_t last_flush_ns_ = 0;
};

}  // namespace sonde::host
