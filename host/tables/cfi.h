// The entries of an .eh_frame section (Linux Standard Base Core 5.0, section 10.6) or of .debug_frame (DWARF 5 section
// 6.4.1): common information entries and the frame description entries that use them. Trusts nothing in the bytes, and needs
// no .eh_frame_hdr.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <vector>

#include "core/base/addr.h"
#include "core/base/cursor.h"
#include "host/error.h"

namespace sonde::host {

// Bytes [begin, begin + size) of the section.
struct Block {
  uint32_t begin = 0, size = 0;
};

struct Cie {
  uint64_t code_align = 1;
  int64_t data_align = 1;
  uint64_t return_register = 0;
  uint8_t fde_encoding = 0;  // DW_EH_PE_*
  uint8_t lsda_encoding = 0xff;  // 0xff: entries have none
  bool has_size = false;  // augmentation 'z': entries carry the size of their augmentation data
  bool signal_frame = false;
  bool understood = true;  // false: an augmentation letter with unknown meaning, rows cannot be trusted
  bool wide_id = false;  // 64-bit form with an 8-byte id
  Block instructions;
};

struct Fde {
  const Cie* cie;
  ImageRange range;
  Block instructions;
  ImageAddr lsda{};  // where the language's exception table of this code lies; 0: none
  bool lsda_indirect = false;  // there stands its address instead
  bool lsda_unknown = false;  // it has one, or may have, and where cannot be read
};

struct CfiSection {
  std::span<const uint8_t> bytes;
  ImageAddr address;  // of the section's first byte
  ImageAddr text_base{}, data_base{};  // what textrel and datarel pointers are relative to; 0 where unknown
  bool debug_frame = false;  // ids of common entries are all ones, entries name them by their place in the section

  Cursor cursor(Block block) const { return Cursor(bytes.first(block.begin + size_t{block.size}), block.begin); }
};

// An encoded pointer at `at`, with DW_EH_PE `encoding`; without value if it cannot be read without the running process.
std::optional<uint64_t> read_encoded(Cursor& at, uint8_t encoding, const CfiSection& section, uint64_t function);

struct CfiEntries {
  std::map<uint32_t, Cie> cies;  // by offset; stable addresses
  std::vector<Fde> fdes;  // in the section's order
  size_t dropped = 0;  // entries of .debug_frame whose code the linker has left out
  size_t unusable = 0;  // entries whose range cannot be known: their code stays a gap
};

// All entries that can be read. Zero terminators are stepped over wherever they are, as linkers leave some in the middle.
CfiEntries read_entries(const CfiSection& section);
// The same, each frame description entry given to `each` and not kept.
CfiEntries read_entries(const CfiSection& section, const std::function<void(const Fde&)>& each);

}  // namespace sonde::host
