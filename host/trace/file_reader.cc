// Reads what whole chunks hold. Nothing in the file is believed: sizes are checked before they are used, and what does
// not fit together is left out with a note.
#include <fcntl.h>
#include <fmt/format.h>
#include <libdeflate.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zstd.h>

#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "host/trace/encode.h"
#include "host/trace/file.h"
#include "host/trace/file_format.h"
#include "host/words.h"

namespace sonde::host {

using nlohmann::json;

namespace {

constexpr size_t kMaxThreadsInFile = 1 << 20;

ClockSample clock_from(const json& j) {
  return {j.value("ticks", uint64_t{0}), j.value("monotonic_ns", int64_t{0}), j.value("wall_ns", int64_t{0})};
}

std::optional<std::vector<uint8_t>> unpack(const uint8_t* packed, uint32_t packed_size, uint32_t raw_size) {
  if (packed_size == raw_size) return std::vector<uint8_t>(packed, packed + packed_size);
  std::vector<uint8_t> raw(raw_size);
  size_t got = ZSTD_decompress(raw.data(), raw_size, packed, packed_size);
  if (ZSTD_isError(got) || got != raw_size) return std::nullopt;
  return raw;
}

using Losses = std::array<uint64_t, kLossCauses>;

TraceThread thread_from(const json& t) {
  auto stack = t.value("signal_stack", std::array<uint64_t, 2>{});
  return {t.at("pid"),
          t.at("tid"),
          t.at("name"),
          t.at("calls"),
          t.at("records"),
          t.at("waits"),
          t.at("waited_ticks"),
          t.at("lost_calls"),
          t.at("lost").get<Losses>(),
          {Addr(stack[0]), Addr(std::max(stack[0], stack[1]))}};
}

// The chunk's header, if a whole and unharmed chunk starts there.
std::optional<ChunkHeader> chunk_at(const uint8_t* data, uint64_t size, uint64_t at) {
  ChunkHeader header;
  if (size - at < sizeof header) return std::nullopt;
  std::memcpy(&header, data + at, sizeof header);
  if (header.magic != kChunkMagic || header.raw > kMaxChunkBytes) return std::nullopt;
  if (libdeflate_crc32(0, &header, offsetof(ChunkHeader, header_crc)) != header.header_crc) return std::nullopt;
  if (size - at - sizeof header < header.packed) return std::nullopt;
  if (libdeflate_crc32(0, data + at + sizeof header, header.packed) != header.crc) return std::nullopt;
  return header;
}

}  // namespace

TraceReader::TraceReader(TraceReader&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      size_(other.size_),
      record_chunks_(std::move(other.record_chunks_)),
      sum_chunks_(std::move(other.sum_chunks_)),
      meta_(std::move(other.meta_)) {}

TraceReader::~TraceReader() {
  if (data_) munmap(const_cast<uint8_t*>(data_), size_);
}

Result<TraceReader> TraceReader::open(const std::string& path) {
  int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return fail_errno(fmt::format("open the trace {}", path));
  struct stat st;
  if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode)) {
    close(fd);
    return fail(fmt::format("{} is not a file", path));
  }
  if (static_cast<uint64_t>(st.st_size) < sizeof(FileHeader)) {
    close(fd);
    return fail(fmt::format("{} is not a trace of sonde: it has only {}", path,
                            counted(static_cast<uint64_t>(st.st_size), "byte")));
  }
  TraceReader reader;
  reader.size_ = static_cast<uint64_t>(st.st_size);
  void* mapped = mmap(nullptr, reader.size_, PROT_READ, MAP_PRIVATE, fd, 0);
  close(fd);
  if (mapped == MAP_FAILED) return fail_errno("map " + path);
  reader.data_ = static_cast<const uint8_t*>(mapped);
  SONDE_TRY_VOID(reader.scan(path));
  return reader;
}

