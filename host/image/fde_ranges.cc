#include "host/image/fde_ranges.h"

#include <dwarf.h>
#include <elf.h>

#include <algorithm>
#include <string>
#include <unordered_map>

#include "core/base/cursor.h"

namespace sonde::host {
namespace {

// The processor's state right behind a call. x86-64: the return address was pushed, CFA = rsp + 8. AArch64: it is in
// lr (x30), CFA = sp.
struct EntryState {
  uint64_t stack_pointer, offset, return_register;
};
EntryState entry_state_of(uint16_t machine) {
  return machine == EM_AARCH64 ? EntryState{31, 0, 30} : EntryState{7, 8, 16};
}

struct RuleState {
  uint64_t cfa_register = ~0ull, cfa_offset = ~0ull;
  bool plain = true;  // no expression, no register but the return address saved
};

struct Cie {
  uint8_t pointer_encoding = DW_EH_PE_absptr;
  bool augmented = false, signal_frame = false, usable = false;
  uint64_t code_align = 1, return_register = 0;
  int64_t data_align = 1;
  RuleState initial;
};

// DW_EH_PE pointer; nothing for indirect or unknown forms. `at_address` is where the pointer itself lies.
std::optional<uint64_t> read_pointer(Cursor& c, uint8_t encoding, uint64_t at_address, bool relative) {
  if (encoding & DW_EH_PE_indirect) return std::nullopt;
  uint64_t value;
  switch (encoding & 0x0f) {
    case DW_EH_PE_absptr:
    case DW_EH_PE_udata8:
    case DW_EH_PE_sdata8: value = c.read<uint64_t>(); break;
    case DW_EH_PE_uleb128: value = c.uleb(); break;
    case DW_EH_PE_sleb128: value = static_cast<uint64_t>(c.sleb()); break;
    case DW_EH_PE_udata2: value = c.read<uint16_t>(); break;
    case DW_EH_PE_udata4: value = c.read<uint32_t>(); break;
    case DW_EH_PE_sdata2: value = static_cast<uint64_t>(c.read<int16_t>()); break;
    case DW_EH_PE_sdata4: value = static_cast<uint64_t>(int64_t{c.read<int32_t>()}); break;
    default: return std::nullopt;
  }
  if (!c.ok()) return std::nullopt;
  if (!relative) return value;
  switch (encoding & 0x70) {
    case 0: return value;
    case DW_EH_PE_pcrel: return value + at_address;
    default: return std::nullopt;
  }
}

// Applies instructions up to the first one that moves the location. The state stays at that of the first address.
void run_first_row(Cursor& c, const Cie& cie, RuleState& state) {
  auto saved = [&](uint64_t reg) {
    if (reg != cie.return_register) state.plain = false;
  };
  while (c.ok() && c.left() > 0) {
    auto op = c.read<uint8_t>();
    switch (op & 0xc0) {
      case DW_CFA_advance_loc: return;
      case DW_CFA_offset: c.uleb(), saved(op & 0x3f); continue;
      case DW_CFA_restore: continue;
    }
    switch (op) {
      case DW_CFA_nop:
      case DW_CFA_AARCH64_negate_ra_state: break;
      case DW_CFA_set_loc:
      case DW_CFA_advance_loc1:
      case DW_CFA_advance_loc2:
      case DW_CFA_advance_loc4: return;
      case DW_CFA_def_cfa: state.cfa_register = c.uleb(), state.cfa_offset = c.uleb(); break;
      case DW_CFA_def_cfa_sf:
        state.cfa_register = c.uleb(), state.cfa_offset = static_cast<uint64_t>(c.sleb() * cie.data_align);
        break;
      case DW_CFA_def_cfa_register: state.cfa_register = c.uleb(); break;
      case DW_CFA_def_cfa_offset: state.cfa_offset = c.uleb(); break;
      case DW_CFA_def_cfa_offset_sf: state.cfa_offset = static_cast<uint64_t>(c.sleb() * cie.data_align); break;
      case DW_CFA_same_value:
      case DW_CFA_restore_extended: c.uleb(); break;
      case DW_CFA_GNU_args_size: c.uleb(); break;
      case DW_CFA_remember_state:
      case DW_CFA_restore_state: break;
      case DW_CFA_offset_extended: saved(c.uleb()), c.uleb(); break;
      case DW_CFA_offset_extended_sf: saved(c.uleb()), c.sleb(); break;
      default: state.plain = false; return;  // undefined, register, expressions: no place that a call enters
    }
  }
}

class Reader {
 public:
  Reader(std::span<const uint8_t> bytes, ImageAddr address, uint16_t machine)
      : bytes_(bytes), address_(address.value), entry_(entry_state_of(machine)) {}

