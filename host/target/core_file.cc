// Notes: NT_PRSTATUS per thread (the first is the thread that died), NT_PRPSINFO, NT_AUXV, NT_FILE (fs/binfmt_elf.c,
// fill_files_note: count, page size, {start, end, offset in pages} each, then the names). All of it is input that may be
// cut off or damaged at any byte.
#include "host/target/core_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/mman.h>
#include <sys/procfs.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <set>

#include "core/base/cursor.h"
#include "host/image/debug_file.h"

namespace sonde::host {
namespace {

constexpr uint64_t kPage = 4096;

template <class T>
std::optional<T> struct_at(std::span<const uint8_t> bytes, uint64_t offset) {
  if (offset > bytes.size() || bytes.size() - offset < sizeof(T)) return std::nullopt;
  T value;
  std::memcpy(&value, bytes.data() + offset, sizeof value);
  return value;
}

constexpr uint64_t align4(uint64_t n) { return (n + 3) & ~uint64_t{3}; }

std::string text_of(const char* chars, size_t room) { return {chars, strnlen(chars, room)}; }

}  // namespace

Result<std::unique_ptr<CoreFile>> CoreFile::open(const std::string& path) {
  int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return fail_errno(path);
  struct stat st;
  if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode)) return close(fd), fail(fmt::format("{}: not a file", path));
  std::unique_ptr<CoreFile> core(new CoreFile);
  if (st.st_size > 0) {
    void* map = mmap(nullptr, static_cast<size_t>(st.st_size), PROT_READ, MAP_PRIVATE, fd, 0);
    if (map != MAP_FAILED) core->bytes_ = {static_cast<const uint8_t*>(map), static_cast<size_t>(st.st_size)};
  }
  close(fd);
  SONDE_TRY_VOID(core->read_headers(path));
  return core;
}

CoreFile::~CoreFile() {
  if (!bytes_.empty()) munmap(const_cast<uint8_t*>(bytes_.data()), bytes_.size());
}

Result<void> CoreFile::read_headers(const std::string& path) {
  auto header = struct_at<Elf64_Ehdr>(bytes_, 0);
  if (!header || std::memcmp(header->e_ident, ELFMAG, SELFMAG) != 0 || header->e_ident[EI_CLASS] != ELFCLASS64)
    return fail(fmt::format("{}: not a 64-bit ELF file", path));
  if (header->e_type != ET_CORE)
    return fail(fmt::format("{}: an ELF file, but not a core file; give the core file first, then the program", path));
  if (header->e_machine != EM_X86_64)
    return fail(fmt::format("{}: a core file of another machine (ELF machine {})", path, header->e_machine));
  uint64_t count = header->e_phnum;
  if (count == PN_XNUM) {
    auto section = struct_at<Elf64_Shdr>(bytes_, header->e_shoff);
    count = section ? section->sh_info : 0;
  }
  uint64_t needed = 0;
  for (uint64_t i = 0; i < count; i++) {
    auto segment = struct_at<Elf64_Phdr>(bytes_, header->e_phoff + i * sizeof(Elf64_Phdr));
    if (!segment) return fail(fmt::format("{}: ends within its program headers", path));
    uint64_t there =
        segment->p_offset < bytes_.size() ? std::min(segment->p_filesz, bytes_.size() - segment->p_offset) : 0;
    needed = std::max(needed, segment->p_offset + std::min(segment->p_filesz, ~segment->p_offset));
    if (segment->p_type == PT_NOTE) {
      auto done = read_notes(bytes_.subspan(there ? segment->p_offset : 0, there));
      if (!done) return fail(fmt::format("{}: {}", path, done.error().message));
    } else if (segment->p_type == PT_LOAD && segment->p_vaddr + segment->p_memsz > segment->p_vaddr) {
      segments_.push_back({{Addr(segment->p_vaddr), Addr(segment->p_vaddr + segment->p_memsz)},
                           segment->p_offset,
                           std::min(there, segment->p_memsz),
                           std::min(segment->p_filesz, segment->p_memsz),
                           (segment->p_flags & PF_R) != 0,
                           (segment->p_flags & PF_W) != 0,
                           (segment->p_flags & PF_X) != 0});
    }
  }
  std::ranges::sort(segments_, {}, [](const CoreSegment& s) { return s.range.begin; });
  if (needed > bytes_.size()) note_cut(path, needed);
  if (threads_.empty())
    return fail(cut_.empty() ? fmt::format("{}: a core file without threads: not of a process", path)
                             : cut_ + "; the threads' registers are not among them");
  return {};
}

