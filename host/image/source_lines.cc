#include "host/image/source_lines.h"

#include <dwarf.h>
#include <elf.h>
#include <elfutils/libdw.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <optional>

namespace sonde::host {
namespace {

struct UnitRange {
  uint64_t begin, end;
  Dwarf_Off unit;  // of its DIE
};

struct Scopes {
  Dwarf_Die* dies = nullptr;
  int count = 0;
  ~Scopes() { free(dies); }
};

bool is_function(Dwarf_Die* die) {
  int tag = dwarf_tag(die);
  return tag == DW_TAG_inlined_subroutine || tag == DW_TAG_subprogram;
}

std::string name_of(Dwarf_Die* die) {
  Dwarf_Attribute attribute;
  for (unsigned key : {DW_AT_linkage_name, DW_AT_MIPS_linkage_name})
    if (dwarf_attr_integrate(die, key, &attribute))
      if (const char* raw = dwarf_formstring(&attribute)) return demangle(raw);
  const char* name = dwarf_attr_integrate(die, DW_AT_name, &attribute) ? dwarf_formstring(&attribute) : nullptr;
  return name ? name : "";
}

unsigned number(Dwarf_Die* die, unsigned key) {
  Dwarf_Attribute attribute;
  Dwarf_Word value;
  return dwarf_attr(die, key, &attribute) && dwarf_formudata(&attribute, &value) == 0 ? static_cast<unsigned>(value)
                                                                                      : 0;
}

// Where the inlined call of `die` stands. A split unit may have its own list of files, or use the skeleton's.
SourceLine call_site(Dwarf_Die* die, Dwarf_Die* unit, Dwarf_Die* skeleton) {
  SourceLine line{"", number(die, DW_AT_call_line), number(die, DW_AT_call_column)};
  unsigned index = number(die, DW_AT_call_file);
  for (Dwarf_Die* from : {unit, skeleton}) {
    Dwarf_Files* files;
    size_t count;
    if (!line.file.empty() || dwarf_getsrcfiles(from, &files, &count) != 0 || index >= count) continue;
    if (const char* path = dwarf_filesrc(files, index, nullptr, nullptr)) line.file = path;
  }
  return line;
}

SourceLine line_at(Dwarf_Die* unit, uint64_t pc) {
  SourceLine out;
  Dwarf_Line* line = dwarf_getsrc_die(unit, pc);
  int n;
  if (!line) return out;
  if (const char* path = dwarf_linesrc(line, nullptr, nullptr)) out.file = path;
  if (dwarf_lineno(line, &n) == 0) out.line = static_cast<unsigned>(n);
  if (dwarf_linecol(line, &n) == 0) out.column = static_cast<unsigned>(n);
  return out;
}

bool is_path_end(std::string_view path, std::string_view end) {
  return path.ends_with(end) && (path.size() == end.size() || path[path.size() - end.size() - 1] == '/');
}

}  // namespace

struct SourceLines::Impl {
  Dwarf* dwarf = nullptr;
  std::optional<std::vector<UnitRange>> units;  // sorted; made when the file's own index has no answer

