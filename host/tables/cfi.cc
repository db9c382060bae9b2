// Reads entry by entry; what cannot be understood is counted and left out, and reading goes on behind it.
#include "host/tables/cfi.h"

namespace sonde::host {
namespace {

// DW_EH_PE_* (Linux Standard Base Core 5.0, table 10.5 and 10.6).
enum : uint8_t {
  pe_absptr = 0x00,
  pe_uleb128 = 0x01,
  pe_udata2 = 0x02,
  pe_udata4 = 0x03,
  pe_udata8 = 0x04,
  pe_sleb128 = 0x09,
  pe_sdata2 = 0x0a,
  pe_sdata4 = 0x0b,
  pe_sdata8 = 0x0c,
  pe_pcrel = 0x10,
  pe_textrel = 0x20,
  pe_datarel = 0x30,
  pe_funcrel = 0x40,
  pe_aligned = 0x50,
  pe_indirect = 0x80,
  pe_omit = 0xff,
};

std::optional<uint64_t> read_format(Cursor& at, uint8_t format) {
  uint64_t value;
  switch (format) {
    case pe_absptr:
    case pe_udata8:
    case pe_sdata8: value = at.read<uint64_t>(); break;
    case pe_uleb128: value = at.uleb(); break;
    case pe_sleb128: value = static_cast<uint64_t>(at.sleb()); break;
    case pe_udata2: value = at.read<uint16_t>(); break;
    case pe_sdata2: value = static_cast<uint64_t>(int64_t{at.read<int16_t>()}); break;
    case pe_udata4: value = at.read<uint32_t>(); break;
    case pe_sdata4: value = static_cast<uint64_t>(int64_t{at.read<int32_t>()}); break;
    default: return std::nullopt;
  }
  if (!at.ok()) return std::nullopt;
  return value;
}

Block rest_of(const Cursor& at) { return {static_cast<uint32_t>(at.at()), static_cast<uint32_t>(at.left())}; }

// Letters behind 'z' tell what the augmentation data holds, in this order.
bool read_augmentation(Cursor& data, std::string_view letters, const CfiSection& section, Cie* cie) {
  for (size_t i = 0; i < letters.size(); i++) {
    switch (letters[i]) {
      case 'R': cie->fde_encoding = data.read<uint8_t>(); break;
      case 'L': cie->lsda_encoding = data.read<uint8_t>(); break;
      case 'P': {
        uint8_t encoding = data.read<uint8_t>();
        if (encoding == pe_omit) break;
        if (!read_encoded(data, encoding & ~pe_indirect, section, 0)) return false;
        break;
      }
      case 'S': cie->signal_frame = true; break;
      case 'B': break;  // AArch64: signed with the B key, which is stripped alike
      case 'G': break;  // AArch64: memory tagging of the stack, of no interest to rows
      default:
        cie->understood = false;
        // The encoding of ranges may lie behind what is not understood.
        return letters.find('R', i) == letters.npos;
    }
    if (!data.ok()) return false;
  }
  return true;
}

// `at` stands behind the id and ends with the entry.
std::optional<Cie> read_cie(Cursor at, bool wide_length, const CfiSection& section) {
  Cie cie;
  uint8_t version = at.read<uint8_t>();
  cie.wide_id = section.debug_frame && wide_length;
  if (version == 0 && wide_length && !section.debug_frame) {  // an 8-byte id: these are its upper half
    at.skip(3);
    version = at.read<uint8_t>();
    cie.wide_id = true;
  }
  if (version != 1 && version != 3 && version != 4) return std::nullopt;
  std::string letters;
  while (char letter = static_cast<char>(at.read<uint8_t>())) letters += letter;
  if (version == 4) {
    if (at.read<uint8_t>() != 8) return std::nullopt;  // address size
    if (at.read<uint8_t>() != 0) return std::nullopt;  // segment selector size
  }
  if (letters.starts_with("eh")) at.skip(8), letters.erase(0, 2);  // GCC 2: a pointer
  cie.code_align = at.uleb();
  cie.data_align = at.sleb();
  cie.return_register = version == 1 ? at.read<uint8_t>() : at.uleb();
  if (letters.starts_with('z')) {
    cie.has_size = true;
    uint64_t size = at.uleb();
    if (size > at.left()) return std::nullopt;
    Cursor data(section.bytes.first(at.at() + size), at.at());
    at.skip(size);
    if (!read_augmentation(data, std::string_view(letters).substr(1), section, &cie)) return std::nullopt;
  } else if (!letters.empty()) {
    return std::nullopt;  // data of unknown size follows
  }
  if (!at.ok()) return std::nullopt;
  cie.instructions = rest_of(at);
  return cie;
}

// Null, whatever it is relative to, means none.
void read_lsda(Cursor data, const CfiSection& section, Fde* fde) {
  const Cie& cie = *fde->cie;
  fde->lsda_unknown = !cie.understood;
  if (cie.lsda_encoding == pe_omit) return;
  Cursor raw = data;
  auto null = read_format(raw, cie.lsda_encoding & 0x0f);
  if (null && *null == 0) return;
  auto address = read_encoded(data, cie.lsda_encoding & ~pe_indirect, section, 0);
  fde->lsda_unknown |= !address;
  fde->lsda_indirect = cie.lsda_encoding & pe_indirect;
  if (address && !fde->lsda_unknown) fde->lsda = ImageAddr(*address);
}

std::optional<Fde> read_fde(Cursor at, bool wide_length, const Cie& cie, const CfiSection& section) {
  if (wide_length && cie.wide_id && !section.debug_frame) at.skip(4);
  if (cie.fde_encoding == pe_omit || cie.fde_encoding & pe_indirect) return std::nullopt;
  auto begin = read_encoded(at, cie.fde_encoding, section, 0);
  auto size = read_format(at, cie.fde_encoding & 0x0f);
  if (!begin || !size) return std::nullopt;
  uint64_t length = *size;
  if ((cie.fde_encoding & 0x0f) == pe_sdata4) length = static_cast<uint32_t>(length);
  if ((cie.fde_encoding & 0x0f) == pe_sdata2) length = static_cast<uint16_t>(length);
  if (*begin + length < *begin) return std::nullopt;
  Fde fde{&cie, {ImageAddr(*begin), ImageAddr(*begin + length)}, {}};
  if (cie.has_size) {
    uint64_t size = at.uleb();
    if (size > at.left()) return std::nullopt;
    if (size) read_lsda(Cursor(section.bytes.first(at.at() + size), at.at()), section, &fde);
    at.skip(size);
  }
  if (!at.ok()) return std::nullopt;
  fde.instructions = rest_of(at);
  return fde;
}

class Reader {
 public:
  Reader(const CfiSection& section, const std::function<void(const Fde&)>& each) : section_(section), each_(each) {}

