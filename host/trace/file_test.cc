// Files are written, then cut and damaged at every byte: what is read must be a beginning of what was written, and the
// notes must say what is missing.
#include "host/trace/file.h"

#include <doctest/doctest.h>
#include <libdeflate.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include <zstd.h>

#include <csignal>
#include <cstring>
#include <fstream>
#include <random>

#include "host/trace/file_format.h"

namespace sonde::host {

namespace {

using Words = std::vector<uint64_t>;
using Records = std::vector<std::pair<uint32_t, Words>>;

// In memory: thousands of files are written.
struct TempFile {
  int fd = memfd_create("trace", 0);
  std::string path = "/proc/self/fd/" + std::to_string(fd);
  ~TempFile() { close(fd); }
  std::string read() const {
    std::ifstream in(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
  }
  void write(std::string_view bytes) const {
    std::ofstream(path, std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  }
};

Words calls(uint64_t first, int count) {
  Words words;
  for (uint64_t i = 0; i < static_cast<uint64_t>(count); i++)
    for (uint64_t w : {record_word(RecordType::call, 0, 1, 77), (first + i) * 100, (first + i) * 100 + 30})
      words.push_back(w);
  return words;
}

void write_records(TraceWriter& writer, uint32_t thread, const Words& words) {
  static RecordEncoder encoder;
  REQUIRE(encoder.take(words.data(), words.size(), words.size()).words == words.size());
  writer.records(thread, encoder);
}

TraceMeta example_meta() {
  TraceMeta meta;
  meta.command = {"./app", "with space", "\xff\xfe"};
  meta.pid = 4711;
  meta.stacks = true;
  meta.policy = "wait";
  meta.trap_cost_ns = 1250.5;
  meta.start = {1000, 2000, 3000};
  return meta;
}

// A file with everything in it, small.
void write_example(const std::string& path) {
  auto writer = TraceWriter::create(path, 0);
  REQUIRE(writer.has_value());
  TraceMeta meta = example_meta();
  writer->start(meta);
  meta.images = {{"/bin/app", "abc123", 0x1000, 0x2000, 0x1000, 5}, {"/lib/x.so", "", 0x9000, 0xa000, 0x9000, 6}};
  writer->images(meta.images);
  std::vector<TraceSite> sites = {{0, 0x1100, "f", "nops", "", "", false},
                                  {1, 0x9100, "g", "", "too small (at +3)", "", false}};
  writer->sites(sites);
  writer->thread(0, {4711, 4711, "app"});
  write_records(*writer, 0, calls(1, 5));
  writer->thread(1, {4711, 4712, "worker"});
  write_records(*writer, 1, calls(50, 5));
  meta.threads = {{4711, 4711, "app", 6, 5, 1, 500, 1, {0, 0, 1, 0, 0}}, {4711, 4712, "worker", 5, 5}};
  writer->account({7000, 8000, 9000}, meta.threads);
  write_records(*writer, 0, calls(10, 3));
  meta.threads[0].records = 8;
  meta.end = {11000, 12000, 13000};
  meta.wait_status = 256;
  meta.images[1].to_ticks = 900;
  meta.site_lost[1] = {0, 0, 1, 0, 0};
  meta.notes = {"a note"};
  writer->end(meta);
  REQUIRE(writer->failure().empty());
}

Records records_of(const TraceReader& reader) {
  Records records;
  auto done = reader.each([&](uint32_t thread, std::span<const uint64_t> words) {
    records.emplace_back(thread, Words(words.begin(), words.end()));
  });
  REQUIRE(done.has_value());
  return records;
}

bool begins_with(const Records& all, const Records& part) {
  return part.size() <= all.size() && std::equal(part.begin(), part.end(), all.begin());
}

bool any_note(const TraceMeta& meta, std::string_view part) {
  return std::any_of(meta.notes.begin(), meta.notes.end(),
                     [&](const std::string& n) { return n.find(part) != std::string::npos; });
}

// A chunk whose checksums are right, whatever its contents.
std::string chunk(uint32_t kind, std::string_view raw) {
  std::string packed(ZSTD_compressBound(raw.size()), 0);
  packed.resize(ZSTD_compress(packed.data(), packed.size(), raw.data(), raw.size(), 1));
  ChunkHeader h{kChunkMagic, kind, static_cast<uint32_t>(packed.size()), static_cast<uint32_t>(raw.size()), 0, 0};
  h.crc = libdeflate_crc32(0, packed.data(), packed.size());
  h.header_crc = libdeflate_crc32(0, &h, offsetof(ChunkHeader, header_crc));
  return std::string(reinterpret_cast<char*>(&h), sizeof h) + packed;
}

}  // namespace

TEST_CASE("a trace is read as it was written") {
  TempFile file;
  write_example(file.path);
  auto reader = TraceReader::open(file.path);
  REQUIRE(reader.has_value());
  const TraceMeta& m = reader->meta();
  CHECK(m.complete);
  CHECK(m.command == std::vector<std::string>{"./app", "with space", "\xef\xbf\xbd\xef\xbf\xbd"});
  CHECK(m.pid == 4711);
  CHECK(m.stacks);
  CHECK(m.start.ticks == 1000);
  CHECK(m.end.wall_ns == 13000);
  CHECK(m.wait_status == 256);
  CHECK(m.trap_cost_ns == 1250.5);
  REQUIRE(m.images.size() == 2);
  CHECK(m.images[0].build_id == "abc123");
  CHECK(m.images[1].to_ticks == 900);
  CHECK(m.images[0].to_ticks == ~0ull);
  REQUIRE(m.sites.size() == 2);
  CHECK(m.sites[1].refusal == "too small (at +3)");
  REQUIRE(m.threads.size() == 2);
  CHECK(m.threads[0].records == 8);
  CHECK(m.threads[0].lost[2] == 1);
  CHECK(m.threads[0].waited_ticks == 500);
  CHECK(m.threads[1].name == "worker");
  CHECK(m.site_lost.at(1)[2] == 1);
  CHECK(m.notes == std::vector<std::string>{"a note"});
  Records records = records_of(*reader);
  REQUIRE(records.size() == 13);
  CHECK(records[5] == std::pair<uint32_t, Words>{1, calls(50, 1)});
  CHECK(records[12] == std::pair<uint32_t, Words>{0, calls(12, 1)});
  struct stat st;
  REQUIRE(stat(file.path.c_str(), &st) == 0);
  CHECK(st.st_blocks * 512 <= st.st_size + 8192);  // what was reserved is given back
}

TEST_CASE("records that are not compressed for want of time are read the same") {
  for (bool hurry : {false, true}) {
    TempFile file;
    auto writer = TraceWriter::create(file.path, 0);
    REQUIRE(writer.has_value());
    writer->start(example_meta());
    writer->set_hurry(hurry);
    uint64_t before = writer->bytes();
    write_records(*writer, 0, calls(1, 10000));
    CHECK((writer->bytes() - before < 5000) == !hurry);
    writer->end(example_meta());
    auto reader = TraceReader::open(file.path);
    REQUIRE(reader.has_value());
    Records records = records_of(*reader);
    REQUIRE(records.size() == 10000);
    for (uint64_t i = 0; i < records.size(); i++) REQUIRE(records[i] == std::pair<uint32_t, Words>{0, calls(i + 1, 1)});
  }
}

TEST_CASE("a trace cut at any byte is read to its last whole chunk, and says what is missing") {
  TempFile file;
  write_example(file.path);
  std::string whole = file.read();
  Records all = records_of(*TraceReader::open(file.path));
  ChunkHeader first;
  std::memcpy(&first, whole.data() + sizeof(FileHeader), sizeof first);
  const size_t first_end = sizeof(FileHeader) + sizeof first + first.packed;
  size_t most = 0, accounts = 0;
  for (size_t size = 0; size < whole.size(); size++) {
    CAPTURE(size);
    file.write(whole.substr(0, size));
    auto reader = TraceReader::open(file.path);
    if (size < sizeof(FileHeader)) {
      REQUIRE_FALSE(reader.has_value());
      REQUIRE(reader.error().message.find("not a trace") != std::string::npos);
      continue;
    }
    REQUIRE(reader.has_value() == (size >= first_end));
    if (!reader) {
      REQUIRE(reader.error().message.find("nothing of it can be read") != std::string::npos);
      continue;
    }
    Records records = records_of(*reader);
    REQUIRE(begins_with(all, records));
    REQUIRE(records.size() >= most);
    most = records.size();
    REQUIRE_FALSE(reader->meta().complete);
    REQUIRE(any_note(reader->meta(), "the end of the recording is missing"));
    if (!reader->meta().threads.empty() && reader->meta().threads[0].calls == 6) {
      accounts++;
      REQUIRE(reader->meta().end.ticks == 7000);  // the account stands in for the end
    }
  }
  CHECK(most == all.size());  // only the end chunk was cut
  CHECK(accounts > 100);
}

TEST_CASE("a damaged byte costs its chunk and no other") {
  TempFile file;
  write_example(file.path);
  std::string whole = file.read();
  Records all = records_of(*TraceReader::open(file.path));
  for (size_t at = 0; at < whole.size(); at++) {
    CAPTURE(at);
    std::string damaged = whole;
    damaged[at] = static_cast<char>(damaged[at] ^ 0x41);
    file.write(damaged);
    auto reader = TraceReader::open(file.path);
    if (!reader) {
      REQUIRE(at < sizeof(FileHeader));
      continue;
    }
    Records records = records_of(*reader);
    REQUIRE(records.size() + 5 >= all.size());
    for (auto& r : records) REQUIRE(std::find(all.begin(), all.end(), r) != all.end());
    if (at >= sizeof(FileHeader)) REQUIRE(any_note(reader->meta(), "the file is damaged"));
  }
}

TEST_CASE("contents that make no sense in sound chunks do no harm") {
  TempFile file;
  write_example(file.path);
  std::string header = file.read().substr(0, sizeof(FileHeader));
  const char* texts[] = {
      "",
      "null",
      "[]",
      "7",
      "{",
      "{}",
      R"({"start":1})",
      R"({"start":{}})",
      R"({"start":{"ticks":"x"},"command":1})",
      R"({"images":[{}]})",
      R"({"images":7})",
      R"({"images":[[]]})",
      R"({"sites":[[]]})",
      R"({"sites":[[1,2,3,4,5,6,7]]})",
      R"({"sites":{"a":1}})",
      R"({"thread":{}})",
      R"({"thread":{"index":4294967295,"pid":1,"tid":1,"name":""}})",
      R"({"thread":{"index":-1,"pid":1,"tid":1,"name":""}})",
      R"({"threads":[1]})",
      R"({"threads":[{"pid":1,"tid":2,"name":"","calls":0,"records":0,"waits":0,"waited_ticks":0,"lost_calls":0,"lost":[1]}]})",
      R"({"end":{}})",
      R"({"account":[]})",
      R"({"end":{"ticks":1e300}})"};
  for (const char* text : texts) {
    for (uint32_t kind : {1u, 3u, 9u}) {
      CAPTURE(text);
      file.write(header + chunk(kind, text));
      auto reader = TraceReader::open(file.path);
      REQUIRE(reader.has_value());
      REQUIRE(records_of(*reader).empty());
    }
  }
  std::mt19937 random(5);
  for (int i = 0; i < 2000; i++) {
    std::string noise(random() % 200, 0);
    for (char& c : noise) c = static_cast<char>(random() % 4 ? random() % 3 : random());
    file.write(header + chunk(kChunkRecords, noise));
    auto reader = TraceReader::open(file.path);
    REQUIRE(reader.has_value());
    auto done = reader->each([](uint32_t, std::span<const uint64_t>) {});
    if (!done) REQUIRE(done.error().message.find("chunk of records at offset 16") != std::string::npos);
  }
}

TEST_CASE("what is no trace is refused in one sentence") {
  TempFile file;
  CHECK(TraceReader::open("/nonexistent/x").error().message.find("/nonexistent/x") != std::string::npos);
  CHECK(TraceReader::open("/tmp").error().message.find("is not a file") != std::string::npos);
  file.write("#!/bin/sh\necho this is something else\n");
  CHECK(TraceReader::open(file.path).error().message.find("is not a trace of sonde") != std::string::npos);
  FileHeader header{};
  std::memcpy(header.magic, kTraceMagic, sizeof kTraceMagic);
  header.version = 99;
  file.write({reinterpret_cast<char*>(&header), sizeof header});
  CHECK(TraceReader::open(file.path).error().message.find("version 99") != std::string::npos);
  CHECK_FALSE(TraceWriter::create("/nonexistent/x", 0).has_value());
}

TEST_CASE("at the size limit records are counted, and the end is still written") {
  TempFile file;
  {
    auto writer = TraceWriter::create(file.path, 20000);
    REQUIRE(writer.has_value());
    TraceMeta meta = example_meta();
    writer->start(meta);
    std::mt19937_64 random(1);
    Words words = calls(1, 1000);
    for (int i = 0; i < 100; i++) {
      for (size_t w = 1; w < words.size(); w += 3) words[w] = random();
      write_records(*writer, 0, words);
    }
    CHECK(writer->failure().find("--max-size") != std::string::npos);
    writer->end(meta);
  }
  auto reader = TraceReader::open(file.path);
  REQUIRE(reader.has_value());
  uint64_t kept = records_of(*reader).size();
  CHECK(kept >= 1000);
  CHECK(reader->meta().complete);
  CHECK(reader->meta().unwritten_records == 100 * 1000 - kept);
  CHECK(reader->meta().failure.find("--max-size") != std::string::npos);
  struct stat st;
  REQUIRE(stat(file.path.c_str(), &st) == 0);
  CHECK(st.st_size < 20000 + 20000);
}

TEST_CASE("a full disk leaves a readable file that says so") {
  TempFile file;
  pid_t child = fork();
  if (child == 0) {  // a limit on file sizes fails writes as a full disk does
    signal(SIGXFSZ, SIG_IGN);
    rlimit limit{6 << 20, 6 << 20};
    setrlimit(RLIMIT_FSIZE, &limit);
    auto writer = TraceWriter::create(file.path, 0);
    TraceMeta meta = example_meta();
    writer->start(meta);
    std::mt19937_64 random(1);
    Words words = calls(1, 10000);
    for (int i = 0; i < 100; i++) {
      for (size_t w = 1; w < words.size(); w += 3) words[w] = random();
      write_records(*writer, 0, words);
    }
    bool failed = !writer->failure().empty();
    writer->end(meta);
    _exit(failed ? 7 : 0);
  }
  int status;
  waitpid(child, &status, 0);
  REQUIRE(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 7);
  auto reader = TraceReader::open(file.path);
  REQUIRE(reader.has_value());
  uint64_t kept = records_of(*reader).size();
  CHECK(kept >= 100000);
  CHECK(reader->meta().complete);  // its room was kept free
  CHECK(reader->meta().unwritten_records == 100 * 10000 - kept);
  CHECK(reader->meta().failure == "File too large");
}

}  // namespace sonde::host
