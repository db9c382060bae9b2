#include "host/image/symbols.h"

#include <algorithm>
#include <cstring>
#include <unordered_map>

namespace sonde::host {
namespace {

std::string_view string_at(std::span<const uint8_t> strings, uint64_t offset) {
  if (offset >= strings.size()) return {};
  auto* begin = reinterpret_cast<const char*>(strings.data()) + offset;
  auto* end = static_cast<const char*>(std::memchr(begin, 0, strings.size() - offset));
  return end ? std::string_view(begin, static_cast<size_t>(end - begin)) : std::string_view{};
}

// Version definitions by index (.gnu.version_d); only they name the versions of symbols that a file defines.
std::unordered_map<uint16_t, std::string_view> read_versions(const ElfFile& file, std::span<const uint8_t> strings) {
  std::unordered_map<uint16_t, std::string_view> versions;
  auto it = std::ranges::find(file.sections(), uint32_t{SHT_GNU_verdef}, &Section::type);
  if (it == file.sections().end()) return versions;
  auto bytes = file.raw(*it);
  for (size_t at = 0, left = 0x10000; left > 0; left--) {
    Elf64_Verdef def;
    Elf64_Verdaux aux;
    if (bytes.size() < sizeof def || at > bytes.size() - sizeof def) break;
    std::memcpy(&def, bytes.data() + at, sizeof def);
    size_t name_at = at + def.vd_aux;
    if (bytes.size() >= sizeof aux && name_at <= bytes.size() - sizeof aux && !(def.vd_flags & VER_FLG_BASE)) {
      std::memcpy(&aux, bytes.data() + name_at, sizeof aux);
      versions[def.vd_ndx] = string_at(strings, aux.vda_name);
    }
    if (def.vd_next == 0) break;
    at += def.vd_next;
  }
  return versions;
}

bool mapping_symbol(std::string_view name) {  // AArch64 ELF, 5.5.4; annobin's notes about compiler options
  return (name.size() >= 2 && name[0] == '$' &&
          (name[1] == 'x' || name[1] == 'd' || name[1] == 'a' || name[1] == 't') &&
          (name.size() == 2 || name[2] == '.')) ||
         name.starts_with(".annobin") || name.starts_with(".L");
}

// Where a symbol's section ends, and whether it holds code.
struct Place {
  uint64_t begin, end;
  bool executable;
};
Place place_of(const ElfFile& file, const Elf64_Sym& sym) {
  auto& sections = file.sections();
  if (file.sectionless()) {
    auto* s = file.segment_at(ImageAddr(sym.st_value));
    return s ? Place{s->range.begin.value, s->range.end.value, s->executable} : Place{0, 0, false};
  }
  if (sym.st_shndx < SHN_LORESERVE && sym.st_shndx - 1u < sections.size()) {
    auto& s = sections[sym.st_shndx - 1u];
    return {s.addr.value, s.addr.value + s.size, (s.flags & SHF_EXECINSTR) != 0};
  }
  for (auto& s : sections)  // SHN_XINDEX, or indices of sections that were removed
    if ((s.flags & SHF_ALLOC) && s.addr.value <= sym.st_value && sym.st_value - s.addr.value < s.size)
      return {s.addr.value, s.addr.value + s.size, (s.flags & SHF_EXECINSTR) != 0};
  return {0, 0, false};
}

}  // namespace

VersionedName split_version(std::string_view name) {
  auto at = name.find('@');
  if (at == 0 || at == std::string_view::npos || at + 1 == name.size()) return {name, {}, false};
  bool is_default = name[at + 1] == '@';
  return {name.substr(0, at), name.substr(at + (is_default ? 2 : 1)), is_default};
}

void read_symbols(const ElfFile& file, bool dynamic, std::vector<RawSymbol>& out) {
  auto table =
      std::ranges::find(file.sections(), dynamic ? uint32_t{SHT_DYNSYM} : uint32_t{SHT_SYMTAB}, &Section::type);
  if (table == file.sections().end()) return;
  const Section* string_table = file.linked(*table);
  if (!string_table) return;
  auto symbols = file.data(*table), strings = file.data(*string_table);
  std::span<const uint8_t> version_indices;
  std::unordered_map<uint16_t, std::string_view> versions;
  if (dynamic) {
    if (auto it = std::ranges::find(file.sections(), uint32_t{SHT_GNU_versym}, &Section::type);
        it != file.sections().end())
      version_indices = file.raw(*it);
    versions = read_versions(file, strings);
  }
  size_t count = symbols.size() / sizeof(Elf64_Sym);
  out.reserve(out.size() + count);
  for (size_t i = 1; i < count; i++) {
    Elf64_Sym sym;
    std::memcpy(&sym, symbols.data() + i * sizeof sym, sizeof sym);
    uint8_t type = ELF64_ST_TYPE(sym.st_info);
    if (sym.st_shndx == SHN_UNDEF || sym.st_shndx == SHN_ABS || sym.st_shndx == SHN_COMMON || sym.st_value == 0 ||
        type == STT_SECTION || type == STT_FILE || type == STT_TLS)
      continue;
    auto [name, version, is_default] = split_version(string_at(strings, sym.st_name));
    if (name.empty() || (type == STT_NOTYPE && mapping_symbol(name))) continue;
    Place place = place_of(file, sym);
    if (version.empty() && version_indices.size() / 2 > i) {
      uint16_t index;  // bit 15: hidden, reached by name@version only
      std::memcpy(&index, version_indices.data() + 2 * i, 2);
      if (auto it = versions.find(index & 0x7fff); it != versions.end())
        version = it->second, is_default = !(index & 0x8000);
    }
    bool within = sym.st_value >= place.begin && sym.st_value < place.end;
    out.push_back({ImageAddr(sym.st_value), sym.st_size, place.end, name, version, is_default, dynamic,
                   within && place.executable, type, static_cast<uint8_t>(ELF64_ST_BIND(sym.st_info))});
  }
}

}  // namespace sonde::host
