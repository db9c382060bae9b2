// See exception_tables.h.
#include "host/tables/exception_tables.h"

#include <elf.h>

#include <algorithm>
#include <cstring>
#include <unordered_map>

#include "host/tables/cfi.h"

namespace sonde::host {
namespace {

constexpr uint8_t kOmit = 0xff;  // DW_EH_PE_omit
constexpr uint64_t kLeastEntry = 4;  // bytes of a call-site table

class Reader {
 public:
  explicit Reader(const Image& image) : image_(image) {
    for (const Segment& s : image.segments()) left_ += s.file_size / kLeastEntry;
  }

  ExceptionTables run() {
    for (const Section& section : image_.sections()) {
      if (section.name != ".eh_frame" || !section.addr) continue;
      CfiSection source{image_.bytes(section), section.addr};
      for (const Fde& fde : read_entries(source).fdes)
        if (fde.lsda_unknown || (fde.lsda && !read_area(fde))) out_.unreadable.push_back(fde.range);
    }
    std::ranges::sort(out_.ranges, {}, &ThrowingRange::begin);
    return std::move(out_);
  }

 private:
  bool read_area(const Fde& fde) {
    ImageAddr area = fde.lsda;
    if (fde.lsda_indirect) area = ImageAddr(pointer_at(area.value));
    std::span<const uint8_t> bytes;
    for (const Segment& s : image_.segments())
      if (s.range.contains(area))
        bytes = image_.bytes({area, std::min(s.range.end, s.range.begin + static_cast<int64_t>(s.file_size))});
    CfiSection source{bytes, area};
    Cursor at(bytes);
    uint64_t function = fde.range.begin.value, start = function;
    if (uint8_t encoding = at.read<uint8_t>(); encoding != kOmit) {
      auto given = read_encoded(at, encoding, source, start);
      if (!given) return false;
      start = *given;
    }
    if (at.read<uint8_t>() != kOmit) at.uleb();  // types
    uint8_t encoding = at.read<uint8_t>();
    uint64_t size = at.uleb();
    if (!at.ok() || size > at.left() || encoding & 0xf0) return false;
    Cursor table(bytes.first(at.at() + size), at.at());
    while (table.left() > 0) {
      if (left_ == 0) return false;  // tables of one file do not overlap, but those of a hostile one
      left_--;
      auto begin = read_encoded(table, encoding, source, 0), length = read_encoded(table, encoding, source, 0),
           pad = read_encoded(table, encoding, source, 0);
      table.uleb();  // action
      if (!begin || !length || !pad || !table.ok()) return false;
      if (*pad) out_.ranges.push_back({function + *begin, function + *begin + *length, start + *pad});
    }
    return true;
  }

  // The word that will stand there when the image is loaded, in the image's space; 0: unknown.
  uint64_t pointer_at(uint64_t address) {
    if (!relocated_known_) read_relocated();
    if (auto it = relocated_.find(address); it != relocated_.end()) return it->second;
    auto bytes = image_.bytes({ImageAddr(address), ImageAddr(address + 8)});
    return bytes.size() == 8 ? Cursor(bytes).read<uint64_t>() : 0;
  }

  void read_relocated() {
    relocated_known_ = true;
    uint32_t relative = image_.machine() == EM_AARCH64 ? uint32_t{R_AARCH64_RELATIVE} : uint32_t{R_X86_64_RELATIVE};
    for (const Section& section : image_.sections()) {
      if (section.type != SHT_RELA || !section.addr) continue;
      auto bytes = image_.bytes(section);
      for (size_t at = 0; at + sizeof(Elf64_Rela) <= bytes.size(); at += sizeof(Elf64_Rela)) {
        Elf64_Rela rela;
        std::memcpy(&rela, bytes.data() + at, sizeof rela);
        if (ELF64_R_TYPE(rela.r_info) == relative) relocated_[rela.r_offset] = static_cast<uint64_t>(rela.r_addend);
      }
    }
  }

  const Image& image_;
  uint64_t left_ = 0;  // entries that the file has room for
  bool relocated_known_ = false;
  std::unordered_map<uint64_t, uint64_t> relocated_;
  ExceptionTables out_;
};

}  // namespace

ExceptionTables read_exception_tables(const Image& image) { return Reader(image).run(); }

}  // namespace sonde::host