// Such cores come of full disks and of limits (ulimit -c).
void CoreFile::note_cut(const std::string& path, uint64_t needed) {
  cut_ = fmt::format("{} is cut off: it has {} of {} bytes", path, bytes_.size(), needed);
  size_t lacking = 0;
  for (const CoreSegment& s : segments_) lacking += s.file_size < s.wanted_size;
  if (lacking == 0) return;
  auto first = std::ranges::find_if(segments_, [](const CoreSegment& s) { return s.file_size < s.wanted_size; });
  cut_ += fmt::format(", and lacks memory from {:#x} on (of {} of its {} segments)",
                      (first->range.begin + static_cast<int64_t>(first->file_size)).value, lacking, segments_.size());
}

Result<void> CoreFile::read_notes(std::span<const uint8_t> notes) {
  Cursor at(notes);
  while (at.left() >= sizeof(Elf64_Nhdr)) {
    uint32_t name_size = at.read<uint32_t>(), size = at.read<uint32_t>(), type = at.read<uint32_t>();
    auto name = at.take(align4(name_size));
    auto content = at.take(size);
    at.skip(std::min<uint64_t>(align4(size) - size, at.left()));
    if (!at.ok()) break;  // cut off: what came before counts
    if (name_size != 5 || std::memcmp(name.data(), "CORE", 5) != 0) continue;
    if (type == NT_PRSTATUS) add_thread(content);
    if (type == NT_AUXV) read_auxiliary_vector(content);
    if (type == NT_FILE) SONDE_TRY_VOID(read_file_note(content));
    if (auto info = struct_at<elf_prpsinfo>(content, 0); info && type == NT_PRPSINFO) {
      program_ = text_of(info->pr_fname, sizeof info->pr_fname);
      pid_ = info->pr_pid;
    }
  }
  return {};
}

void CoreFile::add_thread(std::span<const uint8_t> prstatus) {
  auto status = struct_at<elf_prstatus>(prstatus, 0);
  if (!status) return;
  user_regs_struct regs;
  static_assert(sizeof regs == sizeof status->pr_reg);
  std::memcpy(&regs, &status->pr_reg, sizeof regs);
  if (threads_.empty()) signal_ = status->pr_cursig;
  threads_.push_back({status->pr_pid, "", regset_of(regs)});
}

void CoreFile::read_auxiliary_vector(std::span<const uint8_t> note) {
  for (Cursor at(note); at.left() >= 16;) {
    uint64_t type = at.read<uint64_t>(), value = at.read<uint64_t>();
    if (type == AT_ENTRY) entry_ = Addr(value);
    if (type == AT_SYSINFO_EHDR) vdso_ = Addr(value);
  }
}

Result<void> CoreFile::read_file_note(std::span<const uint8_t> note) {
  Cursor at(note);
  uint64_t count = at.read<uint64_t>(), page = at.read<uint64_t>();
  if (count > note.size() / 24) return fail("its list of mapped files contradicts itself");
  for (uint64_t i = 0; i < count; i++) {
    MappedFile file;
    file.range.begin = Addr(at.read<uint64_t>()), file.range.end = Addr(at.read<uint64_t>());
    file.offset = at.read<uint64_t>() * page;
    files_.push_back(std::move(file));
  }
  auto names = at.take(at.left());
  const char* name = reinterpret_cast<const char*>(names.data());
  for (size_t i = 0, used = 0; i < files_.size(); i++) {
    if (used >= names.size()) return fail("its list of mapped files ends within the names");
    files_[i].path = text_of(name + used, names.size() - used);
    used += files_[i].path.size() + 1;
  }
  std::ranges::sort(files_, {}, [](const MappedFile& f) { return f.range.begin; });
  return {};
}

const CoreSegment* CoreFile::segment(Addr at) const {
  auto found = std::ranges::upper_bound(segments_, at, {}, [](const CoreSegment& s) { return s.range.begin; });
  return found != segments_.begin() && std::prev(found)->range.contains(at) ? &*std::prev(found) : nullptr;
}

// At least one byte, up to the next place where another source begins; 0: nobody has it.
size_t CoreFile::read_some(Addr at, std::span<uint8_t> into) const {
  const CoreSegment* found = segment(at);
  if (found) {
    uint64_t offset = static_cast<uint64_t>(at - found->range.begin);
    if (offset < found->file_size) {
      size_t n = std::min<uint64_t>(into.size(), found->file_size - offset);
      std::memcpy(into.data(), bytes_.data() + found->file_offset + offset, n);
      return n;
    }
    if (found->writable) return 0;  // the file's bytes may have been changed
  }
  for (const LoadedImage& loaded : images_) {
    if (!loaded.range.contains(at)) continue;
    ImageAddr begin = loaded.to_image(at);
    for (const Segment& s : loaded.image->segments()) {
      ImageAddr end = s.range.begin + static_cast<int64_t>(s.file_size);
      if (s.writable || begin < s.range.begin || begin >= end) continue;
      auto bytes = loaded.image->bytes(ImageRange{begin, std::min(end, begin + static_cast<int64_t>(into.size()))});
      std::memcpy(into.data(), bytes.data(), bytes.size());
      return bytes.size();
    }
  }
  return 0;
}

