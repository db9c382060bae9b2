// One loaded image as planning sees it: its file bytes and functions at their addresses in the target. Holds spans into
// the image, which must outlive it.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "host/image/maps.h"

namespace sonde::host {

struct Piece {  // the file-backed part of a loaded segment
  uint64_t begin;
  std::span<const uint8_t> bytes;
  bool executable;
  uint64_t end() const { return begin + bytes.size(); }
};

struct CodeRange {
  uint64_t begin, end;
};

struct CodeView {
  std::vector<Piece> pieces;  // sorted, non-overlapping
  std::vector<CodeRange> functions;  // sorted by begin, non-overlapping; all of the image, also those not asked for
  std::vector<uint64_t> labels;  // other symbols in code, in any order
  std::vector<CodeRange>
      unknown_pads;  // code whose exception table cannot be read, disjoint: pads may be anywhere in it
  std::vector<CodeRange> code_sections;  // sections of instructions, sorted; empty: the file does not say
  uint64_t begin = 0, end = 0;  // of the image in the target
  uint64_t text_begin = 0, text_end = 0;  // hull of the executable pieces
  uint64_t bias = 0;  // words in the file + bias = target addresses
  bool position_dependent = false;  // code may hold absolute 32-bit addresses
  bool main_program = false;  // the heap follows it

  // From addr to the end of its piece; empty outside.
  std::span<const uint8_t> at(uint64_t addr) const;
  std::span<const uint8_t> code_at(uint64_t addr) const;
  bool in_text(uint64_t addr) const { return !code_at(addr).empty(); }
  // False for data that an executable segment also holds.
  bool in_code_section(uint64_t addr) const;
  bool has_unknown_pads(uint64_t addr) const;
  // Index of the first function that ends behind addr.
  size_t function_from(uint64_t addr) const;

  void finish();  // after the fields are filled: sorts, computes the hull
};

CodeView view_code(const LoadedImage& loaded);
// Landing pads become labels. Apart from view_code, because most images' are never needed.
void add_landing_pads(const LoadedImage& loaded, CodeView& view);

}  // namespace sonde::host
