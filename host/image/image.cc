// Opening checks headers, segments and section bounds; symbols and functions are read at their first use, once.
#include "host/image/image.h"

#include <elf.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <unordered_map>

#include "host/image/debug_file.h"
#include "host/image/elf_file.h"
#include "host/image/functions.h"
#include "host/image/inlined.h"
#include "host/image/source_lines.h"

namespace sonde::host {

struct Image::Impl {
  std::string path;
  std::unique_ptr<ElfFile> file;
  std::unique_ptr<ElfFile> debug;  // separate debug file; holds the names of `symbols`
  std::unique_ptr<ElfFile>
      debug_sections;  // the same file, where a section of it is wanted before or without its symbols
  bool looked_for_sections = false;
  std::string build_id;
  std::optional<std::string> interpreter;
  std::string soname;

  std::string debug_problem;

  // elfutils' handles are not thread-safe: everything below is filled and used under this lock, until it stands.
  std::mutex reading;
  std::once_flag once;
  bool stripped = true;
  std::vector<Function> functions;
  std::unordered_map<std::string_view, ImageAddr> symbols;
  std::once_flag lines_once;
  std::unique_ptr<ElfFile> lines_file;  // if neither `file` nor `debug` has debug information
  std::unique_ptr<SourceLines> lines;

