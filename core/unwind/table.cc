// Accepting a packed table: every count, offset, index and enumerator is checked once, so that lookup needs no checks.
#include "core/unwind/table.h"

#include "core/isa/aarch64.h"
#include "core/isa/x86_64.h"

namespace sonde {
namespace {

constexpr uint32_t kMachineX86_64 = 62, kMachineAarch64 = 183;  // EM_*: ELF gABI, table of e_machine

constexpr uint64_t align8(uint64_t n) { return (n + 7) & ~uint64_t{7}; }

// Offsets follow from the counts; a header that says otherwise is malformed.
bool layout_matches(const TableHeader& h) {
  uint64_t at = sizeof(TableHeader);
  auto place = [&](uint32_t offset, uint64_t count, uint64_t each) {
    bool right = offset == at;
    at = align8(at + count * each);
    return right;
  };
  return place(h.rows, h.row_count, sizeof(Row)) && place(h.blocks, uint64_t{h.block_count} + 1, sizeof(TableBlock)) &&
         place(h.expression_starts, uint64_t{h.expression_count} + 1, 4) && place(h.fine, h.fine_count, 2) &&
         place(h.change_offsets, h.change_count, 1) && place(h.change_rows, h.change_count, 1) &&
         place(h.expressions, h.expression_bytes, 1) && at == h.size;
}

bool value_ok(ValueKind kind, int32_t offset, unsigned regs, uint32_t expressions) {
  switch (kind) {
    case ValueKind::same:
    case ValueKind::at_cfa:
    case ValueKind::cfa_plus:
    case ValueKind::undefined: return true;
    case ValueKind::in_register: return offset >= 0 && static_cast<unsigned>(offset) < regs;
    case ValueKind::at_expression:
    case ValueKind::is_expression: return offset >= 0 && static_cast<uint32_t>(offset) < expressions;
  }
  return false;
}

bool row_ok(const Row& row, unsigned regs, uint32_t expressions) {
  constexpr uint8_t kFlags = kRowSignalFrame | kRowRaSigned | kRowRefuted | kRowInexpressible;
  if (row.flags & ~kFlags) return false;
  switch (row.cfa_kind) {
    case CfaKind::reg_offset:
    case CfaKind::deref_reg_offset:
      if (row.cfa_reg >= regs) return false;
      break;
    case CfaKind::expression:
      if (row.cfa_offset < 0 || static_cast<uint32_t>(row.cfa_offset) >= expressions) return false;
      break;
    default: return false;
  }
  if (!value_ok(row.ra_kind, row.ra_offset, regs, expressions)) return false;
  for (const SavedReg& saved : row.saved)
    if (!value_ok(saved.kind, saved.offset, regs, expressions)) return false;
  return true;
}

struct Changes {
  const uint8_t *offsets, *rows;
  uint32_t row_count;
  bool plain[256] = {};  // bytes that lead to a row, or a gap, by themselves

  Changes(const uint8_t* offsets, const uint8_t* rows, uint32_t row_count)
      : offsets(offsets), rows(rows), row_count(row_count) {
    for (unsigned byte = 0; byte < kGapByte && byte < row_count; byte++) plain[byte] = true;
    plain[kGapByte] = true;
  }

