// Chunks are written whole or not at all. Room for the end is reserved ahead of the records, so that a full disk still
// leaves a file that says what it lacks.
#include <fcntl.h>
#include <fmt/format.h>
#include <libdeflate.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zstd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <nlohmann/json.hpp>
#include <utility>

#include "host/trace/file.h"
#include "host/trace/file_format.h"

namespace sonde::host {

using nlohmann::json;

namespace {

constexpr int kLevel = 1;
constexpr size_t kItemsPerChunk = 20000;
constexpr uint64_t kReserveStep = 1 << 20, kRoomForEnd = 256 << 10;
constexpr auto kSlowWrite = std::chrono::milliseconds(1);
constexpr unsigned kCompressAfterSlowWrite = 64;

json to_json(const ClockSample& c) {
  return {{"ticks", c.ticks}, {"monotonic_ns", c.monotonic_ns}, {"wall_ns", c.wall_ns}};
}

// Whether the thread slept between two moments: a write that did waited for the disk.
class Sleeps {
 public:
  Sleeps() : count_(voluntary()), since_(std::chrono::steady_clock::now()) {}
  bool long_ones() const { return voluntary() != count_ && std::chrono::steady_clock::now() - since_ > kSlowWrite; }

 private:
  static long voluntary() {
    struct rusage usage;
    return getrusage(RUSAGE_THREAD, &usage) == 0 ? usage.ru_nvcsw : 0;
  }
  long count_;
  std::chrono::steady_clock::time_point since_;
};

json to_json(std::span<const TraceThread> threads) {
  json list = json::array();
  for (const TraceThread& t : threads) {
    list.push_back({{"pid", t.pid},
                    {"tid", t.tid},
                    {"name", t.name},
                    {"calls", t.calls},
                    {"records", t.records},
                    {"waits", t.waits},
                    {"waited_ticks", t.waited_ticks},
                    {"lost_calls", t.lost_calls},
                    {"lost", t.lost}});
    if (t.signal_stack.size()) list.back()["signal_stack"] = {t.signal_stack.begin.value, t.signal_stack.end.value};
  }
  return list;
}

// File names and symbols are bytes, JSON is UTF-8: what does not fit is replaced.
std::string dump(const json& value) { return value.dump(-1, ' ', false, json::error_handler_t::replace); }

// Only a plain file is emptied, and none that another recording holds; pipes and devices are written to as they are.
Result<void> take_over(int fd, const std::string& path, bool* regular) {
  struct stat st;
  if (fstat(fd, &st) != 0) return fail_errno(fmt::format("write the trace to {}", path));
  *regular = S_ISREG(st.st_mode);
  if (S_ISBLK(st.st_mode)) return fail(fmt::format("{} is a disk: choose a file with -o", path));
  if (isatty(fd)) return fail(fmt::format("{} is a terminal, a trace is no text: choose a file with -o", path));
  if (!*regular) return {};
  // A file system without locks goes without.
  if (flock(fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK)
    return fail(fmt::format("another recording is being written to {}: choose another file with -o", path));
  if (ftruncate(fd, 0) != 0) return fail_errno(fmt::format("write the trace to {}", path));
  return {};
}

}  // namespace

TraceWriter::TraceWriter(int fd, uint64_t max_bytes) : fd_(fd), max_bytes_(max_bytes), zstd_(ZSTD_createCCtx()) {}

TraceWriter::TraceWriter(TraceWriter&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)),
      max_bytes_(other.max_bytes_),
      bytes_(other.bytes_),
      unwritten_(other.unwritten_),
      reserved_(other.reserved_),
      regular_(other.regular_),
      failure_(std::move(other.failure_)),
      zstd_(std::exchange(other.zstd_, nullptr)) {}

TraceWriter::~TraceWriter() {
  if (fd_ >= 0) close(fd_);
  ZSTD_freeCCtx(zstd_);
}

Result<TraceWriter> TraceWriter::create(const std::string& path, uint64_t max_bytes) {
  int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_NOCTTY | O_CLOEXEC, 0644);
  if (fd < 0 && errno == EISDIR) return fail(fmt::format("{} is a folder: choose a file with -o", path));
  if (fd < 0) {
    int error = errno;
    std::string folder = path.substr(0, path.rfind('/') + 1);
    if (error == ENOENT && !folder.empty() && access(folder.c_str(), F_OK) != 0)
      return fail(
          fmt::format("write the trace to {0}: there is no folder {1}; make it first: mkdir -p {1}", path, folder));
    return fail(fmt::format("write the trace to {}: {}", path, std::strerror(error)));
  }
  TraceWriter writer(fd, max_bytes);
  SONDE_TRY_VOID(take_over(fd, path, &writer.regular_));
  FileHeader header{};
  std::memcpy(header.magic, kTraceMagic, sizeof kTraceMagic);
  header.version = kTraceVersion;
  if (!writer.write_all({reinterpret_cast<uint8_t*>(&header), sizeof header}))
    return fail(fmt::format("write the trace to {}: {}", path, writer.failure_));
  return writer;
}