  static Result<std::shared_ptr<const Image>> make(Result<FileBytes> bytes, std::string path);
  void read();
  bool has_symtab(const ElfFile* elf) const {
    return elf && std::ranges::any_of(elf->sections(), [](auto& s) { return s.type == SHT_SYMTAB && s.size > 24; });
  }
  void index(std::vector<RawSymbol>& all);
  std::vector<ImageRange> stubs() const;
  const ElfFile* with_debug_info();
  void open_lines();
  void read_once() {
    std::call_once(once, [this] { read(); });
  }
};

void Image::Impl::read() {
  std::lock_guard lock(reading);
  if (!has_symtab(file.get())) debug = find_debug_file(*file, path, &debug_problem);
  const ElfFile* with_symbols = has_symtab(file.get()) ? file.get() : has_symtab(debug.get()) ? debug.get() : nullptr;
  std::vector<RawSymbol> all;
  if (with_symbols) read_symbols(*with_symbols, false, all);
  stripped = all.empty();
  read_symbols(*file, true, all);
  std::vector<FdeRange> ranges;
  if (auto* s = file->section(".eh_frame")) ranges = read_fde_ranges(file->data(*s), s->addr, file->header().e_machine);
  // A debug file's headers are not this file's: what counts as code is decided here.
  std::erase_if(ranges, [&](auto& r) {
    auto* s = file->segment_at(r.range.begin);
    return !s || !s->executable || r.range.end > s->range.end;
  });
  for (auto& s : all) {
    auto* segment = s.executable ? file->segment_at(s.addr) : nullptr;
    s.executable = segment && segment->executable;
    if (segment) s.limit = std::min(s.limit, segment->range.end.value);
  }
  index(all);
  functions = build_functions(std::move(all), ranges, stripped, stubs());
}

void Image::Impl::index(std::vector<RawSymbol>& all) {
  auto rank = [](const RawSymbol& s) {
    return std::pair(s.binding == STB_LOCAL  ? 2
                     : s.binding == STB_WEAK ? 1
                                             : 0,
                     !s.version.empty() && !s.default_version);
  };
  std::unordered_map<std::string_view, const RawSymbol*> best;
  best.reserve(all.size());
  for (auto& s : all) {
    auto [it, fresh] = best.try_emplace(s.name, &s);
    if (!fresh && rank(s) < rank(*it->second)) it->second = &s;
  }
  symbols.reserve(best.size());
  for (auto& [name, s] : best) symbols.emplace(name, s->addr);
}

std::vector<ImageRange> Image::Impl::stubs() const {
  std::vector<ImageRange> ranges;
  for (auto& s : file->sections())
    if (s.name == ".plt" || s.name.starts_with(".plt.") || s.name == ".iplt")
      ranges.push_back({s.addr, s.addr + static_cast<int64_t>(s.size)});
  return ranges;
}

Image::Image() : impl_(std::make_unique<Impl>()) {}
Image::~Image() = default;

namespace {

Result<void> check_program(const ElfFile& file) {
  auto& header = file.header();
  if (header.e_type == ET_REL) return fail("is an object file, not a program or library");
  if (header.e_type == ET_CORE) return fail("is a core file, not a program or library");
  if (header.e_type != ET_EXEC && header.e_type != ET_DYN)
    return fail(fmt::format("is neither a program nor a library (ELF type {})", header.e_type));
  if (header.e_machine != EM_X86_64 && header.e_machine != EM_AARCH64)
    return fail(
        fmt::format("is for another processor (ELF machine {}); sonde handles x86-64 and AArch64", header.e_machine));
  if (file.segments().empty()) return fail("has no loadable segment");
  for (auto& s : file.sections())
    if ((s.flags & SHF_EXECINSTR) && s.type == SHT_NOBITS && s.size)
      return fail("is a debug file without code; name the program itself");
  for (auto& s : file.segments())
    if (s.file_size && (s.offset.value > file.bytes().size() || s.file_size > file.bytes().size() - s.offset.value))
      return fail(fmt::format("is cut off: its segment at {:#x} ends beyond its {} bytes", s.offset.value,
                              file.bytes().size()));
  return {};
}

std::optional<std::string> read_interpreter(const ElfFile& file) {
  for (auto& p : file.program_headers()) {
    if (p.p_type != PT_INTERP || p.p_offset > file.bytes().size() || p.p_filesz > file.bytes().size() - p.p_offset)
      continue;
    auto* begin = reinterpret_cast<const char*>(file.bytes().data()) + p.p_offset;
    return std::string(begin, strnlen(begin, p.p_filesz));
  }
  return std::nullopt;
}

std::string read_soname(const ElfFile& file) {
  auto it = std::ranges::find(file.sections(), uint32_t{SHT_DYNAMIC}, &Section::type);
  const Section* string_table = it == file.sections().end() ? nullptr : file.linked(*it);
  if (!string_table) return "";
  auto entries = file.raw(*it), strings = file.raw(*string_table);
  for (size_t at = 0; entries.size() - at >= sizeof(Elf64_Dyn); at += sizeof(Elf64_Dyn)) {
    Elf64_Dyn entry;
    std::memcpy(&entry, entries.data() + at, sizeof entry);
    if (entry.d_tag == DT_NULL) break;
    if (entry.d_tag != DT_SONAME || entry.d_un.d_val >= strings.size()) continue;
    auto* begin = reinterpret_cast<const char*>(strings.data()) + entry.d_un.d_val;
    return std::string(begin, strnlen(begin, strings.size() - entry.d_un.d_val));
  }
  return "";
}

}  // namespace

Result<std::shared_ptr<const Image>> Image::Impl::make(Result<FileBytes> bytes, std::string path) {
  auto file = bytes ? ElfFile::open(std::move(*bytes)) : std::unexpected(bytes.error());
  auto good = file ? check_program(**file) : std::unexpected(file.error());
  if (!good) return fail(fmt::format("{} {}", path, good.error().message));
  std::shared_ptr<Image> image(new Image);
  image->impl_->path = std::move(path);
  image->impl_->build_id = (*file)->build_id();
  image->impl_->interpreter = read_interpreter(**file);
  image->impl_->soname = read_soname(**file);
  image->impl_->file = std::move(*file);
  return image;
}

Result<std::shared_ptr<const Image>> Image::open(const std::string& path) {
  return Impl::make(FileBytes::read(path), path);
}

Result<std::shared_ptr<const Image>> Image::from_memory(std::vector<uint8_t> bytes, std::string name) {
  return Impl::make(FileBytes(std::move(bytes)), std::move(name));
}

const std::string& Image::path() const { return impl_->path; }
std::string_view Image::build_id() const { return impl_->build_id; }
uint16_t Image::machine() const { return impl_->file->header().e_machine; }
uint16_t Image::type() const { return impl_->file->header().e_type; }
ImageAddr Image::entry() const { return ImageAddr(impl_->file->header().e_entry); }
std::optional<std::string> Image::interpreter() const { return impl_->interpreter; }
std::string_view Image::soname() const { return impl_->soname; }
std::span<const Segment> Image::segments() const { return impl_->file->segments(); }
std::span<const Section> Image::sections() const { return impl_->file->sections(); }
const Section* Image::section(std::string_view name) const { return impl_->file->section(name); }
std::span<const uint8_t> Image::bytes(ImageRange range) const { return impl_->file->at(range); }

std::span<const uint8_t> Image::bytes(const Section& section) const {
  std::lock_guard lock(impl_->reading);
  return impl_->file->data(section);
}

std::span<const uint8_t> Image::debug_section(std::string_view name) const {
  std::lock_guard lock(impl_->reading);
  auto contents = [&](const ElfFile& file) -> std::span<const uint8_t> {
    for (auto& compressed : {std::string(name), ".z" + std::string(name.substr(1))})
      if (auto* s = file.section(compressed)) return file.data(*s);
    return {};
  };
  if (auto own = contents(*impl_->file); !own.empty()) return own;
  if (!impl_->looked_for_sections)
    impl_->debug_sections = find_debug_file(*impl_->file, impl_->path, &impl_->debug_problem);
  impl_->looked_for_sections = true;
  return impl_->debug_sections ? contents(*impl_->debug_sections) : std::span<const uint8_t>{};
}

bool Image::stripped() const {
  impl_->read_once();
  return impl_->stripped;
}

std::span<const Function> Image::functions() const {
  impl_->read_once();
  return impl_->functions;
}

std::optional<NameHit> Image::find(ImageAddr addr) const {
  auto all = functions();
  auto it = std::ranges::upper_bound(all, addr, {}, [](auto& f) { return f.range.begin; });
  if (it == all.begin() || !(it - 1)->range.contains(addr)) return std::nullopt;
  return NameHit{&*(it - 1), static_cast<uint64_t>(addr - (it - 1)->range.begin)};
}

std::optional<ImageAddr> Image::symbol(std::string_view raw_name) const {
  impl_->read_once();
  auto it = impl_->symbols.find(raw_name);
  return it == impl_->symbols.end() ? std::nullopt : std::optional(it->second);
}

bool Image::is_static() const {
  return !impl_->interpreter &&
         std::ranges::none_of(impl_->file->program_headers(), [](auto& p) { return p.p_type == PT_DYNAMIC; });
}

// Under the lock, after read().
const ElfFile* Image::Impl::with_debug_info() {
  auto has = [](const ElfFile* elf) { return elf && (elf->section(".debug_info") || elf->section(".zdebug_info")); };
  if (has(file.get())) return file.get();
  if (!debug && !lines_file) lines_file = find_debug_file(*file, path, &debug_problem);
  for (const ElfFile* elf : {debug.get(), lines_file.get()})
    if (has(elf)) return elf;
  return nullptr;
}

void Image::Impl::open_lines() {
  std::lock_guard lock(reading);
  const ElfFile* from = with_debug_info();
  if (from) lines = SourceLines::open(*from, &debug_problem);
}

bool Image::has_inlined(const std::string& glob) const {
  impl_->read_once();
  std::lock_guard lock(impl_->reading);
  const ElfFile* from = impl_->with_debug_info();
  return from && knows_inlined(*from, glob);
}

std::vector<SourceRow> Image::source_rows(ImageAddr addr) const {
  impl_->read_once();
  std::call_once(impl_->lines_once, [this] { impl_->open_lines(); });
  std::lock_guard lock(impl_->reading);
  return impl_->lines ? impl_->lines->rows(addr) : std::vector<SourceRow>{};
}

LineCode Image::line_code(const std::string& file, unsigned line) const {
  impl_->read_once();
  std::call_once(impl_->lines_once, [this] { impl_->open_lines(); });
  std::lock_guard lock(impl_->reading);
  return impl_->lines ? impl_->lines->code_of(file, line) : LineCode{};
}

std::string Image::debug_problem() const {
  std::lock_guard lock(impl_->reading);
  return impl_->debug_problem.empty() ? "" : fmt::format("{}: {}", impl_->path, impl_->debug_problem);
}

std::string display_name(const Image& image, const Function& function) {
  if (!function.name.empty()) return demangle(function.name);
  return fmt::format("{}+{:#x}", std::filesystem::path(image.path()).filename().string(), function.range.begin.value);
}

}  // namespace sonde::host
