// The trace file: a header, then chunks that each stand for themselves (docs/formats.md). A file cut at any byte is read
// up to its last whole chunk, one damaged in the middle without the chunk it concerns; a chunk of records tells its
// thread, so nothing but whole chunks is needed to use it.
//
//   FileHeader | Chunk { ChunkHeader, zstd frame or plain bytes } ...
//
// Metadata chunks are JSON objects that add to what is known (images and sites may come later, with dlopen); record chunks
// hold the records of one thread (encode.h), chunks of sums its call tree (sum_tree.h). The last chunk is of kind `end`;
// without it the recorder died.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string>
#include <vector>

#include "core/base/addr.h"
#include "core/event/session.h"
#include "host/error.h"
#include "host/trace/clock.h"
#include "host/trace/encode.h"
#include "host/trace/sum_tree.h"

namespace sonde::host {

struct TraceImage {
  std::string path, build_id;
  uint64_t begin = 0, end = 0, bias = 0;
  uint64_t from_ticks = 0, to_ticks = ~0ull;  // when it was mapped
};

struct TraceSite {
  uint32_t image = 0;  // index into images
  uint64_t address = 0;  // of the function's entry, or the point, in the target
  std::string name;  // raw; of a point with "+0x12"; "" where the file names it nowhere
  std::string method;  // how it was patched; "" if refused
  std::string refusal;  // why it was not
  std::string no_hijack;  // why its returns are not hooked
  bool internal = false;  // the engine's own
  bool point = false;  // an instruction, not a function: its hits are no calls
};

struct TraceThread {
  uint32_t pid = 0, tid = 0;
  std::string name;
  uint64_t calls = 0;  // hooked entries
  uint64_t records = 0;  // call records among what was written
  uint64_t waits = 0, waited_ticks = 0, lost_calls = 0;
  std::array<uint64_t, kLossCauses> lost{};
  AddrRange signal_stack{};  // its alternate one, where calls were in flight at the end; empty: none, or not known
  bool outlived = false;  // it ended and its process went on; not in the file
};

struct TraceMeta {
  std::vector<std::string> command;
  uint32_t pid = 0;
  bool stacks = false;
  std::string policy;
  double trap_cost_ns = 0;  // of the signal that a hit of a trap takes; 0: there are no traps
  ClockSample start, end;  // without an end chunk: when the last account was given; {} if none was
  int wait_status = -1;  // of the program; -1: unknown
  bool complete = false;  // the end chunk is there
  int64_t longest_pause_ns = 0;
  uint64_t lost_no_thread_state = 0, lost_no_ring = 0;  // of no thread's ring
  uint64_t ring_waits = 0, ring_waited_ticks = 0;  // threads that waited for a ring
  uint64_t unwritten_records = 0;  // left out of the file
  std::string failure;  // why, or why something else was; "" if the file is whole
  std::vector<TraceImage> images;
  std::vector<TraceSite> sites;
  std::vector<TraceThread> threads;
  std::map<uint32_t, std::array<uint64_t, kLossCauses>> site_lost;
  std::vector<std::string> notes;
};

class TraceWriter {
 public:
  // max_bytes 0: no limit. The file is replaced.
  static Result<TraceWriter> create(const std::string& path, uint64_t max_bytes);
  TraceWriter(TraceWriter&&) noexcept;
  TraceWriter& operator=(TraceWriter&&) = delete;
  ~TraceWriter();

  // From the first failure on (disk full, limit reached) nothing more is written but the end, for which room is kept
  // where the file system can reserve it; failure() says why, unwritten_records() how many were left out.
  void start(const TraceMeta& meta);
  void images(std::span<const TraceImage> added);
  void sites(std::span<const TraceSite> added);
  void thread(uint32_t index, const TraceThread& thread);
  // What the encoder took; it begins anew.
  void records(uint32_t thread, RecordEncoder& encoder);
  // Whether there is time to compress records (at first there is). Where writing itself is what takes the time they are
  // compressed all the same.
  void set_hurry(bool hurry) { hurry_ = hurry; }
  // The thread's calls so far, with --sum; takes the place of what was written for it before.
  // last: nothing will; if it cannot be written either, the calls that the file lacks are counted as not written.
  void sums(uint32_t thread, const SumTree& tree, bool last);
  // How the threads stand, in case there will be no end.
  void account(const ClockSample& now, std::span<const TraceThread> threads);
  void end(const TraceMeta& meta);

  const std::string& failure() const { return failure_; }
  uint64_t bytes() const { return bytes_; }
  uint64_t unwritten_records() const { return unwritten_; }
  bool regular() const { return regular_; }  // a file that can be read again, no pipe or device

 private:
  TraceWriter(int fd, uint64_t max_bytes);
  void write_chunk(uint32_t kind, std::span<const uint8_t> raw, bool compress);
  void write_json(uint32_t kind, const std::string& text);
  bool write_all(std::span<const uint8_t> bytes);
  void reserve_room();

  int fd_;
  uint64_t max_bytes_, bytes_ = 0, unwritten_ = 0, reserved_ = 0;
  bool regular_ = false;
  std::string failure_;
  bool hurry_ = false;
  unsigned slow_writes_ = 0;  // so many chunks yet are compressed because one had to wait for the disk
  std::vector<uint8_t> packed_, encoded_;
  std::map<uint32_t, uint64_t> summed_calls_;  // of each thread's tree in the file
  struct ZSTD_CCtx_s* zstd_ = nullptr;
};

class TraceReader {
 public:
  static Result<TraceReader> open(const std::string& path);
  TraceReader(TraceReader&&) noexcept;
  TraceReader& operator=(TraceReader&&) = delete;
  ~TraceReader();

  const TraceMeta& meta() const { return meta_; }
  // --sum: the last tree of each thread that has one, by thread index.
  Result<std::map<uint32_t, SumTree>> sums() const;
  // Calls visit(thread index, one record's words) in file order: each thread's records stand in the order of its ring.
  Result<void> each(const std::function<void(uint32_t, std::span<const uint64_t>)>& visit) const;

 private:
  TraceReader() = default;
  struct ChunkAt {
    uint64_t offset;
    uint32_t packed, raw;
  };
  Result<void> scan(const std::string& path);
  void add_chunk(uint64_t at, uint32_t kind, uint32_t packed, uint32_t raw);
  void say_what_is_missing(uint64_t end_of_chunks, uint64_t skipped);
  void merge(const std::string& json);
  void merge_end(const nlohmann::json& end);

  const uint8_t* data_ = nullptr;
  uint64_t size_ = 0;
  std::vector<ChunkAt> record_chunks_, sum_chunks_;
  TraceMeta meta_;
};

}  // namespace sonde::host
