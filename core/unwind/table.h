// The packed unwind table of one image: a dictionary of distinct rows and expressions, and per change of row one byte for its
// offset within 256 bytes of code and one for the row. Position independent bytes: a file of the cache, a piece of the
// arena mapped into the target, or a vector in the host are all the same table. docs/formats.md has the picture.
//
//   TableHeader | Row[row_count] | Block[block_count + 1] | u32 expression_start[expression_count + 1]
//   | u16 fine[fine_count] | u8 change_offset[change_count] | u8 change_row[change_count] | expression bytes
//
// A change holds until the next one. Each block of 16 KiB starts with a change at offset 0; one that has others too has
// kFinePerBlock fine indices, one per 256 bytes of code: the first change there, counted from the block's first.
// Rows are numbered by how often they are used. The few changes whose row has no byte of its own stand there thrice, the
// number's bytes in front: {high, low, kEscapeByte}, all at the same offset.
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
constexpr uint32_t kTableVersion = 2;
constexpr uint16_t kGapRow = 0xffff;
constexpr uint8_t kGapByte = 0xfe, kEscapeByte = 0xff;  // as change_row; smaller ones are numbers of rows
constexpr unsigned kBlockShift = 14, kFineShift = 8;
constexpr unsigned kChunksPerBlock = 1u << (kBlockShift - kFineShift);
constexpr unsigned kFinePerBlock = kChunksPerBlock + 1;  // the last one is the number of the block's changes
constexpr uint64_t kMaxTableSpan = uint64_t{1} << 36;  // of code in one image
constexpr uint32_t kNoFine = 0xffffffff;  // one row in the whole block

struct TableHeader {
  uint64_t magic;
  uint64_t checksum;  // table_checksum of everything behind this field
  uint32_t version;
  uint32_t machine;  // EM_*: says which registers the numbers mean
  uint64_t size;  // of the whole table in bytes, a multiple of 8
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
  // The row that the change with this number leads to.
  const Row* row_of(uint32_t change) const {
    const uint8_t* at = part<uint8_t>(header_->change_rows) + change;
    if (*at < kGapByte) [[likely]]
      return part<Row>(header_->rows) + *at;
    return *at == kGapByte ? nullptr : part<Row>(header_->rows) + (at[-2] << 8 | at[-1]);
  }

  const TableHeader* header_;
};

inline const Row* Table::lookup(ImageAddr pc) const {
  const TableHeader& h = *header_;
  uint64_t at = pc.value - h.base;
  if (at >= h.span) return nullptr;
  const TableBlock* block = part<TableBlock>(h.blocks) + (at >> kBlockShift);
  if (block->first_fine == kNoFine) return row_of(block[1].first_change - 1);
  const uint16_t* fine = part<uint16_t>(h.fine) + block->first_fine + (at >> kFineShift) % kChunksPerBlock;
  const uint8_t offset = static_cast<uint8_t>(at);
  const uint8_t* offsets = part<uint8_t>(h.change_offsets);
  // In force is the change in front of these 256 bytes or one of theirs; halve without branches that depend on the data.
  uint32_t change = block->first_change + fine[0] - 1, count = fine[1] - fine[0] + 1u;
  __builtin_prefetch(part<uint8_t>(h.change_rows) +
                     change);  // as far away as the offsets, and wanted right behind them
  while (count > 1) {
    uint32_t half = count / 2;
    change += offsets[change + half] <= offset ? half : 0;
    count -= half;
  }
  return row_of(change);
}

template <class Visit>
void Table::for_each(Visit&& visit) const {
  const TableHeader& h = *header_;
  const TableBlock* blocks = part<TableBlock>(h.blocks);
  const uint8_t* offsets = part<uint8_t>(h.change_offsets);
  uint64_t begin = h.base;
  const Row* current = nullptr;
  auto enter = [&](uint64_t at, uint32_t change) {
    const Row* next = row_of(change);
    if (next == current) return;
    if (at > begin) visit(ImageAddr(begin), ImageAddr(at), current);
    begin = at, current = next;
  };
  for (uint64_t b = 0; b < h.block_count; b++) {
    uint64_t place = h.base + (b << kBlockShift);
    if (blocks[b].first_fine == kNoFine) {
      enter(place, blocks[b + 1].first_change - 1);
      continue;
    }
    const uint16_t* fine = part<uint16_t>(h.fine) + blocks[b].first_fine;
    const uint32_t first = blocks[b].first_change;
    for (unsigned chunk = 0; chunk < kChunksPerBlock; chunk++)
      for (uint32_t c = first + fine[chunk], end = first + fine[chunk + 1]; c < end; c++)
        if (c + 1 == end || offsets[c + 1] != offsets[c]) enter(place + (chunk << kFineShift) + offsets[c], c);
  }
  if (h.base + h.span > begin) visit(ImageAddr(begin), ImageAddr(h.base + h.span), current);
}

}  // namespace sonde
