#include "host/image/elf_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "host/image/sectionless.h"

namespace sonde::host {
namespace {

constexpr uint64_t kMapAbove = 32 << 20;
// zlib cannot do better than 1:1032, zstd's frames can; nobody's debug section is larger than this.
constexpr uint64_t kMaxDecompressed = 4ull << 30;

struct Descriptor {
  int fd;
  ~Descriptor() {
    if (fd >= 0) close(fd);
  }
};

bool inside(uint64_t offset, uint64_t size, uint64_t total) { return offset <= total && size <= total - offset; }

Result<void> check_ident(std::span<const uint8_t> bytes) {
  if (bytes.size() < EI_NIDENT || std::memcmp(bytes.data(), ELFMAG, SELFMAG) != 0) {
    if (bytes.size() >= 2 && bytes[0] == '#' && bytes[1] == '!')
      return fail("is a script, not an ELF file; name its interpreter instead");
    return fail(bytes.empty() ? "is empty, not an ELF file" : "is not an ELF file");
  }
  if (bytes[EI_CLASS] != ELFCLASS64) return fail("is a 32-bit ELF file; sonde handles 64-bit programs only");
  if (bytes[EI_DATA] != ELFDATA2LSB) return fail("is a big-endian ELF file; sonde handles little-endian programs only");
  if (bytes.size() < sizeof(Elf64_Ehdr)) return fail("is cut off inside its ELF header");
  return {};
}

}  // namespace

Result<FileBytes> FileBytes::read(const std::string& path) {
  // O_NONBLOCK: opening a fifo must not wait for its writer.
  Descriptor file{::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)};
  struct stat st;
  if (file.fd < 0 || fstat(file.fd, &st) < 0) return fail_errno("cannot be opened");
  if (S_ISDIR(st.st_mode)) return fail("is a folder, not a program");
  if (!S_ISREG(st.st_mode)) return fail("is not a regular file");
  auto size = static_cast<size_t>(st.st_size);
  if (size > kMapAbove) {
    void* map = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE, file.fd, 0);
    if (map == MAP_FAILED) return fail_errno("cannot be mapped");
    return FileBytes(static_cast<const uint8_t*>(map), size);
  }
  std::vector<uint8_t> bytes(size);
  size_t have = 0;
  while (have < size) {
    ssize_t n = ::read(file.fd, bytes.data() + have, size - have);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return fail_errno("cannot be read");
    if (n == 0) break;
    have += static_cast<size_t>(n);
  }
  bytes.resize(have);
  return FileBytes(std::move(bytes));
}

FileBytes::FileBytes(FileBytes&& other) noexcept
    : owned_(std::move(other.owned_)), map_(std::exchange(other.map_, nullptr)), map_size_(other.map_size_) {}

FileBytes::~FileBytes() {
  if (map_) munmap(const_cast<uint8_t*>(map_), map_size_);
}

Result<std::unique_ptr<ElfFile>> ElfFile::open(FileBytes file_bytes) {
  static const bool ready = elf_version(EV_CURRENT) != EV_NONE;
  if (!ready) return fail("cannot be read: libelf is too old");
  SONDE_TRY_VOID(check_ident(file_bytes.span()));
  std::unique_ptr<ElfFile> file(new ElfFile(std::move(file_bytes)));
  auto bytes = file->bytes();
  file->elf_ = elf_memory(reinterpret_cast<char*>(const_cast<uint8_t*>(bytes.data())), bytes.size());
  if (!file->elf_ || !gelf_getehdr(file->elf_, &file->header_))
    return fail(fmt::format("is not a readable ELF file: {}", elf_errmsg(-1)));
  SONDE_TRY_VOID(file->read_segments());
  SONDE_TRY_VOID(file->read_sections());
  return file;
}

ElfFile::~ElfFile() {
  if (elf_) elf_end(elf_);
}

Result<void> ElfFile::read_segments() {
  size_t count = 0;
  if (elf_getphdrnum(elf_, &count) < 0) return fail("has a damaged program header table");
  if (count && (header_.e_phentsize != sizeof(Elf64_Phdr) ||
                !inside(header_.e_phoff, count * sizeof(Elf64_Phdr), bytes().size())))
    return fail(fmt::format("is cut off: its program headers at {:#x} lie beyond its end", header_.e_phoff));
  for (size_t i = 0; i < count; i++) {
    GElf_Phdr p;
    if (!gelf_getphdr(elf_, static_cast<int>(i), &p)) return fail(fmt::format("has no readable program header {}", i));
    program_headers_.push_back(p);
    if (p.p_type != PT_LOAD) continue;
    if (p.p_vaddr + p.p_memsz < p.p_vaddr || p.p_filesz > p.p_memsz)
      return fail(fmt::format("has a segment of impossible size (program header {})", i));
    segments_.push_back({{ImageAddr(p.p_vaddr), ImageAddr(p.p_vaddr + p.p_memsz)},
                         FileOffset(p.p_offset),
                         p.p_filesz,
                         (p.p_flags & PF_R) != 0,
                         (p.p_flags & PF_W) != 0,
                         (p.p_flags & PF_X) != 0});
  }
  return {};
}