Result<void> TraceReader::scan(const std::string& path) {
  FileHeader header;
  std::memcpy(&header, data_, sizeof header);
  if (std::memcmp(header.magic, kTraceMagic, sizeof kTraceMagic) != 0)
    return fail(fmt::format("{} is not a trace of sonde", path));
  if (header.version != kTraceVersion)
    return fail(
        fmt::format("{} is a trace of version {}, this sonde reads version {}", path, header.version, kTraceVersion));
  uint64_t at = sizeof header, good = at, skipped = 0;
  while (at < size_) {
    auto chunk = chunk_at(data_, size_, at);
    if (chunk) {
      skipped += at - good;
      add_chunk(at, chunk->kind, chunk->packed, chunk->raw);
      good = at += sizeof(ChunkHeader) + chunk->packed;
      continue;
    }
    // Damaged here: the next place that looks like a chunk, if there is any.
    const void* next = memmem(data_ + at + 1, size_ - at - 1, &kChunkMagic, sizeof kChunkMagic);
    if (!next) break;
    at = static_cast<uint64_t>(static_cast<const uint8_t*>(next) - data_);
  }
  if (good == sizeof header && skipped == 0)
    return fail(
        fmt::format("{}: nothing of it can be read: its {} hold the header of a trace but no whole chunk; it was cut "
                    "or damaged, or its recorder ended before it wrote anything",
                    path, counted(size_, "byte")));
  say_what_is_missing(good, skipped);
  return {};
}

void TraceReader::add_chunk(uint64_t at, uint32_t kind, uint32_t packed, uint32_t raw) {
  if (kind == kChunkRecords) {
    record_chunks_.push_back({at, packed, raw});
  } else if (kind == kChunkSums) {
    sum_chunks_.push_back({at, packed, raw});
  } else if (auto text = unpack(data_ + at + sizeof(ChunkHeader), packed, raw)) {
    merge(std::string(text->begin(), text->end()));
    meta_.complete |= kind == kChunkEnd;
  } else {
    meta_.notes.push_back(fmt::format("the metadata chunk at offset {} cannot be unpacked", at));
  }
}

void TraceReader::say_what_is_missing(uint64_t end_of_chunks, uint64_t skipped) {
  if (skipped)
    meta_.notes.push_back(fmt::format("the file is damaged: {} in its middle {} not used", counted(skipped, "byte"),
                                      plural(skipped, "is", "are")));
  if (end_of_chunks < size_)
    meta_.notes.push_back(fmt::format("the file is damaged or cut: its last {}, behind offset {}, {} not used",
                                      counted(size_ - end_of_chunks, "byte"), end_of_chunks,
                                      plural(size_ - end_of_chunks, "is", "are")));
  if (!meta_.complete)
    meta_.notes.push_back(
        "the end of the recording is missing: the recorder was killed, is still running, or the file was cut");
}

// Adds what one metadata chunk says. Written by us, but perhaps not what we read: what does not fit is left out.
void TraceReader::merge(const std::string& text) {
  json j = json::parse(text, nullptr, false);
  if (!j.is_object()) return;
  try {
    if (j.contains("start")) {
      meta_.start = clock_from(j.at("start"));
      meta_.command = j.at("command").get<std::vector<std::string>>();
      meta_.pid = j.at("pid");
      meta_.stacks = j.at("stacks");
      meta_.policy = j.at("policy");
      meta_.trap_cost_ns = j.value("trap_cost_ns", 0.0);
    }
    for (const json& i : j.value("images", json::array()))
      meta_.images.push_back({i.at("path"), i.at("build_id"), i.at("begin"), i.at("end"), i.at("bias"), i.at("from")});
    for (const json& s : j.value("sites", json::array()))
      meta_.sites.push_back({s.at(0), s.at(1), s.at(2), s.at(3), s.at(4), s.at(5), s.at(6), s.at(7)});
    if (j.contains("thread")) {
      const json& t = j.at("thread");
      size_t index = t.at("index");
      if (index < kMaxThreadsInFile && meta_.threads.size() <= index) meta_.threads.resize(index + 1);
      TraceThread& thread = meta_.threads.at(index);
      thread.pid = t.at("pid"), thread.tid = t.at("tid"), thread.name = t.at("name");
    }
    if (j.contains("threads")) {
      std::vector<TraceThread> threads;
      for (const json& t : j.at("threads")) threads.push_back(thread_from(t));
      meta_.threads = std::move(threads);
    }
    if (j.contains("account")) meta_.end = clock_from(j.at("account"));
    if (j.contains("end")) merge_end(j);
  } catch (const json::exception& error) {
    meta_.notes.push_back(fmt::format("a metadata chunk could not be understood: {}", error.what()));
  } catch (const std::out_of_range&) {
    meta_.notes.push_back("a metadata chunk names a thread out of range");
  }
}

