// The packed unwind table of one image: a dictionary of distinct rows and expressions, and per change of row a 16-bit
// offset within its 64 KiB block and a 16-bit index of the row. Position independent bytes: a file of the cache, a piece
// of the arena mapped into the target, or a vector in the host are all the same table. docs/formats.md has the picture.
//
//   TableHeader | Row[row_count] | Block[block_count + 1] | u32 expression_start[expression_count + 1]
//   | u16 fine[fine_count] | u16 change_offset[change_count] | u16 change_row[change_count] | expression bytes
//
// A change holds until the next one. Each block starts with a change at offset 0. A block of many changes has kFinePerBlock
// fine indices, one per 256 bytes of code: the change in force there, counted from the block's first.
// Every address that no source of rows covered is a gap (kGapRow): no row is ever guessed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/base/addr.h"
#include "core/base/result.h"
#include "core/unwind/row.h"

namespace sonde {

constexpr uint64_t kTableMagic = 0x6c62745f65646e73;  // "snde_tbl"
constexpr uint32_t kTableVersion = 1;
constexpr uint16_t kGapRow = 0xffff;
constexpr unsigned kBlockShift = 16, kFineShift = 8;
constexpr unsigned kFinePerBlock = (1u << (kBlockShift - kFineShift)) + 1;  // the last one is the block's last change
constexpr uint64_t kMaxTableSpan = uint64_t{1} << 36;  // of code in one image
constexpr uint32_t kNoFine = 0xffffffff;  // few changes: searched without fine indices

struct TableHeader {
  uint64_t magic;
  uint64_t checksum;  // table_checksum of everything behind this field
  uint32_t version;
  uint32_t machine;   // EM_*: says which registers the numbers mean
  uint64_t size;      // of the whole table in bytes, a multiple of 8
  uint64_t base, span;  // covered: image addresses [base, base + span), base a multiple of the block size
  uint32_t row_count, block_count, expression_count, fine_count, change_count, expression_bytes;
  uint32_t rows, blocks, expression_starts, fine, change_offsets, change_rows, expressions;  // bytes from the header
  uint32_t reserved;
};
static_assert(sizeof(TableHeader) == 104);
constexpr size_t kChecksummedFrom = 16;
static_assert(offsetof(TableHeader, version) == kChecksummedFrom);

struct TableBlock {
  uint32_t first_change;
  uint32_t first_fine;  // or kNoFine
};

uint64_t table_checksum(std::span<const uint8_t> bytes);

// A view; the bytes must outlive it and be aligned to 8. Signal-safe.
class Table {
 public:
  // Checks everything: afterwards lookup() and expression() never read outside of `bytes`. Linear in size, so once per table.
  static Result<Table> open(std::span<const uint8_t> bytes);
  // The view of bytes that open() has accepted before.
  static Table at(const void* checked) { return Table(static_cast<const TableHeader*>(checked)); }

  // The row in force at pc (for a return address: pass CodeAddr::lookup()), or null in a gap.
  const Row* lookup(ImageAddr pc) const;

  // Expression by its number in a row of this table; a wrong number gives an empty one.
  std::span<const uint8_t> expression(uint32_t number) const;

  const TableHeader& header() const { return *header_; }
  std::span<const Row> rows() const { return {part<Row>(header_->rows), header_->row_count}; }

  // Calls visit(ImageAddr begin, ImageAddr end, const Row* or null) for each run of addresses with one row, in order.
  template <class Visit>
  void for_each(Visit&& visit) const;

 private:
  explicit Table(const TableHeader* header) : header_(header) {}
  template <class T>
  const T* part(uint32_t offset) const {
    return reinterpret_cast<const T*>(reinterpret_cast<const uint8_t*>(header_) + offset);
  }
  const Row* row(uint16_t index) const { return index == kGapRow ? nullptr : part<Row>(header_->rows) + index; }

  const TableHeader* header_;
};

inline const Row* Table::lookup(ImageAddr pc) const {
  const TableHeader& h = *header_;
  uint64_t at = pc.value - h.base;
  if (at >= h.span) return nullptr;
  const TableBlock* block = part<TableBlock>(h.blocks) + (at >> kBlockShift);
  const uint16_t offset = static_cast<uint16_t>(at);
  uint32_t first = block->first_change, count = block[1].first_change - first;
  if (block->first_fine != kNoFine) {
    const uint16_t* fine = part<uint16_t>(h.fine) + block->first_fine + (offset >> kFineShift);
    first += fine[0];
    count = fine[1] - fine[0] + 1u;
  }
  // The first candidate is in force or earlier; halve without branches that depend on the data.
  const uint16_t* change = part<uint16_t>(h.change_offsets) + first;
  while (count > 1) {
    uint32_t half = count / 2;
    change += change[half] <= offset ? half : 0;
    count -= half;
  }
  return row(part<uint16_t>(h.change_rows)[change - part<uint16_t>(h.change_offsets)]);
}

template <class Visit>
void Table::for_each(Visit&& visit) const {
  const TableHeader& h = *header_;
  const TableBlock* blocks = part<TableBlock>(h.blocks);
  uint64_t begin = h.base;
  uint16_t current = kGapRow;
  auto flush = [&](uint64_t end) {
    if (end > begin) visit(ImageAddr(begin), ImageAddr(end), row(current));
    begin = end;
  };
  for (uint64_t b = 0; b < h.block_count; b++) {
    for (uint32_t c = blocks[b].first_change; c < blocks[b + 1].first_change; c++) {
      uint16_t index = part<uint16_t>(h.change_rows)[c];
      if (index == current) continue;
      flush(h.base + (b << kBlockShift) + part<uint16_t>(h.change_offsets)[c]);
      current = index;
    }
  }
  flush(h.base + h.span);
}

}  // namespace sonde
