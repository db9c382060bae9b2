// Layout of a packed table: dictionary first, then blocks of 64 KiB with their fine indices and changes.
#include "host/tables/builder.h"

#include <fmt/format.h>

#include <cstring>

#include "core/base/check.h"

namespace sonde::host {
namespace {

constexpr uint64_t kBlock = uint64_t{1} << kBlockShift;
constexpr uint32_t kFewChanges = 8;  // up to here a block is searched without fine indices

uint64_t hash(const Row& row) {
  return table_checksum({reinterpret_cast<const uint8_t*>(&row), sizeof row});
}

// The three arrays that depend on the changes.
struct Blocks {
  std::vector<TableBlock> blocks;
  std::vector<uint16_t> fine, offsets, rows;

  void add_fine(uint32_t first) {
    uint32_t count = static_cast<uint32_t>(offsets.size()) - first, in_force = 0;
    if (count <= kFewChanges) return;
    blocks.back().first_fine = static_cast<uint32_t>(fine.size());
    for (unsigned f = 0; f < kFinePerBlock; f++) {
      while (in_force + 1 < count && offsets[first + in_force + 1] <= (f << kFineShift)) in_force++;
      fine.push_back(static_cast<uint16_t>(in_force));
    }
  }
};

Blocks cut_into_blocks(std::span<const RowChange> changes, uint64_t base, uint64_t end) {
  Blocks out;
  out.offsets.reserve(changes.size() + (end - base) / kBlock + 1);
  out.rows.reserve(out.offsets.capacity());
  uint16_t current = kGapRow;
  size_t next = 0;
  for (uint64_t at = base; at < end; at += kBlock) {
    uint32_t first = static_cast<uint32_t>(out.offsets.size());
    out.blocks.push_back({first, kNoFine});
    out.offsets.push_back(0);
    out.rows.push_back(current);
    for (; next < changes.size() && changes[next].address - base < at - base + kBlock; next++) {
      uint16_t offset = static_cast<uint16_t>(changes[next].address - at);
      current = changes[next].row;
      if (out.offsets.back() == offset) {
        out.rows.back() = current;
      } else if (out.rows.back() != current) {
        out.offsets.push_back(offset);
        out.rows.push_back(current);
      }
    }
    out.add_fine(first);
  }
  out.blocks.push_back({static_cast<uint32_t>(out.offsets.size()), kNoFine});
  return out;
}

class Writer {
 public:
  Writer() : bytes_(sizeof(TableHeader)) {}
  // Appends at an offset that is a multiple of 8, which is returned.
  uint32_t append(const void* data, size_t size) {
    size_t at = bytes_.size();
    bytes_.resize((at + size + 7) & ~size_t{7});
    if (size) std::memcpy(bytes_.data() + at, data, size);
    return static_cast<uint32_t>(at);
  }
  template <class T>
  uint32_t append(const std::vector<T>& items) {
    return append(items.data(), items.size() * sizeof(T));
  }
  std::vector<uint8_t> finish(TableHeader header) && {
    header.size = bytes_.size();
    std::memcpy(bytes_.data(), &header, sizeof header);
    header.checksum = table_checksum(std::span(bytes_).subspan(kChecksummedFrom));
    std::memcpy(bytes_.data(), &header, sizeof header);
    return std::move(bytes_);
  }

 private:
  std::vector<uint8_t> bytes_;
};

}  // namespace

TableBuilder::TableBuilder(uint32_t machine) : machine_(machine), buckets_(1024, kGapRow) {}

std::optional<uint16_t> TableBuilder::row(const Row& row) {
  size_t mask = buckets_.size() - 1, at = hash(row) & mask;
  for (; buckets_[at] != kGapRow; at = (at + 1) & mask)
    if (rows_[buckets_[at]] == row) return buckets_[at];
  if (rows_.size() == kGapRow) return std::nullopt;
  uint16_t number = static_cast<uint16_t>(rows_.size());
  rows_.push_back(row);
  buckets_[at] = number;
  if (rows_.size() * 2 > buckets_.size()) {
    std::vector<uint16_t> larger(buckets_.size() * 4, kGapRow);
    mask = larger.size() - 1;
    for (size_t i = 0; i < rows_.size(); i++) {
      for (at = hash(rows_[i]) & mask; larger[at] != kGapRow;) at = (at + 1) & mask;
      larger[at] = static_cast<uint16_t>(i);
    }
    buckets_ = std::move(larger);
  }
  return number;
}

std::optional<int16_t> TableBuilder::expression(std::span<const uint8_t> bytes) {
  std::string_view key(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  if (auto found = expression_numbers_.find(key); found != expression_numbers_.end()) return found->second;
  if (expressions_.size() > INT16_MAX) return std::nullopt;
  int16_t number = static_cast<int16_t>(expressions_.size());
  expressions_.emplace_back(key);
  expression_numbers_.emplace(key, number);
  return number;
}

std::span<const uint8_t> TableBuilder::expression(int32_t number) const {
  const std::string& text = expressions_.at(static_cast<size_t>(number));
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

Result<std::vector<uint8_t>> TableBuilder::finish(std::span<const RowChange> changes, uint64_t end) const {
  TableHeader header{};
  header.magic = kTableMagic, header.version = kTableVersion, header.machine = machine_;
  uint64_t first = changes.empty() ? end : changes.front().address;
  header.base = first & ~(kBlock - 1);
  header.span = end - header.base;
  if (first > end || header.span > kMaxTableSpan)
    return fail(fmt::format("unwind table: code from {:#x} to {:#x} is more than one table holds", first, end));
  if (changes.empty()) header.span = 0;

  Blocks blocks = cut_into_blocks(changes, header.base, header.base + header.span);
  std::vector<uint32_t> starts;
  std::string expressions;
  for (const std::string& text : expressions_) {
    starts.push_back(static_cast<uint32_t>(expressions.size()));
    expressions += text;
  }
  starts.push_back(static_cast<uint32_t>(expressions.size()));

  header.row_count = static_cast<uint32_t>(rows_.size());
  header.block_count = static_cast<uint32_t>(blocks.blocks.size() - 1);
  header.expression_count = static_cast<uint32_t>(expressions_.size());
  header.fine_count = static_cast<uint32_t>(blocks.fine.size());
  header.change_count = static_cast<uint32_t>(blocks.offsets.size());
  header.expression_bytes = static_cast<uint32_t>(expressions.size());
  Writer writer;
  header.rows = writer.append(rows_);
  header.blocks = writer.append(blocks.blocks);
  header.expression_starts = writer.append(starts);
  header.fine = writer.append(blocks.fine);
  header.change_offsets = writer.append(blocks.offsets);
  header.change_rows = writer.append(blocks.rows);
  header.expressions = writer.append(expressions.data(), expressions.size());
  return std::move(writer).finish(header);
}

}  // namespace sonde::host
