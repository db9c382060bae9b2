#include "host/image/sectionless.h"

#include <dwarf.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <optional>

#include "core/base/cursor.h"

namespace sonde::host {
namespace {

class Finder {
 public:
  explicit Finder(const ElfFile& file) : file_(file) {}

  std::vector<FoundSection> find() {
    for (auto& p : file_.program_headers()) {
      if (p.p_type == PT_DYNAMIC) dynamic(ImageAddr(p.p_vaddr), p.p_filesz);
      if (p.p_type == PT_GNU_EH_FRAME) eh_frame(ImageAddr(p.p_vaddr), p.p_filesz);
    }
    return std::move(found_);
  }

 private:
  // From addr to the end of its segment's file bytes.
  std::span<const uint8_t> rest(ImageAddr addr) const {
    auto* s = file_.segment_at(addr);
    if (!s) return {};
    auto skip = static_cast<uint64_t>(addr - s->range.begin);
    return skip < s->file_size ? file_.at({addr, addr + static_cast<int64_t>(s->file_size - skip)})
                               : std::span<const uint8_t>{};
  }

  // Adds a section; its 1-based index, 0 if it is not in the file.
  uint32_t add(const char* name, uint32_t type, ImageAddr addr, uint64_t size, uint32_t link = 0) {
    auto bytes = rest(addr);
    if (bytes.empty() || size == 0 || size > bytes.size()) return 0;
    auto offset = static_cast<uint64_t>(bytes.data() - file_.bytes().data());
    found_.push_back({{name, addr, FileOffset(offset), size, type, SHF_ALLOC}, link});
    return static_cast<uint32_t>(found_.size());
  }

  void dynamic(ImageAddr addr, uint64_t size) {
    std::map<uint64_t, uint64_t> tags;
    Cursor c(rest(addr).first(std::min<uint64_t>(rest(addr).size(), size)));
    while (c.left() >= 16) {
      auto tag = c.read<uint64_t>(), value = c.read<uint64_t>();
      if (tag == DT_NULL) break;
      tags.emplace(tag, value);
    }
    auto at = [&](uint64_t tag) { return ImageAddr(tags.contains(tag) ? tags[tag] : 0); };
    uint32_t strings = add(".dynstr", SHT_STRTAB, at(DT_STRTAB), tags[DT_STRSZ]);
    uint64_t symbols = symbol_count(at(DT_HASH), at(DT_GNU_HASH));
    add(".dynsym", SHT_DYNSYM, at(DT_SYMTAB), symbols * sizeof(Elf64_Sym), strings);
    add(".dynamic", SHT_DYNAMIC, addr, size, strings);
    add(".gnu.version", SHT_GNU_versym, at(DT_VERSYM), symbols * 2);
    if (at(DT_VERDEF)) add(".gnu.version_d", SHT_GNU_verdef, at(DT_VERDEF), rest(at(DT_VERDEF)).size(), strings);
  }

  // Only the hash tables know how many dynamic symbols there are: SysV's chain count, or the end of GNU's last chain.
  uint64_t symbol_count(ImageAddr sysv, ImageAddr gnu) const {
    if (sysv) {
      Cursor c(rest(sysv));
      c.read<uint32_t>();
      return c.read<uint32_t>();
    }
    auto table = rest(gnu);
    Cursor c(table);
    uint64_t buckets = c.read<uint32_t>(), first = c.read<uint32_t>(), words = c.read<uint32_t>();
    c.read<uint32_t>();
    c.skip(words * 8);
    uint64_t last = 0;
    for (uint64_t i = 0; i < buckets && c.ok(); i++) last = std::max<uint64_t>(last, c.read<uint32_t>());
    if (!c.ok() || last < first) return c.ok() ? first : 0;
    Cursor chain(table, std::min<uint64_t>(table.size(), c.at() + (last - first) * 4));
    while (chain.ok() && !(chain.read<uint32_t>() & 1)) last++;
    return chain.ok() ? last + 1 : 0;
  }

  // LSB 5.0 Core, 10.6.2: version, three encodings, then the address of .eh_frame.
  void eh_frame(ImageAddr addr, uint64_t size) {
    if (!add(".eh_frame_hdr", SHT_PROGBITS, addr, size)) return;
    Cursor c(rest(addr));
    auto version = c.read<uint8_t>(), encoding = c.read<uint8_t>();
    c.read<uint16_t>();
    auto offset = c.read<int32_t>();
    if (!c.ok() || version != 1 || encoding != (DW_EH_PE_pcrel | DW_EH_PE_sdata4)) return;
    ImageAddr begin = addr + 4 + offset;
    Cursor entries(rest(begin));
    while (entries.left() >= 4) {
      uint64_t length = entries.read<uint32_t>();
      if (length == 0) break;
      if (length == 0xffffffff) length = entries.read<uint64_t>();
      if (!entries.ok() || length > entries.left()) break;
      entries.skip(length);
    }
    add(".eh_frame", SHT_PROGBITS, begin, entries.at());
  }

  const ElfFile& file_;
  std::vector<FoundSection> found_;
};

}  // namespace

std::vector<FoundSection> sections_of_segments(const ElfFile& file) { return Finder(file).find(); }

}  // namespace sonde::host