bool TraceWriter::write_all(std::span<const uint8_t> bytes) {
  for (size_t done = 0; done < bytes.size();) {
    ssize_t n = write(fd_, bytes.data() + done, bytes.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) {
      failure_ = std::strerror(n < 0 ? errno : EIO);
      // Half a chunk would hide an end chunk that still fits.
      if (ftruncate(fd_, static_cast<off_t>(bytes_)) == 0) lseek(fd_, static_cast<off_t>(bytes_), SEEK_SET);
      return false;
    }
    done += static_cast<size_t>(n);
  }
  bytes_ += bytes.size();
  return true;
}

// Keeps blocks reserved beyond the end of the file. A file system that cannot do so, or a pipe, goes without.
void TraceWriter::reserve_room() {
  while (bytes_ + kRoomForEnd + encoded_.capacity() > reserved_) {
    if (fallocate(fd_, FALLOC_FL_KEEP_SIZE, static_cast<off_t>(reserved_), kReserveStep) == 0) {
      reserved_ += kReserveStep;
    } else if (errno == ENOSPC || errno == EDQUOT || errno == EFBIG) {
      failure_ = std::strerror(errno);
      return;
    } else if (errno != EINTR) {
      reserved_ = ~uint64_t{0};
    }
  }
}

// What compression does not make smaller is written as it is.
void TraceWriter::write_chunk(uint32_t kind, std::span<const uint8_t> raw, bool compress) {
  packed_.resize(sizeof(ChunkHeader) + ZSTD_compressBound(raw.size()));
  uint8_t* contents = packed_.data() + sizeof(ChunkHeader);
  size_t size = raw.size();
  if (compress) {
    size = ZSTD_compressCCtx(zstd_, contents, packed_.size() - sizeof(ChunkHeader), raw.data(), raw.size(), kLevel);
    if (ZSTD_isError(size)) {
      failure_ = ZSTD_getErrorName(size);
      return;
    }
  }
  if (size >= raw.size()) {
    size = raw.size();
    if (size) std::memcpy(contents, raw.data(), size);
  }
  uint32_t crc = libdeflate_crc32(0, contents, size);
  ChunkHeader header{kChunkMagic, kind, static_cast<uint32_t>(size), static_cast<uint32_t>(raw.size()), crc, 0};
  header.header_crc = libdeflate_crc32(0, &header, offsetof(ChunkHeader, header_crc));
  std::memcpy(packed_.data(), &header, sizeof header);
  write_all({packed_.data(), sizeof header + size});
}

void TraceWriter::write_json(uint32_t kind, const std::string& text) {
  if (kind != kChunkEnd && !failure_.empty()) return;
  write_chunk(kind, {reinterpret_cast<const uint8_t*>(text.data()), text.size()}, true);
}

void TraceWriter::start(const TraceMeta& meta) {
  write_json(kChunkMeta, dump({{"start", to_json(meta.start)},
                               {"command", meta.command},
                               {"pid", meta.pid},
                               {"stacks", meta.stacks},
                               {"policy", meta.policy},
                               {"trap_cost_ns", meta.trap_cost_ns}}));
}