void TraceReader::merge_end(const nlohmann::json& j) {
  meta_.end = clock_from(j.at("end"));
  meta_.wait_status = j.at("wait_status");
  meta_.longest_pause_ns = j.at("longest_pause_ns");
  meta_.lost_no_thread_state = j.at("lost_no_thread_state");
  meta_.lost_no_ring = j.at("lost_no_ring");
  meta_.ring_waits = j.at("ring_waits");
  meta_.ring_waited_ticks = j.at("ring_waited_ticks");
  meta_.unwritten_records = j.at("unwritten_records");
  auto notes = j.at("notes").get<std::vector<std::string>>();
  meta_.notes.insert(meta_.notes.end(), notes.begin(), notes.end());
  meta_.failure = j.at("failure");
  for (const json& s : j.at("site_lost")) meta_.site_lost[s.at(0)] = s.at(1).get<Losses>();
  const json& to = j.at("image_to");
  for (size_t i = 0; i < to.size() && i < meta_.images.size(); i++) meta_.images[i].to_ticks = to.at(i);
}

Result<std::map<uint32_t, SumTree>> TraceReader::sums() const {
  std::map<uint32_t, SumTree> trees;
  for (auto chunk = sum_chunks_.rbegin(); chunk != sum_chunks_.rend(); ++chunk) {
    auto raw = unpack(data_ + chunk->offset + sizeof(ChunkHeader), chunk->packed, chunk->raw);
    uint32_t thread = 0;
    if (raw && raw->size() >= sizeof thread) std::memcpy(&thread, raw->data(), sizeof thread);
    else return fail(fmt::format("the chunk of sums at offset {} cannot be unpacked", chunk->offset));
    if (trees.contains(thread)) continue;
    auto tree = decode_sum_tree(std::span(*raw).subspan(sizeof thread));
    if (!tree) return fail(fmt::format("the chunk of sums at offset {} is damaged", chunk->offset));
    trees.emplace(thread, std::move(*tree));
  }
  return trees;
}

Result<void> TraceReader::each(const std::function<void(uint32_t, std::span<const uint64_t>)>& visit) const {
  for (const ChunkAt& chunk : record_chunks_) {
    auto raw = unpack(data_ + chunk.offset + sizeof(ChunkHeader), chunk.packed, chunk.raw);
    if (!raw || raw->size() < sizeof(uint32_t))
      return fail(fmt::format("the chunk of records at offset {} cannot be unpacked", chunk.offset));
    uint32_t thread;
    std::memcpy(&thread, raw->data(), sizeof thread);
    auto records = decode_records(std::span(*raw).subspan(sizeof thread));
    if (!records) return fail(fmt::format("the chunk of records at offset {} is damaged", chunk.offset));
    auto words = std::span<const uint64_t>(*records);
    for (size_t at = 0, n; at < words.size(); at += n) {
      n = record_words(words[at]);
      visit(thread, words.subspan(at, n));
    }
  }
  return {};
}

}  // namespace sonde::host