  ~Impl() { dwarf_end(dwarf); }
  void list_units();
  bool unit_at(uint64_t pc, Dwarf_Die* unit);
};

// Compilers other than gcc write no .debug_aranges.
void SourceLines::Impl::list_units() {
  units.emplace();
  Dwarf_CU* unit = nullptr;
  Dwarf_Die die;
  while (dwarf_get_units(dwarf, unit, &unit, nullptr, nullptr, &die, nullptr) == 0) {
    Dwarf_Addr base, begin, end;
    for (ptrdiff_t at = 0; (at = dwarf_ranges(&die, at, &base, &begin, &end)) > 0;)
      if (begin < end) units->push_back({begin, end, dwarf_dieoffset(&die)});
  }
  std::ranges::sort(*units, {}, &UnitRange::begin);
}

bool SourceLines::Impl::unit_at(uint64_t pc, Dwarf_Die* unit) {
  if (dwarf_addrdie(dwarf, pc, unit)) return true;
  if (!units) list_units();
  auto found = std::ranges::upper_bound(*units, pc, {}, &UnitRange::begin);
  if (found == units->begin() || pc >= std::prev(found)->end) return false;
  return dwarf_offdie(dwarf, std::prev(found)->unit, unit) != nullptr;
}

std::unique_ptr<SourceLines> SourceLines::open(const ElfFile& file, std::string* why) {
  for (const char* name : {".debug_info", ".debug_line"}) {
    const Section* section = file.section(name);
    if (!section || !(section->flags & SHF_COMPRESSED) || !file.data(*section).empty()) continue;
    Elf64_Chdr header{};
    auto raw = file.raw(*section);
    std::memcpy(&header, raw.data(), std::min(raw.size(), sizeof header));
    return *why = fmt::format("its section {} cannot be unpacked (compression method {}): no source lines", name,
                              header.ch_type),
           nullptr;
  }
  Dwarf* dwarf = dwarf_begin_elf(file.handle(), DWARF_C_READ, nullptr);
  if (!dwarf) return nullptr;
  auto impl = std::make_unique<Impl>();
  impl->dwarf = dwarf;
  return std::unique_ptr<SourceLines>(new SourceLines(std::move(impl)));
}

LineCode SourceLines::code_of(const std::string& file, unsigned line) {
  LineCode code;
  Dwarf_CU* unit = nullptr;
  Dwarf_Die die;
  while (dwarf_get_units(impl_->dwarf, unit, &unit, nullptr, nullptr, &die, nullptr) == 0) {
    Dwarf_Lines* lines;
    size_t count;
    if (dwarf_getsrclines(&die, &lines, &count) != 0) continue;
    const char* last_path = nullptr;  // libdw gives one file's path always from the same memory
    bool meant = false;
    for (size_t i = 0; i < count; i++) {
      Dwarf_Line* row = dwarf_onesrcline(lines, i);
      const char* path = dwarf_linesrc(row, nullptr, nullptr);
      bool statement = false, end = false;
      int number = 0;
      Dwarf_Addr address = 0;
      if (!path || dwarf_lineno(row, &number) != 0 || dwarf_lineaddr(row, &address) != 0) continue;
      if (path != last_path) last_path = path, meant = is_path_end(path, file);
      dwarf_linebeginstatement(row, &statement), dwarf_lineendsequence(row, &end);
      auto its = static_cast<unsigned>(number);
      if (!meant || end || !address) continue;  // 0: the linker has left the function out
      code.file_known = true;
      if (!statement || its < line || (code.line && its > code.line)) continue;
      if (its != code.line) code.line = its, code.addresses.clear();
      code.addresses.push_back(ImageAddr(address));
    }
  }
  std::ranges::sort(code.addresses);
  code.addresses.erase(std::unique(code.addresses.begin(), code.addresses.end()), code.addresses.end());
  return code;
}

SourceLines::SourceLines(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
SourceLines::~SourceLines() = default;

std::vector<SourceRow> SourceLines::rows(ImageAddr at) {
  Dwarf_Die skeleton, split, *unit = &skeleton;
  if (!impl_->unit_at(at.value, &skeleton)) return {};
  uint8_t type = 0;
  if (dwarf_cu_info(skeleton.cu, nullptr, &type, nullptr, &split, nullptr, nullptr, nullptr) == 0 &&
      type == DW_UT_skeleton && dwarf_tag(&split) != DW_TAG_invalid)
    unit = &split;
  SourceLine line = line_at(&skeleton, at.value);
  std::vector<SourceRow> rows;
  Scopes inner, all;
  inner.count = dwarf_getscopes(unit, at.value, &inner.dies);
  Dwarf_Die* end = inner.dies + std::max(inner.count, 0);
  Dwarf_Die* innermost = std::find_if(inner.dies, end, [](Dwarf_Die& die) { return is_function(&die); });
  // Beyond an inlined call's entry that list has the scopes of its definition, this one those of the call.
  if (innermost != end) all.count = dwarf_getscopes_die(innermost, &all.dies);
  for (int i = 0; i < all.count; i++) {
    Dwarf_Die* die = &all.dies[i];
    if (!is_function(die)) continue;
    bool inlined = dwarf_tag(die) == DW_TAG_inlined_subroutine;
    rows.push_back({name_of(die), std::move(line), inlined});
    line = {};
    if (!inlined) return rows;
    line = call_site(die, unit, &skeleton);
  }
  if (!line.file.empty() || line.line) rows.push_back({"", std::move(line), false});
  return rows;
}

}  // namespace sonde::host
