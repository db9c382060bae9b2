// Every address of an image's code that something may transfer control to: a superset, one bit per byte of code. A patch
// may cover an address only if its bit is clear. Sources, from cheap to dear:
//   - 32-bit relative branches and lea's, searched at every byte of the code (a false one costs a method, a missed one
//     would break the program);
//   - entries of tables that such a lea leads to (jump tables relative to themselves);
//   - words of the file that are addresses of code (pointers, relocation addends, dynamic symbols) and, where code is
//     position-dependent, 32-bit absolute addresses;
//   - functions' starts and other symbols; every endbr64; the landing pads of exception tables, and all code whose table
//     cannot be read; and, in a part that begins with a single nop, the byte behind it: offset 0 means "none" in exception
//     tables, so compilers put a nop in front of a landing pad that would stand there;
//   - 8-bit relative branches, from decoded instructions near the sites (add_near).
#pragma once

#include <cstdint>
#include <unordered_set>
#include <vector>

#include "host/plan/code_view.h"

namespace sonde::host {

class Targets {
 public:
  explicit Targets(const CodeView& view);

  void mark(uint64_t addr) {
    if (addr - begin_ < size_) bits_[(addr - begin_) >> 6] |= uint64_t{1} << ((addr - begin_) & 63);
  }
  bool marked(uint64_t addr) const {
    return addr - begin_ < size_ && (bits_[(addr - begin_) >> 6] >> ((addr - begin_) & 63) & 1);
  }
  bool any(uint64_t from, uint64_t to) const;  // [from, to)

  // Marks what the code around [from, to) may reach with 8-bit branches: decodes each function there once, from its
  // start; code that does not decode as such is searched byte by byte.
  void add_near(uint64_t from, uint64_t to);
  // Whether a jump (not a call) within the function leads to `to`. Only after add_near over it.
  bool loops_to(uint64_t function, uint64_t to) const;
  // Whether control cannot run over the end of the function that starts here. Only after add_near over it.
  bool ends(uint64_t function) const;

 private:
  void scan_code(const Piece& piece);
  void scan_absolute(const Piece& piece);
  void scan_words(const Piece& piece);
  void scan_table(uint64_t table);
  void add_function(size_t index);
  void search_short(uint64_t from, uint64_t to);

  const CodeView& view_;
  uint64_t begin_, size_;
  std::vector<uint64_t> bits_;
  std::vector<uint64_t> tables_;  // sorted
  uint64_t table_entries_ = 0;  // read so far
  enum : uint8_t { not_seen = 0, decoded = 1, doubtful = 2, decoded_and_ends = 3 };
  std::vector<uint8_t> state_;  // per function
  std::unordered_set<uint64_t> heads_;  // targets of jumps within functions, those near the start
  std::vector<uint8_t> gap_state_;  // of the gap in front of each function, one more for the last
};

}  // namespace sonde::host
