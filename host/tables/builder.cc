// Layout of a packed table: dictionary first, then blocks with their fine indices and changes.
#include "host/tables/builder.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/base/check.h"

namespace sonde::host {
namespace {

constexpr uint64_t kBlock = uint64_t{1} << kBlockShift;

uint64_t hash(const Row& row) { return table_checksum({reinterpret_cast<const uint8_t*>(&row), sizeof row}); }

// Rows that changes lead to, the most frequent ones first, as only the first have a number of one byte.
struct Ranking {
  std::vector<uint16_t> order;  // rank -> number
  std::vector<uint16_t> rank;   // number -> rank

  Ranking(std::span<const uint32_t> uses, size_t rows) : rank(rows, kGapRow) {
    for (size_t i = 0; i < rows; i++)
      if (uses[i]) order.push_back(static_cast<uint16_t>(i));
    std::stable_sort(order.begin(), order.end(), [&](uint16_t a, uint16_t b) { return uses[a] > uses[b]; });
    for (size_t i = 0; i < order.size(); i++) rank[order[i]] = static_cast<uint16_t>(i);
  }
  uint16_t of(uint16_t number) const { return number == kGapRow ? kGapRow : rank[number]; }
};

// The three arrays that depend on the changes.
struct Blocks {
  std::vector<TableBlock> blocks;
  std::vector<uint16_t> fine;
  std::vector<uint8_t> offsets, rows;
  size_t count = 0;  // of both that are filled

  void add(uint64_t offset, uint16_t row) {
    if (count + 3 > offsets.size()) offsets.resize(2 * offsets.size() + 64), rows.resize(offsets.size());
    auto entry = [&](uint8_t byte) { offsets[count] = static_cast<uint8_t>(offset), rows[count++] = byte; };
    if (row == kGapRow) return entry(kGapByte);
    if (row < kGapByte) return entry(static_cast<uint8_t>(row));
    entry(static_cast<uint8_t>(row >> 8));
    entry(static_cast<uint8_t>(row));
    entry(kEscapeByte);
  }

  // Changes of one block: offset in it and rank, the first at offset 0.
  void add_block(std::span<const std::pair<uint32_t, uint16_t>> changes) {
    uint32_t first = static_cast<uint32_t>(count);
    blocks.push_back({first, changes.size() > 1 ? static_cast<uint32_t>(fine.size()) : kNoFine});
    if (changes.size() == 1) return add(0, changes[0].second);
    unsigned chunk = 0;
    for (auto [offset, row] : changes) {
      for (; chunk <= offset >> kFineShift; chunk++) fine.push_back(static_cast<uint16_t>(count - first));
      add(offset, row);
    }
    for (; chunk < kFinePerBlock; chunk++) fine.push_back(static_cast<uint16_t>(count - first));
  }
};
static_assert(3 * kBlock <= UINT16_MAX);  // a fine index counts all of a block's changes

Blocks cut_into_blocks(std::span<const RowChange> changes, const Ranking& ranking, uint64_t base, uint64_t end) {
  Blocks out;
  out.offsets.resize(changes.size() + (end - base) / kBlock + 64);
  out.rows.resize(out.offsets.size());
  std::vector<std::pair<uint32_t, uint16_t>> block;
  uint16_t current = kGapRow;
  size_t next = 0;
  for (uint64_t at = base; at < end; at += kBlock) {
    block.assign(1, {0, current});
    for (; next < changes.size() && changes[next].address() - base < at - base + kBlock; next++) {
      uint32_t offset = static_cast<uint32_t>(changes[next].address() - at);
      current = ranking.of(static_cast<uint16_t>(changes[next].row));
      if (block.back().first == offset) block.back().second = current;
      else if (block.back().second != current) block.push_back({offset, current});
    }
    out.add_block(block);
  }
  out.blocks.push_back({static_cast<uint32_t>(out.count), kNoFine});
  out.offsets.resize(out.count), out.rows.resize(out.count);
  return out;
}

class Writer {
 public:
  // `size`: of what will be appended, about.
  explicit Writer(size_t size) {
    bytes_.reserve(sizeof(TableHeader) + size + 64);
    bytes_.resize(sizeof(TableHeader));
  }
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

Result<std::vector<uint8_t>> TableBuilder::finish(std::span<const RowChange> changes, uint64_t end) {
  TableHeader header{};
  header.magic = kTableMagic, header.version = kTableVersion, header.machine = machine_;
  uint64_t first = changes.empty() ? end : changes.front().address();
  header.base = first & ~(kBlock - 1);
  header.span = end - header.base;
  if (first > end || header.span > kMaxTableSpan)
    return fail(fmt::format("unwind table: code from {:#x} to {:#x} is more than one table holds", first, end));
  if (changes.empty()) header.span = 0;

  uses_.assign(rows_.size() + 1, 0);
  for (const RowChange& change : changes) uses_[std::min<size_t>(change.row, rows_.size())]++;
  Ranking ranking(uses_, rows_.size());
  Blocks blocks = cut_into_blocks(changes, ranking, header.base, header.base + header.span);
  std::vector<Row> rows;
  for (uint16_t number : ranking.order) rows.push_back(rows_[number]);
  std::vector<uint32_t> starts;
  std::string expressions;
  for (const std::string& text : expressions_) {
    starts.push_back(static_cast<uint32_t>(expressions.size()));
    expressions += text;
  }
  starts.push_back(static_cast<uint32_t>(expressions.size()));

  header.row_count = static_cast<uint32_t>(rows.size());
  header.block_count = static_cast<uint32_t>(blocks.blocks.size() - 1);
  header.expression_count = static_cast<uint32_t>(expressions_.size());
  header.fine_count = static_cast<uint32_t>(blocks.fine.size());
  header.change_count = static_cast<uint32_t>(blocks.offsets.size());
  header.expression_bytes = static_cast<uint32_t>(expressions.size());
  Writer writer(rows.size() * sizeof(Row) + blocks.blocks.size() * sizeof(TableBlock) + starts.size() * 4 +
                blocks.fine.size() * 2 + blocks.offsets.size() * 2 + expressions.size());
  header.rows = writer.append(rows);
  header.blocks = writer.append(blocks.blocks);
  header.expression_starts = writer.append(starts);
  header.fine = writer.append(blocks.fine);
  header.change_offsets = writer.append(blocks.offsets);
  header.change_rows = writer.append(blocks.rows);
  header.expressions = writer.append(expressions.data(), expressions.size());
  return std::move(writer).finish(header);
}

}  // namespace sonde::host