bool CoreFile::read(Addr at, std::span<uint8_t> into) {
  if (at.value + into.size() < at.value) return false;
  for (size_t done = 0; done < into.size();) {
    size_t n = read_some(at + static_cast<int64_t>(done), into.subspan(done));
    if (n == 0) return false;
    done += n;
  }
  return true;
}

bool CoreFile::stack_at(Addr sp, AddrRange* stack) {
  const CoreSegment* found = segment(sp);
  auto above = std::ranges::upper_bound(segments_, sp, {}, [](const CoreSegment& s) { return s.range.begin; });
  if (found && !found->writable && !found->readable) found = nullptr;  // a guard page
  if (!found && above != segments_.end() && above->range.begin - sp <= kOverflow) found = &*above;
  if (!found || !found->writable) return false;
  *stack = {std::min(sp, found->range.begin), found->range.begin + static_cast<int64_t>(found->file_size)};
  return stack->contains(sp);
}

// gcore leaves out the segments of unchanged code altogether, so that a file holds code is learnt from the file.
bool CoreFile::is_image(const std::string& name, const std::string& path) const {
  char magic[SELFMAG] = {};
  for (const MappedFile& file : files_) {
    if (file.path != name) continue;
    const CoreSegment* found = segment(file.range.begin);
    if (found && found->executable) return true;
    auto head = std::span(reinterpret_cast<uint8_t*>(magic), sizeof magic);
    if (file.offset == 0 && read_some(file.range.begin, head) == SELFMAG)
      return std::memcmp(magic, ELFMAG, SELFMAG) == 0;
  }
  int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  bool elf = fd >= 0 && ::read(fd, magic, sizeof magic) == SELFMAG && std::memcmp(magic, ELFMAG, SELFMAG) == 0;
  if (fd >= 0) close(fd);
  return elf;
}

// Where the image lies: where each of its segments is mapped from where it is in the file. One mapping alone does not tell:
// segments that share a page of the file are mapped from the same place.
std::optional<LoadedImage> CoreFile::place(const std::string& name, std::shared_ptr<const Image> image) const {
  auto page = [](uint64_t n) { return n & ~(kPage - 1); };
  auto mapped_at = [&](const Segment& s, uint64_t bias) {
    Addr at(page(s.range.begin.value) + bias);
    return std::ranges::any_of(files_, [&](const MappedFile& file) {
      return file.path == name && file.range.contains(at) &&
             file.offset + static_cast<uint64_t>(at - file.range.begin) == page(s.offset.value);
    });
  };
  const Segment& first = image->segments().front();
  uint64_t low = ~0ull, high = 0;
  for (const Segment& s : image->segments())
    low = std::min(low, page(s.range.begin.value)), high = std::max(high, page(s.range.end.value + kPage - 1));
  for (const MappedFile& file : files_) {
    if (file.path != name || file.offset != page(first.offset.value)) continue;
    uint64_t bias = file.range.begin.value - page(first.range.begin.value);
    // Data segments may have been replaced by something else since, code is never.
    auto in_place = [&](const Segment& s) { return !s.executable || mapped_at(s, bias); };
    if (std::ranges::all_of(image->segments(), in_place))
      return LoadedImage{std::move(image), bias, {Addr(low + bias), Addr(high + bias)}};
  }
  return std::nullopt;
}

// The file's first page as the process saw it, which has its headers and usually its build id; as much as the core holds.
std::vector<uint8_t> CoreFile::first_page(const std::string& name) const {
  std::vector<uint8_t> page(kPage);
  for (const MappedFile& file : files_) {
    if (file.path != name || file.offset != 0) continue;
    const CoreSegment* found = segment(file.range.begin);
    if (!found || found->file_size == 0) continue;
    page.resize(read_some(file.range.begin, page));
    return page;
  }
  return {};
}

