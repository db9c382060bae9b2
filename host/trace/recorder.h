// Drains the rings of a session into a trace file and keeps the account. The target is not trusted: indices are copied,
// then checked, and every record is measured before it is taken; a ring that makes no sense is closed, reported and
// from then on only emptied, so that its thread never waits for room.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "host/trace/file.h"
#include "host/trace/session.h"
#include "host/trace/sum_keeper.h"

namespace sonde::host {

// Lets the calling thread, which is to drain, have a processor soon after it wakes, as far as that is permitted: threads
// that wait for room use theirs up without doing anything. What it starts does not inherit that.
void drain_first();

class Recorder {
 public:
  Recorder(Session& session, TraceWriter& writer);

  // Takes what is there. True if there was anything.
  bool poll();

  // How long to do something else before the next poll: short enough that no ring gets full meanwhile if its thread goes
  // on as before, long enough that the threads have the processors for themselves.
  int64_t pause_ns() const { return pause_ns_; }

  // A record for a thread of the target that the agent did not write itself (calls in flight at the end). It stands
  // behind what was taken from the thread's ring so far, so: after the last poll.
  void append(uint32_t pid, uint32_t tid, std::span<const uint64_t> record);

  // The alternate signal stack of a thread that append() was called for; empty: nothing is known.
  void set_signal_stack(uint32_t pid, uint32_t tid, AddrRange stack);

  // As append(), with --sum: a call that is in flight in a process of the target.
  void end_summed(uint32_t pid, const InFlight& call, uint64_t now);

  // Takes the rest and fills the account: threads, losses, notes.
  void finish(TraceMeta& meta);

  // Taken so far: calls (also those whose return is not hooked) and stacks.
  uint64_t calls() const { return calls_; }
  uint64_t stacks() const { return stacks_; }

 private:
  struct RingView {
    uint32_t thread = 0;  // index into threads_, valid if seen
    bool seen = false, closed = false;
    bool thread_known = false;  // /proc shows the thread that took it: when it goes, the ring is free
    bool process_known = false;  // the same of its process
    uint64_t taken_ticks = 0, head = 0;
    TraceThread counted;  // what of the thread's account is from this ring
  };
  struct Thread {
    TraceThread info;
    std::unique_ptr<RecordEncoder> pending;  // records not written yet; null: none
  };
  uint32_t rings_taken() const;
  bool look_at(uint32_t ring);
  uint32_t thread_of(uint32_t pid, uint32_t tid);
  uint64_t drain(uint32_t ring, bool to_end = false);
  RecordEncoder::Taken take(uint32_t thread, const uint64_t* words, uint64_t count);
  void close_ring(uint32_t ring, const std::string& why);
  void flush(uint32_t thread);
  void flush_all(int64_t now);
  void choose_pause(int64_t now, uint64_t fullest);
  void choose_hurry(int64_t now);
  void keep_account(uint32_t ring);
  void take_sums(int64_t now);
  int find_thread(uint32_t pid, uint32_t tid) const;
  void note_unfinished_record(uint32_t ring);
  enum class Look { now_and_then, wanted, close };
  uint32_t recycle_ended(Look look);
  bool is_over(const RingView& view, Look look);
  void free_wanted(uint32_t wanted);
  bool in_session(uint32_t pid);
  bool outlives(uint32_t pid);
  void note(std::string sentence);
  uint32_t new_thread(uint32_t pid, uint32_t tid);
  void count_site_losses(TraceMeta& meta);

  Session& session_;
  TraceWriter& writer_;
  std::vector<RingView> rings_;
  std::vector<Thread> threads_;
  std::vector<std::string> notes_;
  bool summing_;  // --sum: no records, trees
  SumKeeper sums_;
  int64_t sums_every_ns_;
  std::map<uint32_t, bool> processes_;  // those that were asked whether they map the session
  uint64_t calls_ = 0, stacks_ = 0, calls_at_account_ = 0;
  uint32_t rings_freed_ = 0;
  uint32_t looked_ = 0;  // the last of the target's requests for a ring that was answered
  int64_t last_poll_ns_, last_flush_ns_, last_account_ns_, last_look_ns_ = 0;
  int64_t pause_ns_ = 0;
};

}  // namespace sonde::host
