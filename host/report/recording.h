// A recording as the report sees it: what was probed, which threads ran, what was lost, and a source of records that can
// be read more than once. host/report/open.h fills it from a trace file; tests fill it by hand.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/base/addr.h"
#include "core/event/record.h"
#include "core/event/session.h"
#include "host/error.h"
#include "host/trace/sum_tree.h"

namespace sonde::host {

using LossCounts = std::array<uint64_t, kLossCauses>;

struct RecordedThread {
  uint32_t pid = 0, tid = 0;
  std::string name;  // "" if unknown
  uint64_t calls = 0;  // hooked entries as the ring counted them; 0 if unknown
  uint64_t waits = 0, waited_ticks = 0;
  LossCounts lost{};
  AddrRange signal_stack{};  // its alternate one at the end; empty: none, or not known
  uint64_t in_flight_unseen = 0;  // with --sum: calls whose process was killed before they could be looked at
};

struct RecordedSite {
  std::string name;  // for people, demangled, not escaped
  std::string module;  // base name of its file
  uint64_t address = 0;  // of the function's entry, or the point, in the target
  std::string method;  // how it was patched
  std::string no_hijack;  // why its returns are not hooked; "" if they are
  LossCounts lost{};
  uint32_t function = 0;  // the first site of the same function: views know it by that number
  bool point = false;  // an instruction: its hits are no calls, take no time and call nobody
};

struct RefusedFunction {
  std::string name, module, reason;
};

struct RecordedImage {
  std::string path, build_id;  // build id in lower-case hex, "" if the file has none
  AddrRange range;
  uint64_t bias = 0;
  uint64_t from_ticks = 0, to_ticks = ~0ull;  // when it was mapped
};

// Words of one record; the span is valid during the call only.
using RecordSink = std::function<void(uint32_t thread, std::span<const uint64_t> record)>;

class RecordSource {
 public:
  virtual ~RecordSource() = default;
  // Calls sink for each record, in order of its thread's ring; threads interleave. Every call gives the same sequence.
  virtual Result<void> each(const RecordSink& sink) = 0;
};

struct Recording {
  std::string path;  // of the trace file
  std::string command;  // what was recorded
  std::string ended;  // how the program ended, in words; "" if unknown
  double ticks_per_second = 1e9;
  uint64_t start_ticks = 0, end_ticks = 0;  // 0: unknown
  double call_cost_ns = 0;  // measured cost of one probed call; 0: not measured
  double trap_cost_ns = 0;  // what it costs more by a trap; 0: not measured
  bool stacks = false;  // recorded with a stack per hit
  bool summed = false;  // recorded with --sum: no records, but a tree per thread
  std::map<uint32_t, SumTree> sums;  // by thread
  std::vector<RecordedThread> threads;
  std::vector<RecordedSite> sites;
  std::vector<RefusedFunction> refused;
  std::vector<RecordedImage> images;
  uint64_t lost_no_thread_state = 0, lost_no_ring = 0;  // of no thread's ring
  uint64_t ring_waits = 0, ring_waited_ticks = 0;  // threads that waited for a ring
  bool complete = true;  // false: the end of the recording is not in the file
  uint64_t not_written = 0;  // events that were recorded and are not in the file
  std::string not_written_why;  // "" if everything is
  std::vector<std::string> notes;  // sentences for the footer: the file was cut, the recorder died
  std::shared_ptr<RecordSource> records;

  // What a record's site number means to the views: each opening of a library makes sites of its own, of the same functions.
  uint32_t function_of(uint32_t site) const { return site < sites.size() ? sites[site].function : site; }
  double nanoseconds(uint64_t ticks) const { return static_cast<double>(ticks) * 1e9 / ticks_per_second; }
};

// Records in memory, one vector of words per thread.
class MemorySource : public RecordSource {
 public:
  explicit MemorySource(std::vector<std::vector<uint64_t>> threads) : threads_(std::move(threads)) {}
  Result<void> each(const RecordSink& sink) override;

 private:
  std::vector<std::vector<uint64_t>> threads_;
};

// Words in the order of LossCause.
const char* describe(LossCause cause);

}  // namespace sonde::host
