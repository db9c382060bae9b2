// Layout (packed, little-endian):
//   header     u16 magic, u8 version, u8 flags, u8 abi, s8 fixed fp, s8 fixed ra, u8 size of an auxiliary header,
//              u32 functions, u32 rows, u32 bytes of rows, u32 offset of functions, u32 offset of rows (behind both headers)
//   function   s32 start, u32 size, u32 first row, u32 rows, u8 info; version 2: u8 repeated size, u16 padding
//   row        u8/u16/u32 start, u8 info, offsets of 1, 2 or 4 bytes: CFA, [RA unless fixed], [FP unless fixed]
// info of a function: bits 0-3 size of starts, bit 4 repeated blocks, bit 5 pauth key (both keys are stripped alike).
// info of a row: bit 0 base is sp (else fp), bits 1-4 offsets, bits 5-6 their size, bit 7 RA is signed.
#include "host/tables/sframe.h"

#include <fmt/format.h>

#include <limits>

#include "core/base/cursor.h"
#include "core/isa/aarch64.h"
#include "core/isa/x86_64.h"

namespace sonde::host {
namespace {

constexpr uint16_t kMagic = 0xdee2;
constexpr uint32_t kMachineAarch64 = 183;
constexpr uint8_t kSorted = 1, kFramePointer = 2, kStartIsPcrel = 4;  // flags; the last one is of version 2 only
constexpr uint8_t kAbiAarch64 = 2, kAbiAmd64 = 3;  // little-endian both
constexpr uint32_t kStubSize = 16;  // version 1 does not state it; of AMD64's linkage stubs

struct Header {
  uint8_t version, flags, abi, auxiliary;
  int8_t fixed_fp, fixed_ra;
  uint32_t functions, rows, row_bytes, functions_at, rows_at;
};

Header read_header(Cursor& at) {
  Header h{};
  at.skip(2);
  h.version = at.read<uint8_t>(), h.flags = at.read<uint8_t>(), h.abi = at.read<uint8_t>();
  h.fixed_fp = at.read<int8_t>(), h.fixed_ra = at.read<int8_t>(), h.auxiliary = at.read<uint8_t>();
  h.functions = at.read<uint32_t>(), h.rows = at.read<uint32_t>(), h.row_bytes = at.read<uint32_t>();
  h.functions_at = at.read<uint32_t>(), h.rows_at = at.read<uint32_t>();
  at.skip(h.auxiliary);
  return h;
}

// Without message: the header can be believed as far as it can be checked alone.
const char* fault_of(const Header& h, uint32_t machine, uint64_t left) {
  if (h.abi != (machine == kMachineAarch64 ? kAbiAarch64 : kAbiAmd64)) return "is for another processor";
  if (h.flags & ~(kSorted | kFramePointer | (h.version == 2 ? kStartIsPcrel : 0))) return "has unknown flags";
  if (machine != kMachineAarch64 && h.fixed_ra != -8) return "has no return address below the CFA";
  if (machine == kMachineAarch64 && h.fixed_ra != 0) return "has a fixed return address";
  uint64_t table = uint64_t{h.functions} * (h.version == 1 ? 17 : 20);
  uint64_t table_end = h.functions_at + table, rows_end = uint64_t{h.rows_at} + h.row_bytes;
  if (table_end > left || rows_end > left) return "ends before what its header says";
  if (h.rows > h.row_bytes / 2) return "has fewer bytes of rows than its rows take";
  if (table && h.row_bytes && h.functions_at < rows_end && h.rows_at < table_end)
    return "has functions where its rows are";
  return nullptr;
}

}  // namespace

Result<SFrame> SFrame::open(const SFrameSection& section, uint32_t machine) {
  Cursor at(section.bytes);
  uint16_t magic = at.read<uint16_t>();
  if (!at.ok() || magic != kMagic) return fail(".sframe has no magic number of this byte order");
  Cursor again(section.bytes);
  Header h = read_header(again);
  if (h.version != 1 && h.version != 2)
    return fail(fmt::format(".sframe is of version {}, which is not known", h.version));
  if (!again.ok()) return fail(".sframe is cut off in its header");
  if (const char* fault = fault_of(h, machine, again.left())) return fail(fmt::format(".sframe {}", fault));

  SFrame out;
  out.section_ = section, out.machine_ = machine;
  out.version_ = h.version, out.flags_ = h.flags, out.fixed_fp_ = h.fixed_fp, out.fixed_ra_ = h.fixed_ra;
  auto body = section.bytes.subspan(again.at());
  out.entries_ = body.subspan(h.rows_at, h.row_bytes);
  ImageAddr table_address = section.address + static_cast<int64_t>(again.at() + h.functions_at);
  auto table = body.subspan(h.functions_at);
  SONDE_TRY(out.read_functions(table, h.functions, h.rows, table_address));
  return out;
}

Result<void> SFrame::read_functions(std::span<const uint8_t> table, uint32_t count, uint32_t rows,
                                    ImageAddr table_address) {
  Cursor at(table);
  uint64_t sum = 0;
  for (uint32_t i = 0; i < count; i++) {
    uint64_t base = (flags_ & kStartIsPcrel ? table_address.value + at.at() : section_.address.value);
    uint64_t begin = base + static_cast<uint64_t>(int64_t{at.read<int32_t>()});
    uint64_t size = at.read<uint32_t>();
    SFrameFunction function{{ImageAddr(begin), ImageAddr(begin + size)}};
    function.first_entry = at.read<uint32_t>(), function.entries = at.read<uint32_t>();
    uint8_t info = at.read<uint8_t>(), repeated = kStubSize;
    if (version_ == 2) repeated = at.read<uint8_t>(), at.skip(2);
    unsigned size_code = info & 0xf;
    if (size_code > 2) return fail(fmt::format(".sframe: function {} has row entries of an unknown kind", i));
    function.address_size = static_cast<uint8_t>(1u << size_code);
    if (info & 0x10) function.repeat = repeated;
    if (info & 0x10 && (repeated == 0 || (version_ == 1 && machine_ == kMachineAarch64)))
      return fail(fmt::format(".sframe: function {} repeats blocks of unknown size", i));
    if (begin + size < begin) return fail(fmt::format(".sframe: function {} wraps around", i));
    if (flags_ & kSorted && i && begin < functions_.back().range.begin.value)
      return fail(fmt::format(".sframe: function {} is not sorted, as the header says", i));
    sum += function.entries;
    functions_.push_back(function);
  }
  if (sum != rows) return fail(fmt::format(".sframe: {} rows of functions, where the header says {}", sum, rows));
  return {};
}

bool SFrame::rows(const SFrameFunction& function, std::vector<SFrameRow>* out) const {
  out->clear();
  if (function.first_entry > entries_.size()) return false;
  Cursor at(entries_, function.first_entry);
  uint64_t end = function.repeat ? function.repeat : function.range.size();
  for (uint32_t i = 0; i < function.entries; i++) {
    uint32_t offset = function.address_size == 1   ? at.read<uint8_t>()
                      : function.address_size == 2 ? at.read<uint16_t>()
                                                   : at.read<uint32_t>();
    uint8_t info = at.read<uint8_t>();
    unsigned count = info >> 1 & 0xf, size_code = info >> 5 & 3;
    int32_t offsets[15] = {};
    if (size_code > 2) return false;
    for (unsigned k = 0; k < count; k++)
      offsets[k] = size_code == 0 ? at.read<int8_t>() : size_code == 1 ? at.read<int16_t>() : at.read<int32_t>();
    if (!at.ok() || offset >= end || (i == 0 ? offset != 0 : offset <= out->back().offset)) return false;
    SFrameRow row = make_row(info, std::span(offsets, count));
    row.offset = offset;
    out->push_back(row);
  }
  return !out->empty();
}

SFrameRow SFrame::make_row(uint8_t info, std::span<const int32_t> offsets) const {
  bool aarch64 = machine_ == kMachineAarch64;
  Row row;
  size_t used = 0;
  auto next = [&](int8_t fixed, int32_t* offset) {
    if (fixed) return *offset = fixed, true;
    return used < offsets.size() && (*offset = offsets[used++], true);
  };
  int32_t fp = 0;
  bool expressible = next(0, &row.cfa_offset);
  if (next(fixed_ra_, &row.ra_offset)) row.ra_kind = ValueKind::at_cfa;
  bool has_fp = next(fixed_fp_, &fp);
  if (used != offsets.size() || fp < INT16_MIN || fp > INT16_MAX) expressible = false;

  bool by_sp = info & 1, is_signed = info & 0x80;
  if (aarch64) {
    if (row.ra_kind == ValueKind::undefined) row.ra_kind = ValueKind::same;
    if (is_signed) row.flags |= kRowRaSigned;
  } else if (is_signed) {
    expressible = false;
  }
  row.cfa_reg = aarch64 ? uint8_t{by_sp ? Aarch64::kSp : Aarch64::kFp} : uint8_t{by_sp ? X86_64::kSp : X86_64::kFp};
  std::span<const uint8_t> saved = aarch64 ? std::span<const uint8_t>(Aarch64::kSaved) : X86_64::kSaved;
  for (size_t i = 1; i < saved.size(); i++) row.saved[i].kind = ValueKind::undefined;
  if (has_fp) row.saved[0] = {static_cast<int16_t>(fp), ValueKind::at_cfa};
  if (aarch64) {  // x30 is where the return address is
    row.saved[1] = {};
    if (row.ra_kind == ValueKind::at_cfa && row.ra_offset >= INT16_MIN && row.ra_offset <= INT16_MAX)
      row.saved[1] = {static_cast<int16_t>(row.ra_offset), ValueKind::at_cfa};
    else if (row.ra_kind == ValueKind::at_cfa) row.saved[1].kind = ValueKind::undefined;
  }
  return {0, expressible, row};
}

}  // namespace sonde::host