  std::vector<FdeRange> read() {
    size_t at = 0;
    while (bytes_.size() - at >= 4) {
      Cursor c(bytes_, at);
      uint64_t length = c.read<uint32_t>();
      if (length == 0) {  // crtend.o's terminator; linkers may leave more behind it
        at += 4;
        continue;
      }
      if (length == 0xffffffff) length = c.read<uint64_t>();
      if (!c.ok() || length > c.left() || length < 4) break;
      size_t body = c.at();
      at = body + length;
      Cursor entry(bytes_.first(at), body);
      auto id = entry.read<uint32_t>();
      if (id != 0 && id <= body) read_fde(entry, body - id);
    }
    std::ranges::stable_sort(ranges_, {}, [](auto& r) { return r.range.begin; });
    std::vector<FdeRange> kept;
    for (auto& r : ranges_) {
      if (!kept.empty() && r.range.begin < kept.back().range.end) {
        if (r.range.begin == kept.back().range.begin) continue;
        kept.back().range.end = r.range.begin;
      }
      kept.push_back(r);
    }
    return kept;
  }

 private:
  void read_fde(Cursor& c, size_t cie_offset) {
    const Cie& cie = cie_at(cie_offset);
    if (!cie.usable) return;
    auto begin = read_pointer(c, cie.pointer_encoding, address_ + c.at(), true);
    auto size = read_pointer(c, cie.pointer_encoding & 0x0f, 0, false);
    if (!begin || !size || *size == 0 || *begin == 0 || *begin + *size < *begin) return;
    if (cie.augmented) c.skip(c.uleb());
    if (!c.ok()) return;
    RuleState state = cie.initial;
    run_first_row(c, cie, state);
    bool entry = c.ok() && state.plain && !cie.signal_frame && state.cfa_register == entry_.stack_pointer &&
                 state.cfa_offset == entry_.offset && cie.return_register == entry_.return_register;
    ranges_.push_back({{ImageAddr(*begin), ImageAddr(*begin + *size)}, entry});
  }

  const Cie& cie_at(size_t offset) {
    auto [it, fresh] = cies_.try_emplace(offset);
    if (fresh) parse_cie(offset, it->second);
    return it->second;
  }

  void parse_cie(size_t offset, Cie& cie) {
    Cursor head(bytes_, offset);
    uint64_t length = head.read<uint32_t>();
    if (length == 0xffffffff) length = head.read<uint64_t>();
    if (!head.ok() || length > head.left()) return;
    Cursor c(bytes_.first(head.at() + length), head.at());
    if (c.read<uint32_t>() != 0) return;
    auto version = c.read<uint8_t>();
    if (version != 1 && version != 3) return;
    std::string augmentation;
    while (c.ok())
      if (char letter = static_cast<char>(c.read<uint8_t>())) augmentation += letter;
      else break;
    cie.code_align = c.uleb();
    cie.data_align = c.sleb();
    cie.return_register = version == 1 ? c.read<uint8_t>() : c.uleb();
    if (augmentation.starts_with('z') && !parse_augmentation(c, augmentation, cie)) return;
    if (!augmentation.empty() && !cie.augmented) return;  // an unknown form, such as gcc 2's "eh"
    run_first_row(c, cie, cie.initial);
    cie.usable = c.ok();
  }

  bool parse_augmentation(Cursor& c, const std::string& letters, Cie& cie) {
    uint64_t size = c.uleb();
    if (!c.ok() || size > c.left()) return false;
    size_t end = c.at() + size;
    for (char letter : letters.substr(1)) {
      if (letter == 'R') cie.pointer_encoding = c.read<uint8_t>();
      else if (letter == 'L') c.read<uint8_t>();
      else if (letter == 'P') {
        auto encoding = c.read<uint8_t>();
        if (!read_pointer(c, encoding & 0x7f, 0, false)) return false;
      } else if (letter == 'S') cie.signal_frame = true;
      else if (letter != 'B') break;  // what follows an unknown letter is skipped by its size
    }
    if (!c.ok() || c.at() > end) return false;
    c.skip(end - c.at());
    return cie.augmented = true;
  }

  std::span<const uint8_t> bytes_;
  uint64_t address_;
  EntryState entry_;
  std::unordered_map<size_t, Cie> cies_;
  std::vector<FdeRange> ranges_;
};

}  // namespace

std::vector<FdeRange> read_fde_ranges(std::span<const uint8_t> eh_frame, ImageAddr address, uint16_t machine) {
  return Reader(eh_frame, address, machine).read();
}

}  // namespace sonde::host