void TraceWriter::images(std::span<const TraceImage> added) {
  json list = json::array();
  for (const TraceImage& i : added)
    list.push_back({{"path", i.path},
                    {"build_id", i.build_id},
                    {"begin", i.begin},
                    {"end", i.end},
                    {"bias", i.bias},
                    {"from", i.from_ticks}});
  if (!list.empty()) write_json(kChunkMeta, dump({{"images", list}}));
}

void TraceWriter::sites(std::span<const TraceSite> added) {
  for (size_t at = 0; at < added.size(); at += kItemsPerChunk) {
    json list = json::array();
    for (const TraceSite& s : added.subspan(at, std::min(kItemsPerChunk, added.size() - at)))
      list.push_back({s.image, s.address, s.name, s.method, s.refusal, s.no_hijack, s.internal, s.point});
    write_json(kChunkMeta, dump({{"sites", list}}));
  }
}

void TraceWriter::thread(uint32_t index, const TraceThread& t) {
  write_json(kChunkMeta, dump({{"thread", {{"index", index}, {"pid", t.pid}, {"tid", t.tid}, {"name", t.name}}}}));
}

void TraceWriter::records(uint32_t thread, RecordEncoder& encoder) {
  uint32_t count = encoder.records();
  if (count == 0) return;
  encoded_.assign({static_cast<uint8_t>(thread), static_cast<uint8_t>(thread >> 8), static_cast<uint8_t>(thread >> 16),
                   static_cast<uint8_t>(thread >> 24)});
  encoder.finish(encoded_);
  if (failure_.empty() && max_bytes_ && bytes_ >= max_bytes_) failure_ = "the size given with --max-size is reached";
  if (failure_.empty()) {
    Sleeps sleeps;
    reserve_room();
    if (failure_.empty()) write_chunk(kChunkRecords, encoded_, !hurry_ || slow_writes_ > 0);
    if (sleeps.long_ones()) slow_writes_ = kCompressAfterSlowWrite;
    else if (slow_writes_) slow_writes_--;
  }
  if (!failure_.empty()) unwritten_ += count;
}

void TraceWriter::sums(uint32_t thread, const SumTree& tree, bool last) {
  if (failure_.empty() && max_bytes_ && bytes_ >= max_bytes_) failure_ = "the size given with --max-size is reached";
  if (failure_.empty()) {
    std::vector<uint8_t> raw(sizeof thread);
    std::memcpy(raw.data(), &thread, sizeof thread);
    encode_sum_tree(tree, raw);
    reserve_room();
    if (failure_.empty()) write_chunk(kChunkSums, raw, true);
  }
  uint64_t& written = summed_calls_[thread];
  if (failure_.empty()) written = tree.calls();
  else if (last && tree.calls() > written) unwritten_ += tree.calls() - written;
}

void TraceWriter::account(const ClockSample& now, std::span<const TraceThread> threads) {
  write_json(kChunkMeta, dump({{"account", to_json(now)}, {"threads", to_json(threads)}}));
}

void TraceWriter::end(const TraceMeta& meta) {
  json lost = json::array(), gone = json::array();
  for (const auto& [site, counts] : meta.site_lost) lost.push_back({site, counts});
  for (const TraceImage& i : meta.images) gone.push_back(i.to_ticks);
  write_json(kChunkEnd, dump({{"end", to_json(meta.end)},
                              {"wait_status", meta.wait_status},
                              {"longest_pause_ns", meta.longest_pause_ns},
                              {"threads", to_json(meta.threads)},
                              {"site_lost", lost},
                              {"image_to", gone},
                              {"lost_no_thread_state", meta.lost_no_thread_state},
                              {"lost_no_ring", meta.lost_no_ring},
                              {"ring_waits", meta.ring_waits},
                              {"ring_waited_ticks", meta.ring_waited_ticks},
                              {"unwritten_records", unwritten_},
                              {"failure", failure_},
                              {"notes", meta.notes}}));
  if (reserved_ && bytes_) (void)!ftruncate(fd_, static_cast<off_t>(bytes_));  // what was reserved and not needed
}

}  // namespace sonde::host