  // Of the changes [at, end) at one offset, which must be all that are there.
  bool group_ok(uint32_t at, uint32_t end) const {
    uint8_t last = rows[end - 1];
    if (last != kEscapeByte) return end - at == 1 && (last == kGapByte || last < row_count);
    return end - at == 3 && static_cast<uint32_t>(rows[at] << 8 | rows[at + 1]) < row_count;
  }
  // All of 256 bytes of code, of which `size` are covered.
  bool chunk_ok(uint32_t at, uint32_t end, uint64_t size) const {
    if (at < end && offsets[end - 1] >= size) return false;
    while (at < end) {
      if (plain[rows[at]] && (at + 1 == end || offsets[at + 1] > offsets[at])) {
        at++;
        continue;
      }
      uint32_t next = at + 1;
      while (next < end && offsets[next] == offsets[at]) next++;
      if ((next < end && offsets[next] < offsets[at]) || !group_ok(at, next)) return false;
      at = next;
    }
    return true;
  }
};

// One block's changes and fine indices; `size` bytes of code are in it.
bool block_ok(const TableHeader& h, const TableBlock* block, uint64_t size, const uint16_t* fine,
              const Changes& changes) {
  uint32_t first = block->first_change, end = block[1].first_change;
  if (first >= end || end > h.change_count || changes.offsets[first] != 0) return false;
  if (block->first_fine == kNoFine) return changes.chunk_ok(first, end, 1);
  if (block->first_fine > h.fine_count || h.fine_count - block->first_fine < kFinePerBlock) return false;
  fine += block->first_fine;
  if (fine[0] != 0 || fine[1] == 0 || fine[kChunksPerBlock] != end - first) return false;
  for (unsigned chunk = 0; chunk < kChunksPerBlock; chunk++) {
    uint64_t begin = uint64_t{chunk} << kFineShift;
    if (fine[chunk] > fine[chunk + 1] || fine[chunk + 1] > end - first ||
        !changes.chunk_ok(first + fine[chunk], first + fine[chunk + 1], size > begin ? size - begin : 0))
      return false;
  }
  return true;
}

}  // namespace

// Four lanes of multiply and rotate over 8-byte words, which do not wait for each other: finds accidents, not attacks; those
// are open()'s other checks.
uint64_t table_checksum(std::span<const uint8_t> bytes) {
  constexpr uint64_t kMultiplier = 0x9e3779b97f4a7c15;
  uint64_t a = bytes.size(), b = ~a, c = a << 32, d = ~c;
  auto word = [&](size_t at) {
    uint64_t value;
    __builtin_memcpy(&value, bytes.data() + at, 8);
    return value;
  };
  auto mix = [](uint64_t lane, uint64_t value) {
    uint64_t mixed = (lane ^ value) * kMultiplier;
    return mixed << 27 | mixed >> 37;
  };
  size_t i = 0;
  for (; bytes.size() - i >= 32; i += 32)
    a = mix(a, word(i)), b = mix(b, word(i + 8)), c = mix(c, word(i + 16)), d = mix(d, word(i + 24));
  for (; bytes.size() - i >= 8; i += 8) a = mix(a, word(i));
  uint64_t rest = 0;
  for (unsigned k = 0; i < bytes.size(); k++) rest |= static_cast<uint64_t>(bytes[i++]) << (8 * k);
  a = mix(a, rest), b = mix(b, c), b = mix(b, d);
  return (a * kMultiplier) ^ (b >> 17) ^ b;
}

Result<Table> Table::open(std::span<const uint8_t> bytes) {
  if (reinterpret_cast<uintptr_t>(bytes.data()) % 8) return fail(ErrorCode::malformed);
  if (bytes.size() < sizeof(TableHeader)) return fail(ErrorCode::truncated, bytes.size());
  Table table(reinterpret_cast<const TableHeader*>(bytes.data()));
  const TableHeader& h = table.header();
  if (h.magic != kTableMagic) return fail(ErrorCode::malformed);
  if (h.version != kTableVersion) return fail(ErrorCode::unsupported, h.version);
  if (h.size != bytes.size()) return fail(ErrorCode::truncated, bytes.size());
  unsigned regs = h.machine == kMachineX86_64 ? X86_64::kRegs : h.machine == kMachineAarch64 ? Aarch64::kRegs : 0;
  if (!regs) return fail(ErrorCode::unsupported, h.machine);
  constexpr uint64_t kBlock = uint64_t{1} << kBlockShift;
  if (h.span > kMaxTableSpan || h.base + h.span < h.base || h.base % kBlock || h.row_count > kGapRow ||
      (h.span + kBlock - 1) / kBlock != h.block_count || !layout_matches(h))
    return fail(ErrorCode::malformed, 16);
  if (table_checksum(bytes.subspan(kChecksummedFrom)) != h.checksum) return fail(ErrorCode::malformed, 8);

  for (const Row& row : table.rows())
    if (!row_ok(row, regs, h.expression_count)) return fail(ErrorCode::malformed, h.rows);
  const auto* starts = table.part<uint32_t>(h.expression_starts);
  for (uint32_t e = 0; e < h.expression_count; e++)
    if (starts[e] > starts[e + 1]) return fail(ErrorCode::malformed, h.expression_starts);
  if (starts[0] != 0 || starts[h.expression_count] != h.expression_bytes)
    return fail(ErrorCode::malformed, h.expression_starts);
  const auto* blocks = table.part<TableBlock>(h.blocks);
  if (blocks[0].first_change != 0 || blocks[h.block_count].first_change != h.change_count)
    return fail(ErrorCode::malformed, h.blocks);
  const Changes changes(table.part<uint8_t>(h.change_offsets), table.part<uint8_t>(h.change_rows), h.row_count);
  for (uint32_t b = 0; b < h.block_count; b++)
    if (!block_ok(h, blocks + b, h.span - b * kBlock, table.part<uint16_t>(h.fine), changes))
      return fail(ErrorCode::malformed, h.blocks);
  return table;
}

std::span<const uint8_t> Table::expression(uint32_t number) const {
  const TableHeader& h = *header_;
  if (number >= h.expression_count) return {};
  const auto* starts = part<uint32_t>(h.expression_starts);
  return {part<uint8_t>(h.expressions) + starts[number], starts[number + 1] - starts[number]};
}

}  // namespace sonde