  CfiEntries run() {
    Cursor at(section_.bytes);
    while (at.left() >= 4) {
      Entry entry;
      if (!next(at, &entry)) {
        out_.unusable++;  // a length that leads outside: nothing behind it can be found
        break;
      }
      if (entry.size == 0) continue;
      if (entry.common) {
        if (!cie(entry)) out_.unusable++;
      } else if (!fde(entry)) {
        out_.unusable++;
      }
    }
    return std::move(out_);
  }

 private:
  struct Entry {
    uint64_t start = 0, size = 0;  // size behind the length field
    uint64_t id_at = 0;
    uint64_t id = 0;
    bool wide = false;
    bool common = false;
  };

  // Steps over one entry.
  bool next(Cursor& at, Entry* entry) const {
    entry->start = at.at();
    entry->size = at.read<uint32_t>();
    if (entry->size == 0xffffffff) entry->size = at.read<uint64_t>(), entry->wide = true;
    entry->id_at = at.at();
    if (!at.ok() || entry->size > at.left()) return false;
    if (entry->size == 0) return true;
    if (entry->size < id_size(*entry)) return entry->common = false, entry->id = 1, at.skip(entry->size), true;
    Cursor id = at;
    entry->id = id_size(*entry) == 8 ? id.read<uint64_t>() : id.read<uint32_t>();
    uint64_t of_common = !section_.debug_frame ? 0 : id_size(*entry) == 8 ? ~uint64_t{0} : UINT32_MAX;
    entry->common = entry->id == of_common;
    at.skip(entry->size);
    return true;
  }