std::string CoreFile::build_id(const std::string& name) const {
  auto page = first_page(name);
  auto header = struct_at<Elf64_Ehdr>(page, 0);
  if (!header || std::memcmp(header->e_ident, ELFMAG, SELFMAG) != 0) return "";
  for (unsigned i = 0; i < header->e_phnum; i++) {
    auto segment = struct_at<Elf64_Phdr>(page, header->e_phoff + i * sizeof(Elf64_Phdr));
    if (!segment) break;
    if (segment->p_type != PT_NOTE || segment->p_offset >= page.size()) continue;
    uint64_t size = std::min<uint64_t>(segment->p_filesz, page.size() - segment->p_offset);
    for (Cursor at(std::span<const uint8_t>(page).subspan(segment->p_offset, size)); at.left() >= sizeof(Elf64_Nhdr);) {
      uint32_t name_size = at.read<uint32_t>(), id_size = at.read<uint32_t>(), type = at.read<uint32_t>();
      auto owner = at.take(align4(name_size));
      auto id = at.take(id_size);
      at.skip(std::min<uint64_t>(align4(id_size) - id_size, at.left()));
      if (!at.ok()) break;
      if (type == NT_GNU_BUILD_ID && name_size == 4 && std::memcmp(owner.data(), "GNU", 4) == 0)
        return fmt::format("{:02x}", fmt::join(id, ""));
    }
  }
  return "";
}

// By build id, or where one has none by its headers, which say where everything lies. The core's memory alone tells.
CoreFile::Identity CoreFile::identify(const std::string& name, const Image& image) const {
  std::string id = build_id(name);
  if (!id.empty()) return id == image.build_id() ? Identity::same : Identity::other;
  auto page = first_page(name);
  const Segment& first = image.segments().front();
  auto in_file =
      image.bytes({first.range.begin, first.range.begin + static_cast<int64_t>(std::min(first.file_size, kPage))});
  size_t size =
      std::min({page.size(), in_file.size(), size_t{0x400}});  // up to code, which a debugger may have changed
  if (size == 0 || first.offset.value != 0) return Identity::unknown;
  return std::memcmp(page.data(), in_file.data(), size) == 0 ? Identity::same : Identity::other;
}

void CoreFile::load(const std::string& name, const std::string& path, std::vector<std::string>* problems) {
  auto image = Image::open(path);
  Identity identity = image ? identify(name, **image) : Identity::other;
  std::string id = build_id(name);
  if (identity == Identity::other && !id.empty())
    for (const std::string& root : debug_roots()) {
      auto kept = Image::open(fmt::format("{}/.build-id/{}/{}", root, id.substr(0, 2), id.substr(2)));
      if (!kept || (*kept)->build_id() != id) continue;
      image = std::move(kept), identity = Identity::same;
      break;
    }
  if (identity == Identity::other) {
    std::string why = image ? fmt::format("{} is not the file that the process had mapped: its build id is {}", path,
                                          (*image)->build_id().empty() ? "missing" : (*image)->build_id())
                            : image.error().message;
    if (path != name) why += fmt::format(" (for {})", name);
    problems->push_back(fmt::format("{}{}; frames in it are unknown code", why, id.empty() ? "" : ", wanted is " + id));
    return;
  }
  auto loaded = place(name, *image);
  if (!loaded) return;
  if (identity == Identity::unknown) {
    problems->push_back(
        fmt::format("{}: the core has nothing to recognise the file by; it may be another, so frames in it are "
                    "not believed",
                    path));
    doubtful_.push_back(loaded->range);
  }
  images_.push_back(std::move(*loaded));
}

std::optional<LoadedImage> CoreFile::load_vdso() const {
  const CoreSegment* found = vdso_ ? segment(vdso_) : nullptr;
  if (!found || found->file_size == 0) return std::nullopt;
  auto bytes = bytes_.subspan(found->file_offset, found->file_size);
  auto image = Image::from_memory({bytes.begin(), bytes.end()}, "[vdso]");
  if (!image || (*image)->segments().empty()) return std::nullopt;
  uint64_t bias = vdso_.value - (*image)->segments().front().range.begin.value;
  return LoadedImage{*image, bias, found->range};
}

std::vector<std::pair<AddrRange, std::string>> CoreFile::files() const {
  std::vector<std::pair<AddrRange, std::string>> files;
  for (const MappedFile& file : files_) files.emplace_back(file.range, file.path);
  return files;
}

std::vector<LoadedImage> CoreFile::load_images(const std::string& executable, std::vector<std::string>* problems) {
  if (!cut_.empty()) problems->push_back(cut_);
  std::set<std::string> tried;
  std::string program;
  for (const MappedFile& file : files_)
    if (file.range.contains(entry_)) program = file.path;
  for (const MappedFile& file : files_) {
    if (!tried.insert(file.path).second) continue;
    std::string path = file.path == program && !executable.empty() ? executable : file.path;
    if (!is_image(file.path, path)) continue;
    load(file.path, path, problems);
  }
  if (auto vdso = load_vdso()) images_.push_back(std::move(*vdso));
  std::ranges::sort(images_, {}, [](const LoadedImage& i) { return i.range.begin; });
  return images_;
}

}  // namespace sonde::host