Result<void> ElfFile::read_sections() {
  size_t count = 0, names = 0;
  if (elf_getshdrnum(elf_, &count) < 0)
    return fail(fmt::format("is cut off: its section headers at {:#x} lie beyond its end", header_.e_shoff));
  if (count == 0) {
    if (header_.e_shnum != 0)
      return fail(fmt::format("is cut off: its section headers at {:#x} lie beyond its end", header_.e_shoff));
    sectionless_ = true;
    for (auto& found : sections_of_segments(*this)) sections_.push_back(found.section), links_.push_back(found.link);
    return {};
  }
  if (elf_getshdrstrndx(elf_, &names) < 0) return fail("has no readable section names");
  for (size_t i = 1; i < count; i++) {
    GElf_Shdr s;
    Elf_Scn* scn = elf_getscn(elf_, i);
    if (!scn || !gelf_getshdr(scn, &s)) return fail(fmt::format("has no readable section header {}", i));
    const char* name = elf_strptr(elf_, names, s.sh_name);
    if (s.sh_type != SHT_NOBITS && !inside(s.sh_offset, s.sh_size, bytes().size()))
      return fail(fmt::format("is cut off: its section {} ({:#x} bytes at {:#x}) lies beyond its end",
                              name ? name : std::to_string(i), s.sh_size, s.sh_offset));
    sections_.push_back({name ? name : "", ImageAddr(s.sh_flags & SHF_ALLOC ? s.sh_addr : 0), FileOffset(s.sh_offset),
                         s.sh_size, s.sh_type, s.sh_flags});
    links_.push_back(s.sh_link);
  }
  return {};
}

const Section* ElfFile::section(std::string_view name) const {
  auto it = std::ranges::find(sections_, name, &Section::name);
  return it == sections_.end() ? nullptr : &*it;
}

std::span<const uint8_t> ElfFile::raw(const Section& section) const {
  if (section.type == SHT_NOBITS || !inside(section.offset.value, section.size, bytes().size())) return {};
  return bytes().subspan(section.offset.value, section.size);
}

size_t ElfFile::index_of(const Section& section) const {
  size_t i = 0;
  while (i < sections_.size() && (sections_[i].offset != section.offset || sections_[i].type != section.type ||
                                  sections_[i].name != section.name))
    i++;
  return i;
}

const Section* ElfFile::linked(const Section& section) const {
  size_t i = index_of(section);
  uint32_t link = i < links_.size() ? links_[i] : 0;
  return link == 0 || link > sections_.size() ? nullptr : &sections_[link - 1];
}

std::span<const uint8_t> ElfFile::data(const Section& section) const {
  auto plain = raw(section);
  bool gnu = section.name.starts_with(".zdebug") && plain.size() > 12 && std::memcmp(plain.data(), "ZLIB", 4) == 0;
  if (!(section.flags & SHF_COMPRESSED) && !gnu) return plain;
  Elf_Scn* scn = sectionless_ ? nullptr : elf_getscn(elf_, index_of(section) + 1);
  GElf_Shdr now;
  if (!scn || !gelf_getshdr(scn, &now)) return {};
  if (gnu) {
    uint64_t size = 0;
    for (int i = 4; i < 12; i++) size = size << 8 | plain[static_cast<size_t>(i)];
    if (size > kMaxDecompressed || size / 2000 > plain.size()) return {};
    elf_compress_gnu(scn, 0, 0);  // fails when done before
  } else if (now.sh_flags & SHF_COMPRESSED) {
    GElf_Chdr chdr;
    if (!gelf_getchdr(scn, &chdr) || chdr.ch_size > kMaxDecompressed || chdr.ch_size / 2000 > plain.size()) return {};
    if (elf_compress(scn, 0, 0) < 0) return {};
  }
  Elf_Data* data = elf_getdata(scn, nullptr);
  if (!data || !data->d_buf) return {};
  return {static_cast<const uint8_t*>(data->d_buf), data->d_size};
}

const Segment* ElfFile::segment_at(ImageAddr addr) const {
  for (auto& s : segments_)
    if (s.range.contains(addr)) return &s;
  return nullptr;
}

std::span<const uint8_t> ElfFile::at(ImageRange range) const {
  const Segment* s = segment_at(range.begin);
  if (!s || range.end < range.begin) return {};
  auto skip = static_cast<uint64_t>(range.begin - s->range.begin);
  if (!inside(skip, range.size(), s->file_size) || !inside(s->offset.value, s->file_size, bytes().size())) return {};
  return bytes().subspan(s->offset.value + skip, range.size());
}

namespace {
// The build id in one note area, "" if it is not there.
std::string build_id_in(std::span<const uint8_t> notes, uint64_t align) {
  if (align != 8) align = 4;
  uint64_t at = 0;
  while (notes.size() - at >= sizeof(Elf64_Nhdr)) {
    Elf64_Nhdr note;
    std::memcpy(&note, notes.data() + at, sizeof note);
    at += sizeof note;
    uint64_t name_size = note.n_namesz, size = note.n_descsz;
    if (name_size > notes.size() - at) break;
    bool gnu = name_size == 4 && std::memcmp(notes.data() + at, "GNU", 4) == 0;
    uint64_t description = (at + name_size + align - 1) & ~(align - 1);
    if (!inside(description, size, notes.size())) break;
    if (gnu && note.n_type == NT_GNU_BUILD_ID && size >= 2 && size <= 64) {
      std::string hex;
      for (uint8_t byte : notes.subspan(description, size)) hex += fmt::format("{:02x}", byte);
      return hex;
    }
    at = (description + size + align - 1) & ~(align - 1);
    if (at > notes.size()) break;
  }
  return "";
}
}  // namespace

std::string ElfFile::build_id() const {
  for (auto& p : program_headers_)
    if (p.p_type == PT_NOTE && inside(p.p_offset, p.p_filesz, bytes().size()))
      if (auto id = build_id_in(bytes().subspan(p.p_offset, p.p_filesz), p.p_align); !id.empty()) return id;
  for (auto& s : sections_)  // debug files: segments point nowhere
    if (s.type == SHT_NOTE)
      if (auto id = build_id_in(raw(s), 4); !id.empty()) return id;
  return "";
}

}  // namespace sonde::host
