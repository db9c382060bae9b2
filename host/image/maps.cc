// Reads /proc/PID/maps and finds the ELF file behind each executable mapping. A path in maps is only a name: the file
// there may be another by now, or lie in another mount namespace, so its header is compared with the process's memory.
#include "host/image/maps.h"

#include <elf.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <map>
#include <mutex>
#include <tuple>

namespace sonde::host {
namespace {

struct Descriptor {
  int fd;
  ~Descriptor() {
    if (fd >= 0) close(fd);
  }
};

Result<std::string> read_all(const std::string& path) {
  Descriptor file{open(path.c_str(), O_RDONLY | O_CLOEXEC)};
  if (file.fd < 0) return fail_errno(path);
  std::string text, buffer(1 << 16, '\0');  // not on the stack: a program may be started with little of it
  while (true) {
    ssize_t n = read(file.fd, buffer.data(), buffer.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return fail_errno(path);
    if (n == 0) return text;
    text.append(buffer, 0, static_cast<size_t>(n));
  }
}

// One line of maps, taken apart from the left; fields are separated by single characters or runs of spaces.
class Line {
 public:
  explicit Line(std::string_view text) : rest_(text) {}
  bool number(uint64_t& value, int base, char behind) {
    auto [end, error] = std::from_chars(rest_.data(), rest_.data() + rest_.size(), value, base);
    if (error != std::errc{}) return false;
    rest_.remove_prefix(static_cast<size_t>(end - rest_.data()));
    if (rest_.empty()) return behind == ' ';
    if (rest_[0] != behind) return false;
    rest_.remove_prefix(1);
    return true;
  }
  bool flags(std::string_view& value) {
    if (rest_.size() < 5 || rest_[4] != ' ') return false;
    value = rest_.substr(0, 4);
    rest_.remove_prefix(5);
    return true;
  }
  std::string_view path() const {
    auto begin = rest_.find_first_not_of(' ');
    return begin == rest_.npos ? std::string_view{} : rest_.substr(begin);
  }

 private:
  std::string_view rest_;
};

// The kernel writes a newline in a name as \012.
std::string unescape(std::string_view name) {
  std::string out;
  for (size_t i = 0; i < name.size(); i++)
    if (name.substr(i, 4) == "\\012") out += '\n', i += 3;
    else out += name[i];
  return out;
}

bool parse_line(std::string_view text, Mapping& m) {
  Line line(text);
  uint64_t begin, end, offset, major, minor;
  std::string_view flags;
  if (!line.number(begin, 16, '-') || !line.number(end, 16, ' ') || !line.flags(flags) ||
      !line.number(offset, 16, ' ') || !line.number(major, 16, ':') || !line.number(minor, 16, ' ') ||
      !line.number(m.inode, 10, ' ') || begin >= end)
    return false;
  m.range = {Addr(begin), Addr(end)};
  m.offset = FileOffset(offset);
  m.readable = flags[0] == 'r', m.writable = flags[1] == 'w', m.executable = flags[2] == 'x',
  m.shared = flags[3] == 's';
  m.device = major << 32 | minor;
  auto path = line.path();
  constexpr std::string_view kDeleted = " (deleted)";
  m.deleted = path.ends_with(kDeleted);
  if (m.deleted) path.remove_suffix(kDeleted.size());
  m.path = unescape(path);
  return true;
}

}  // namespace

Result<std::vector<Mapping>> parse_maps(std::string_view text) {
  std::vector<Mapping> mappings;
  for (size_t line = 1; !text.empty(); line++) {
    auto end = std::min(text.find('\n'), text.size());
    Mapping m;
    if (!parse_line(text.substr(0, end), m)) return fail(fmt::format("line {}: not a line of /proc/PID/maps", line));
    mappings.push_back(std::move(m));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return mappings;
}

Result<std::vector<Mapping>> read_maps(pid_t pid) {
  auto path = fmt::format("/proc/{}/maps", pid);
  auto text = read_all(path);
  if (!text && errno == ENOENT) return fail(fmt::format("there is no process {}", pid));
  return SONDE_TRY_CONTEXT(parse_maps(SONDE_TRY(text)), path);
}

namespace {

constexpr uint64_t kMostInMemory = uint64_t{1} << 30;
constexpr uint64_t kPage = 4096;  // both processors' smallest; segments are congruent modulo it

// Images by identity of their file, so that each is read once however many processes and calls ask for it.
std::shared_ptr<const Image> cached_open(const std::string& path, const struct stat& st, std::string& why) {
  using Key = std::tuple<std::string, dev_t, ino_t, off_t, int64_t, int64_t>;
  static std::mutex lock;
  static std::map<Key, std::weak_ptr<const Image>> cache;
  Key key{path, st.st_dev, st.st_ino, st.st_size, st.st_mtim.tv_sec, st.st_mtim.tv_nsec};
  std::lock_guard guard(lock);
  if (auto known = cache[key].lock()) return known;
  auto image = Image::open(path);
  if (!image) return why = std::move(image.error().message), nullptr;
  cache[key] = *image;
  return *image;
}

class Loader {
 public:
  explicit Loader(pid_t pid)
      : pid_(pid), memory_{open(fmt::format("/proc/{}/mem", pid).c_str(), O_RDONLY | O_CLOEXEC)} {}

  // The image of an executable mapping; null with `why` set, or with `why` empty if there is none to be expected.
  std::shared_ptr<const Image> image_of(const Mapping& m, std::span<const Mapping> all, std::string& why) {
    why.clear();
    if (m.path == "[vdso]") return vdso(m, why);
    if (m.path.empty() || m.path[0] == '[' || m.inode == 0) return nullptr;
    auto head = header_in_memory(m, all);
    for (auto& candidate : {m.path, fmt::format("/proc/{}/root{}", pid_, m.path)}) {
      struct stat st;
      if (m.deleted || m.path[0] != '/' || stat(candidate.c_str(), &st) < 0 || !S_ISREG(st.st_mode)) continue;
      auto image = cached_open(candidate, st, why);
      if (image && (head.empty() ? st.st_ino == m.inode : same_header(*image, head))) return image;
    }
    auto link = fmt::format("/proc/{}/map_files/{:x}-{:x}", pid_, m.range.begin.value, m.range.end.value);
    if (auto bytes = read_all(link)) {
      if (!bytes->starts_with("\x7f"
                              "ELF"))
        return why.clear(), nullptr;  // data that happens to be executable
      auto image = Image::from_memory({bytes->begin(), bytes->end()}, m.path);
      if (image) return *image;
      why = image.error().message;
    } else if (auto again = from_memory(m, all)) {
      return again;
    } else if (why.empty()) {
      why = fmt::format(
          "{} {}", m.path,
          m.deleted ? "was deleted and cannot be read any more" : "is no longer the file that the process has loaded");
    }
    return nullptr;
  }

 private:
  std::vector<uint8_t> read_memory(AddrRange range) const {
    std::vector<uint8_t> bytes(range.size());
    ssize_t n = pread(memory_.fd, bytes.data(), bytes.size(), static_cast<off_t>(range.begin.value));
    bytes.resize(n < 0 ? 0 : static_cast<size_t>(n));
    return bytes;
  }

  std::shared_ptr<const Image> vdso(const Mapping& m, std::string& why) const {
    auto image = Image::from_memory(read_memory(m.range), "[vdso]");
    if (!image) why = image.error().message;
    return image ? *image : nullptr;
  }

  // Where the file's beginning is mapped.
  static const Mapping* first_mapping(const Mapping& m, std::span<const Mapping> all) {
    for (auto& other : all)
      if (other.inode == m.inode && other.device == m.device && other.path == m.path && other.offset.value == 0 &&
          !other.writable && other.range.begin <= m.range.begin && m.range.begin - other.range.begin <= (1ll << 40))
        return &other;
    return nullptr;
  }

  // The file's first page as the process sees it: ELF header, program headers, usually the build id.
  std::vector<uint8_t> header_in_memory(const Mapping& m, std::span<const Mapping> all) const {
    const Mapping* first = first_mapping(m, all);
    return first ? read_memory({first->range.begin, first->range.begin + int64_t{kPage}}) : std::vector<uint8_t>{};
  }

  // The loader makes addresses of some entries in place (glibc, elf/get-dynamic-info.h).
  static void unrelocate(std::span<uint8_t> dynamic, uint64_t bias) {
    constexpr int64_t kRelocated[] = {DT_HASH, DT_PLTGOT, DT_STRTAB,   DT_SYMTAB, DT_RELA,
                                      DT_REL,  DT_JMPREL, DT_GNU_HASH, DT_VERSYM};
    for (size_t at = 0; at + sizeof(Elf64_Dyn) <= dynamic.size(); at += sizeof(Elf64_Dyn)) {
      Elf64_Dyn entry;
      std::memcpy(&entry, dynamic.data() + at, sizeof entry);
      if (std::ranges::find(kRelocated, entry.d_tag) == std::end(kRelocated) || entry.d_un.d_ptr < bias) continue;
      entry.d_un.d_ptr -= bias;
      std::memcpy(dynamic.data() + at, &entry, sizeof entry);
    }
  }

  // Only the privileged may read map_files. What is loaded of a file is enough for unwinding and exported names: its
  // segments, put back to where they were in the file; the section headers are not among them.
  std::shared_ptr<const Image> from_memory(const Mapping& m, std::span<const Mapping> all) const {
    auto head = header_in_memory(m, all);
    Elf64_Ehdr header;
    if (head.size() < sizeof header) return nullptr;
    std::memcpy(&header, head.data(), sizeof header);
    if (std::memcmp(header.e_ident, ELFMAG, SELFMAG) != 0 || header.e_phentsize != sizeof(Elf64_Phdr)) return nullptr;
    uint64_t headers_end = header.e_phoff + uint64_t{header.e_phnum} * sizeof(Elf64_Phdr);
    if (header.e_phoff > head.size() || headers_end > head.size()) return nullptr;
    std::vector<Elf64_Phdr> segments(header.e_phnum);
    std::memcpy(segments.data(), head.data() + header.e_phoff, segments.size() * sizeof(Elf64_Phdr));
    auto dynamic = std::ranges::find(segments, uint32_t{PT_DYNAMIC}, &Elf64_Phdr::p_type);
    const Elf64_Phdr names = dynamic == segments.end() ? Elf64_Phdr{} : *dynamic;
    std::erase_if(segments, [](auto& s) { return s.p_type != PT_LOAD; });
    if (segments.empty() || segments.front().p_offset >= kPage) return nullptr;
    uint64_t bias = first_mapping(m, all)->range.begin.value - (segments.front().p_vaddr & ~(kPage - 1));
    std::vector<uint8_t> file;
    for (const Elf64_Phdr& s : segments) {
      if (s.p_offset > kMostInMemory || s.p_filesz > kMostInMemory) return nullptr;
      Addr begin(s.p_vaddr + bias);
      auto bytes = read_memory({begin, begin + static_cast<int64_t>(s.p_filesz)});
      file.resize(std::max<size_t>(file.size(), s.p_offset + s.p_filesz));
      std::copy(bytes.begin(), bytes.end(), file.begin() + static_cast<std::ptrdiff_t>(s.p_offset));
    }
    if (file.size() < sizeof header) return nullptr;
    if (names.p_offset < file.size() && names.p_filesz <= file.size() - names.p_offset)
      unrelocate(std::span(file).subspan(names.p_offset, names.p_filesz), bias);
    header.e_shoff = 0, header.e_shnum = header.e_shstrndx = 0;
    std::memcpy(file.data(), &header, sizeof header);
    auto image = Image::from_memory(std::move(file), m.path);
    return image ? *image : nullptr;
  }

  static bool same_header(const Image& image, std::span<const uint8_t> head) {
    auto& first = image.segments().front();
    auto bytes = image.bytes(
        {first.range.begin, first.range.begin + static_cast<int64_t>(std::min<uint64_t>(first.file_size, kPage))});
    // Text patched by a tracer may share the page in old layouts; what is compared ends before any code.
    size_t size = std::min<size_t>({bytes.size(), head.size(), 0x400});
    return first.offset.value != 0 || std::memcmp(bytes.data(), head.data(), size) == 0;
  }

  pid_t pid_;
  Descriptor memory_;
};

// Where `image` lies, given that its file offset m.offset is mapped at m.range.begin.
std::optional<LoadedImage> place(std::shared_ptr<const Image> image, const Mapping& m) {
  std::optional<uint64_t> bias;
  uint64_t low = ~0ull, high = 0;
  for (auto& s : image->segments()) {
    uint64_t first = s.offset.value & ~(kPage - 1), last = s.offset.value + s.file_size;
    if (s.executable && !bias && m.offset.value >= first && m.offset.value < last)
      bias = m.range.begin.value - m.offset.value + s.offset.value - s.range.begin.value;
    low = std::min(low, s.range.begin.value & ~(kPage - 1));
    high = std::max(high, (s.range.end.value + kPage - 1) & ~(kPage - 1));
  }
  if (m.path == "[vdso]") bias = m.range.begin.value - low;
  if (!bias) return std::nullopt;
  return LoadedImage{std::move(image), *bias, {Addr(low + *bias), Addr(high + *bias)}};
}

}  // namespace

Result<std::vector<LoadedImage>> loaded_images(pid_t pid, std::vector<std::string>* problems) {
  auto mappings = SONDE_TRY(read_maps(pid));
  return mapped_images(pid, mappings, problems);
}

std::vector<LoadedImage> mapped_images(pid_t pid, std::span<const Mapping> mappings,
                                       std::vector<std::string>* problems) {
  Loader loader(pid);
  std::vector<LoadedImage> images;
  const Mapping* unreadable = nullptr;
  for (auto& m : mappings) {
    if (!m.executable) continue;
    bool known = std::ranges::any_of(images, [&](auto& i) { return i.range.contains(m.range.begin); });
    if (known || (unreadable && unreadable->path == m.path)) continue;
    std::string why;
    auto image = loader.image_of(m, mappings, why);
    if (image)
      if (auto placed = place(std::move(image), m)) images.push_back(std::move(*placed));
    if (why.empty()) continue;
    unreadable = &m;
    if (problems) problems->push_back(std::move(why));
  }
  std::ranges::sort(images, {}, [](auto& i) { return i.range.begin; });
  return images;
}

}  // namespace sonde::host
