#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>
#include <zstd.h>

#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "host/trace/encode.h"
#include "host/trace/file.h"
#include "host/trace/file_format.h"

namespace sonde::host {

using nlohmann::json;

namespace {

ClockSample clock_from(const json& j) {
  return {j.value("ticks", uint64_t{0}), j.value("monotonic_ns", int64_t{0}), j.value("wall_ns", int64_t{0})};
}

template <class Word>
std::optional<std::vector<Word>> unpack(const uint8_t* packed, uint32_t packed_size, uint32_t raw_size) {
  if (raw_size % sizeof(Word) != 0) return std::nullopt;
  std::vector<Word> raw(raw_size / sizeof(Word));
  size_t got = ZSTD_decompress(raw.data(), raw_size, packed, packed_size);
  if (ZSTD_isError(got) || got != raw_size) return std::nullopt;
  return raw;
}

// The chunk's header, if a whole and unharmed chunk starts there.
std::optional<ChunkHeader> chunk_at(const uint8_t* data, uint64_t size, uint64_t at) {
  ChunkHeader header;
  if (size - at < sizeof header) return std::nullopt;
  std::memcpy(&header, data + at, sizeof header);
  if (header.magic != kChunkMagic || header.raw > kMaxChunkBytes) return std::nullopt;
  if (crc32_z(0, reinterpret_cast<uint8_t*>(&header), offsetof(ChunkHeader, header_crc)) != header.header_crc)
    return std::nullopt;
  if (size - at - sizeof header < header.packed) return std::nullopt;
  if (crc32_z(0, data + at + sizeof header, header.packed) != header.crc) return std::nullopt;
  return header;
}

}  // namespace

TraceReader::TraceReader(TraceReader&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      size_(other.size_),
      record_chunks_(std::move(other.record_chunks_)),
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
    return fail(fmt::format("{} is not a trace of sonde: it has only {} bytes", path, st.st_size));
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
  uint64_t at = sizeof header;
  while (at < size_) {
    auto chunk = chunk_at(data_, size_, at);
    if (!chunk) break;
    const uint8_t* packed = data_ + at + sizeof(ChunkHeader);
    if (chunk->kind == kChunkRecords) {
      record_chunks_.push_back({at, chunk->packed, chunk->raw});
    } else if (auto text = unpack<char>(packed, chunk->packed, chunk->raw)) {
      merge(std::string(text->begin(), text->end()));
      meta_.complete |= chunk->kind == kChunkEnd;
    }
    at += sizeof(ChunkHeader) + chunk->packed;
  }
  if (at < size_)
    meta_.notes.push_back(
        fmt::format("the file is damaged or cut: {} bytes behind offset {} are not used", size_ - at, at));
  if (!meta_.complete)
    meta_.notes.push_back(
        "the end of the recording is missing: the recorder was killed, is still running, or the file was cut");
  return {};
}

// Adds what one metadata chunk says. Written by us, but perhaps not what we read: what does not fit is left out.
void TraceReader::merge(const std::string& text) {
  json j = json::parse(text, nullptr, false);
  if (!j.is_object()) return;
  try {
    if (j.contains("start")) {
      meta_.start = clock_from(j["start"]);
      meta_.command = j["command"].get<std::vector<std::string>>();
      meta_.pid = j["pid"];
      meta_.stacks = j["stacks"];
      meta_.policy = j["policy"];
    }
    for (const json& i : j.value("images", json::array())) {
      TraceImage image{i["path"], i["build_id"], i["begin"], i["end"], i["bias"], i["from"]};
      meta_.images.push_back(std::move(image));
    }
    for (const json& s : j.value("sites", json::array()))
      meta_.sites.push_back({s.at(0), s.at(1), s.at(2), s.at(3), s.at(4), s.at(5), s.at(6)});
    if (j.contains("thread")) {
      const json& t = j["thread"];
      size_t index = t["index"];
      if (index < 1 << 20 && meta_.threads.size() <= index) meta_.threads.resize(index + 1);
      TraceThread& thread = meta_.threads.at(index);
      thread.pid = t["pid"], thread.tid = t["tid"], thread.name = t["name"];
    }
    if (!j.contains("end")) return;
    meta_.end = clock_from(j["end"]);
    meta_.wait_status = j["wait_status"];
    meta_.longest_pause_ns = j["longest_pause_ns"];
    meta_.lost_no_thread_state = j["lost_no_thread_state"];
    meta_.unwritten_bytes = j["unwritten_bytes"];
    meta_.notes = j["notes"].get<std::vector<std::string>>();
    if (std::string failure = j["failure"]; !failure.empty())
      meta_.notes.push_back(
          fmt::format("{} bytes of records could not be written: {}", meta_.unwritten_bytes, failure));
    std::vector<TraceThread> threads;
    for (const json& t : j["threads"])
      threads.push_back({t["pid"], t["tid"], t["name"], t["calls"], t["records"], t["waits"], t["waited_ticks"],
                         t["lost_calls"], t["lost"].get<std::array<uint64_t, kLossCauses>>()});
    meta_.threads = std::move(threads);
    for (const json& s : j["site_lost"]) meta_.site_lost[s.at(0)] = s.at(1).get<std::array<uint64_t, kLossCauses>>();
    const json& to = j["image_to"];
    for (size_t i = 0; i < to.size() && i < meta_.images.size(); i++) meta_.images[i].to_ticks = to[i];
  } catch (const json::exception& error) {
    meta_.notes.push_back(fmt::format("a metadata chunk could not be understood: {}", error.what()));
  } catch (const std::out_of_range&) {
    meta_.notes.push_back("a metadata chunk names a thread out of range");
  }
}

Result<void> TraceReader::each(const std::function<void(uint32_t, std::span<const uint64_t>)>& visit) const {
  for (const ChunkAt& chunk : record_chunks_) {
    auto words = unpack<uint64_t>(data_ + chunk.offset + sizeof(ChunkHeader), chunk.packed, chunk.raw);
    if (!words || words->empty())
      return fail(fmt::format("the chunk of records at offset {} cannot be unpacked", chunk.offset));
    auto records = std::span(*words).subspan(1);
    if (!encode_ticks(records, true))
      return fail(fmt::format("the chunk of records at offset {} is damaged", chunk.offset));
    uint32_t thread = static_cast<uint32_t>((*words)[0]);
    for (size_t at = 0; at < records.size();) {
      uint32_t n = record_words(records[at]);
      if (record_type(records[at]) != RecordType::hole) visit(thread, records.subspan(at, n));
      at += n;
    }
  }
  return {};
}

}  // namespace sonde::host