  // .eh_frame's ids are read as four bytes; what follows a longer one is looked at later.
  size_t id_size(const Entry& entry) const { return section_.debug_frame && entry.wide ? 8 : 4; }
  Cursor body(const Entry& entry) const {
    return Cursor(section_.bytes.first(entry.id_at + entry.size), entry.id_at + id_size(entry));
  }

  const Cie* cie(const Entry& entry) {
    uint32_t key = static_cast<uint32_t>(entry.start);
    if (auto known = out_.cies.find(key); known != out_.cies.end()) return &known->second;
    if (entry.size < id_size(entry)) return nullptr;
    auto read = read_cie(body(entry), entry.wide, section_);
    return read ? &out_.cies.emplace(key, *read).first->second : nullptr;
  }

  bool fde(const Entry& entry) {
    if (entry.size < id_size(entry) || (!section_.debug_frame && entry.id > entry.id_at)) return false;
    uint64_t where = section_.debug_frame ? entry.id : entry.id_at - entry.id;
    if (where >= section_.bytes.size()) return false;
    if (!last_ || where != last_at_) {
      Cursor at(section_.bytes, where);
      Entry common;
      if (!next(at, &common) || common.size == 0 || !common.common) return false;
      last_ = cie(common), last_at_ = where;
      if (!last_) return false;
    }
    auto read = read_fde(body(entry), entry.wide, *last_, section_);
    // Linkers leave the entries of code that they have dropped, at 0.
    if (read && section_.debug_frame && !read->range.begin) return out_.dropped++, true;
    if (read) each_(*read);
    return read.has_value();
  }

  const CfiSection& section_;
  const std::function<void(const Fde&)>& each_;
  CfiEntries out_;
  const Cie* last_ = nullptr;
  uint64_t last_at_ = 0;
};

}  // namespace

std::optional<uint64_t> read_encoded(Cursor& at, uint8_t encoding, const CfiSection& section, uint64_t function) {
  if (encoding == pe_omit || encoding & pe_indirect) return std::nullopt;
  uint64_t here = section.address.value + at.at(), base;
  switch (encoding & 0x70) {
    case pe_absptr: base = 0; break;
    case pe_pcrel: base = here; break;
    case pe_textrel: base = section.text_base.value; break;
    case pe_datarel: base = section.data_base.value; break;
    case pe_funcrel: base = function; break;
    case pe_aligned:
      at.skip(-here & 7);
      base = 0;
      break;
    default: return std::nullopt;
  }
  if (((encoding & 0x70) == pe_textrel || (encoding & 0x70) == pe_datarel) && base == 0) return std::nullopt;
  auto value = read_format(at, encoding & 0x0f);
  if (!value) return std::nullopt;
  return base + *value;
}

CfiEntries read_entries(const CfiSection& section, const std::function<void(const Fde&)>& each) {
  if (section.bytes.size() > UINT32_MAX) return {.cies = {}, .fdes = {}, .dropped = 0, .unusable = 1};
  return Reader(section, each).run();
}

CfiEntries read_entries(const CfiSection& section) {
  std::vector<Fde> fdes;
  CfiEntries entries = read_entries(section, [&](const Fde& fde) { fdes.push_back(fde); });
  entries.fdes = std::move(fdes);
  return entries;
}

}  // namespace sonde::host
