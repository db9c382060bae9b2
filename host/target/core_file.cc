// Notes: NT_PRSTATUS per thread (the first is the thread that died), NT_PRPSINFO, NT_AUXV, NT_FILE (fs/binfmt_elf.c,
// fill_files_note: count, page size, {start, end, offset in pages} each, then the names). All of it is input that may be
// cut off or damaged at any byte.
#include "host/target/core_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/procfs.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <set>

#include "core/base/cursor.h"

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
  for (uint64_t i = 0; i < count; i++) {
    auto segment = struct_at<Elf64_Phdr>(bytes_, header->e_phoff + i * sizeof(Elf64_Phdr));
    if (!segment) return fail(fmt::format("{}: ends within its program headers", path));
    uint64_t there =
        segment->p_offset < bytes_.size() ? std::min(segment->p_filesz, bytes_.size() - segment->p_offset) : 0;
    if (segment->p_type == PT_NOTE) {
      auto done = read_notes(bytes_.subspan(there ? segment->p_offset : 0, there));
      if (!done) return fail(fmt::format("{}: {}", path, done.error().message));
    } else if (segment->p_type == PT_LOAD && segment->p_vaddr + segment->p_memsz > segment->p_vaddr) {
      segments_.push_back({{Addr(segment->p_vaddr), Addr(segment->p_vaddr + segment->p_memsz)},
                           segment->p_offset,
                           std::min(there, segment->p_memsz),
                           (segment->p_flags & PF_W) != 0,
                           (segment->p_flags & PF_X) != 0});
    }
  }
  std::ranges::sort(segments_, {}, [](const CoreSegment& s) { return s.range.begin; });
  if (threads_.empty()) return fail(fmt::format("{}: a core file without threads: cut off, or not of a process", path));
  return {};
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
  if (!found || !found->writable) return false;
  *stack = {found->range.begin, found->range.begin + static_cast<int64_t>(found->file_size)};
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

// Where the image lies: by the mapping of its code.
std::optional<LoadedImage> CoreFile::place(const std::string& name, std::shared_ptr<const Image> image) const {
  std::optional<uint64_t> bias;
  uint64_t low = ~0ull, high = 0;
  for (const Segment& s : image->segments()) {
    uint64_t first = s.offset.value & ~(kPage - 1), last = s.offset.value + s.file_size;
    for (const MappedFile& file : files_)
      if (file.path == name && s.executable && !bias && file.offset >= first && file.offset < last)
        bias = file.range.begin.value - file.offset + s.offset.value - s.range.begin.value;
    low = std::min(low, s.range.begin.value & ~(kPage - 1)),
    high = std::max(high, (s.range.end.value + kPage - 1) & ~(kPage - 1));
  }
  if (!bias) return std::nullopt;
  return LoadedImage{std::move(image), *bias, {Addr(low + *bias), Addr(high + *bias)}};
}

std::optional<LoadedImage> CoreFile::load(const std::string& name, const std::string& path,
                                          std::vector<std::string>* problems) const {
  auto image = Image::open(path);
  if (!image) return problems->push_back(image.error().message), std::nullopt;
  auto loaded = place(name, *image);
  if (!loaded) return std::nullopt;
  const Section* id = (*image)->section(".note.gnu.build-id");
  if (!id || !id->addr) return loaded;
  auto in_file = (*image)->bytes(*id);
  std::vector<uint8_t> in_core(in_file.size());
  if (read_some(loaded->to_target(id->addr), in_core) < in_core.size())
    problems->push_back(fmt::format("{}: the core does not hold its build id; taken to be the right file", path));
  else if (!std::ranges::equal(in_core, in_file))
    return problems->push_back(fmt::format("{}: not the file that the process had mapped: its build id differs", path)),
           std::nullopt;
  return loaded;
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

std::vector<LoadedImage> CoreFile::load_images(const std::string& executable, std::vector<std::string>* problems) {
  std::set<std::string> tried;
  std::string program;
  for (const MappedFile& file : files_)
    if (file.range.contains(entry_)) program = file.path;
  for (const MappedFile& file : files_) {
    if (!tried.insert(file.path).second) continue;
    std::string path = file.path == program && !executable.empty() ? executable : file.path;
    if (!is_image(file.path, path)) continue;
    if (auto loaded = load(file.path, path, problems)) images_.push_back(std::move(*loaded));
  }
  if (auto vdso = load_vdso()) images_.push_back(std::move(*vdso));
  std::ranges::sort(images_, {}, [](const LoadedImage& i) { return i.range.begin; });
  return images_;
}

}  // namespace sonde::host
