// A cache file is believed if it is a plain file of this user, was made from the same unwind sections by the same version,
// and Table::open accepts it. It appears whole or not at all, by rename.
#include "host/tables/cache.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "host/tables/image_table.h"

namespace sonde::host {
namespace {

constexpr size_t kMaxFile = size_t{1} << 30;

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_;
};

bool owned_by_us(const struct stat& status) {
  return status.st_uid == geteuid() && !(status.st_mode & (S_IWGRP | S_IWOTH));
}

bool make_folder(const std::string& path) {
  if (mkdir(path.c_str(), 0700) && errno != EEXIST) return false;
  struct stat status;
  return stat(path.c_str(), &status) == 0 && S_ISDIR(status.st_mode) && owned_by_us(status);
}

// What the rows are made from: bytes and places of the unwind sections, ranges of the code.
uint64_t source_checksum(const Image& image) {
  uint64_t sum = image.machine();
  auto mix = [&](uint64_t n) {
    uint64_t pair[2] = {sum, n};
    sum = table_checksum({reinterpret_cast<const uint8_t*>(pair), sizeof pair});
  };
  RowSources sources = row_sources(image);
  auto section = [&](uint64_t kind, ImageAddr address, std::span<const uint8_t> bytes) {
    mix(kind), mix(address.value), mix(table_checksum(bytes));
  };
  for (const ImageRange& code : sources.executable) mix(code.begin.value), mix(code.end.value);
  for (const CfiSection& s : sources.sections)
    section(1, s.address, s.bytes), mix(s.text_base.value), mix(s.data_base.value);
  for (const CfiSection& s : sources.debug_frames) section(2, s.address, s.bytes);
  for (const SFrameSection& s : sources.sframes) section(3, s.address, s.bytes);
  return sum;
}

// Names are hex digits only, so no build id leads out of the folder.
std::string file_name(const Image& image) {
  std::string_view id = image.build_id();
  if (id.size() < 8 || id.size() > 128 || id.find_first_not_of("0123456789abcdef") != id.npos) return "";
  return fmt::format("{}.table", id);
}

bool read_all(int fd, std::span<uint8_t> bytes) {
  while (!bytes.empty()) {
    ssize_t n = read(fd, bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    bytes = bytes.subspan(static_cast<size_t>(n));
  }
  return true;
}

bool write_all(int fd, std::span<const uint8_t> bytes) {
  while (!bytes.empty()) {
    ssize_t n = write(fd, bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    bytes = bytes.subspan(static_cast<size_t>(n));
  }
  return true;
}

SharedTable read_file(const std::string& path, const CacheHeader& expected) {
  Descriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  struct stat status;
  if (!file || fstat(file.get(), &status) || !S_ISREG(status.st_mode) || !owned_by_us(status)) return nullptr;
  size_t size = static_cast<size_t>(status.st_size);
  if (size < sizeof(CacheHeader) + sizeof(TableHeader) || size > kMaxFile) return nullptr;
  std::vector<uint8_t> bytes(size);
  if (!read_all(file.get(), bytes)) return nullptr;
  CacheHeader header;
  std::memcpy(&header, bytes.data(), sizeof header);
  if (header.magic != expected.magic || header.version != expected.version || header.source != expected.source ||
      header.table_size != size - sizeof header)
    return nullptr;
  if (!Table::open(std::span(bytes).subspan(sizeof header))) return nullptr;
  return std::make_shared<ImageTable>(std::move(bytes), sizeof header, true);
}

bool write_file(const std::string& path, const CacheHeader& header, std::span<const uint8_t> table) {
  static std::atomic<unsigned> counter;
  std::string temporary = fmt::format("{}.{}.{}", path, getpid(), counter++);
  bool written = false;
  {
    Descriptor file(open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600));
    if (!file) return false;
    written = write_all(file.get(), {reinterpret_cast<const uint8_t*>(&header), sizeof header}) &&
              write_all(file.get(), table);
  }
  if (written && rename(temporary.c_str(), path.c_str()) == 0) return true;
  unlink(temporary.c_str());
  return false;
}

}  // namespace

std::string table_cache_folder() {
  const char* base = std::getenv("XDG_CACHE_HOME");
  std::string folder;
  if (base && base[0] == '/') {  // XDG Base Directory specification: relative paths are to be ignored
    folder = base;
  } else {
    const char* home = std::getenv("HOME");
    if (!home || home[0] != '/') return "";
    folder = std::string(home) + "/.cache";
  }
  if (mkdir(folder.c_str(), 0700) && errno != EEXIST) return "";
  folder += "/sonde";
  return make_folder(folder) ? folder : "";
}

Result<SharedTable> load_table(const Image& image, const std::string& folder) { return load_table(image, folder, {}); }

Result<SharedTable> load_table(const Image& image, const std::string& folder, const RefineTable& refine) {
  std::string name = file_name(image), path;
  CacheHeader header{kCacheMagic, kCacheVersion, 0, 0, 0};
  if (!folder.empty() && !name.empty()) {
    path = folder + "/" + name;
    header.source = source_checksum(image);
    if (SharedTable cached = read_file(path, header)) return cached;
  }
  CompiledTable compiled = SONDE_TRY(compile_table(image));
  if (refine) compiled.bytes = SONDE_TRY(refine(image, std::move(compiled.bytes)));
  auto table = std::make_shared<ImageTable>(std::move(compiled.bytes), 0, false);
  header.table_size = table->bytes().size();
  if (!path.empty()) write_file(path, header, table->bytes());
  return table;
}

bool keep_checked_table(const Image& image, std::span<const uint8_t> table, const std::string& folder) {
  std::string name = file_name(image);
  if (folder.empty() || name.empty()) return false;
  return write_file(folder + "/" + name, {kCacheMagic, kCacheVersion, 1, source_checksum(image), table.size()}, table);
}

}  // namespace sonde::host
