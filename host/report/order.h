// Records in order of entry. A trace holds calls in order of their ends, so a parent stands behind its children; every
// view wants it before them. Sorting everything would need the whole trace in memory. Instead the records of each thread
// are cut into windows: in window k every record that was entered after all earlier windows had ended can be sorted
// within the window; the others (calls that run across a window's border, at most the stack's depth per border) are
// "straddlers", collected by a first pass over the trace and merged in by the second.
//
//   ends:     ---a-b---|--c-d--P-|      P was entered before a: a straddler, kept by survey()
//   entries:  P a b    | c d     |      what replay() gives
//
// Memory: the windows (kTotal records over all threads) and the straddlers.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/event/record.h"
#include "core/walk/frame.h"
#include "host/report/recording.h"

namespace sonde::host {

// One record of type call, entry or stack, decoded.
struct Event {
  uint64_t entry = 0, exit = 0;  // ticks; exit == entry for types entry and stack
  uint32_t site = 0, slot = 0;  // site: Recording::function_of the record's
  RecordType type = RecordType::none;
  ExitKind kind = ExitKind::returned;
  bool overflow = false;  // stack: cut
  std::span<const uint64_t> frames;  // stack: packed frames; valid during the callback
};

// What the first pass counts, whatever the view.
struct Survey {
  struct Site {
    uint64_t calls = 0, entries = 0;  // call records, entry-only records
  };
  std::vector<Site> sites;  // as the records name them
  std::vector<uint64_t> thread_records;  // per thread
  std::array<uint64_t, 5> kinds{};  // calls by ExitKind
  uint64_t calls = 0, entries = 0, stacks = 0;
  uint64_t unreliable_stacks = 0;
  std::array<uint64_t, kReasons> unreliable_by{};  // by the reason of their first unreliable frame
  uint64_t bad_records = 0;  // contradict themselves; left out
  uint64_t first_ticks = ~0ull, last_ticks = 0;
};

class EntryOrder {
 public:
  using EventSink = std::function<void(uint32_t thread, const Event&)>;
  using Accept = std::function<bool(uint32_t thread, uint32_t site)>;

  // accept: which threads and sites the view wants; the survey counts all. window: records per thread and window.
  EntryOrder(const Recording& recording, Accept accept, bool with_stacks, uint32_t window = 65536);
  ~EntryOrder();

  // First pass. To be called once, before replay.
  Result<Survey> survey();
  // Second pass: the accepted events; each thread's in order of entry, outer before inner. only: those threads.
  Result<void> replay(const EventSink& sink, const std::vector<bool>* only = nullptr);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Does the stack in this record count as reliable: every frame good, the last one a recognised end.
bool stack_reliable(std::span<const uint64_t> frames, bool overflow, Reason* first_bad);

}  // namespace sonde::host
