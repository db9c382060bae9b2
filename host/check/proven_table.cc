#include "host/check/proven_table.h"

#include <string.h>

#include <string_view>

#include "core/isa/x86_64.h"
#include "host/check/check.h"
#include "host/tables/refute.h"

namespace sonde::host {
namespace {

constexpr uint16_t kMachineX86_64 = 62;
constexpr std::string_view kSubByte = "\x48\x83\xec", kSubWord = "\x48\x81\xec";  // sub $imm,%rsp

// How far in front of `at` a push of a preserved register ends there begins: 1 or 2 bytes, 0: none does.
size_t push_before(std::span<const uint8_t> code, size_t at) {
  if (at == 0) return 0;
  uint8_t last = code[at - 1];
  if (at >= 2 && code[at - 2] == 0x41 && last >= 0x54 && last <= 0x57) return 2;  // r12..r15
  return last == 0x53 || last == 0x55 ? 1 : 0;                                    // rbx, rbp
}

bool claims(const Row* row, int64_t frame) {
  return row && !row->flags && row->cfa_kind == CfaKind::reg_offset && row->cfa_reg == X86_64::rsp &&
         row->cfa_offset == frame && row->ra_kind == ValueKind::at_cfa && row->ra_offset == -8;
}

// `at`: where a sub that makes `room` bytes begins, `end`: behind it.
bool is_claimed_all_along(const Table& table, ImageAddr base, std::span<const uint8_t> code, size_t at, size_t end,
                          int64_t room) {
  int64_t frame = room + 8;
  size_t begin = at;
  while (size_t push = push_before(code, begin)) begin -= push, frame += 8;
  if (frame == room + 8) return false;
  return claims(table.lookup(base + static_cast<int64_t>(begin)), frame) &&
         claims(table.lookup(base + static_cast<int64_t>(at)), frame) &&
         claims(table.lookup(base + static_cast<int64_t>(end)), frame);
}

}  // namespace

bool contradicts_a_prologue(const Image& image, const Table& table) {
  if (image.machine() != kMachineX86_64) return false;
  for (const Segment& segment : image.segments()) {
    if (!segment.executable) continue;
    auto code =
        image.bytes(ImageRange{segment.range.begin, segment.range.begin + static_cast<int64_t>(segment.file_size)});
    for (std::string_view sub : {kSubByte, kSubWord}) {
      const size_t size = sub.size() + (sub == kSubByte ? 1 : 4);
      for (size_t from = 0; from + size <= code.size();) {
        const void* hit = memmem(code.data() + from, code.size() - from, sub.data(), sub.size());
        if (!hit) break;
        size_t at = static_cast<size_t>(static_cast<const uint8_t*>(hit) - code.data());
        from = at + 1;
        if (at + size > code.size()) break;
        int32_t room = static_cast<int8_t>(code[at + 3]);
        if (sub == kSubWord) memcpy(&room, code.data() + at + 3, sizeof room);
        if (room > 0 && is_claimed_all_along(table, segment.range.begin, code, at, at + size, room)) return true;
      }
    }
  }
  return false;
}

Result<SharedTable> load_proven_table(const Image& image, const std::string& folder) {
  return load_table(image, folder, [](const Image& image, std::vector<uint8_t> bytes) -> Result<std::vector<uint8_t>> {
    const Table table = Table::at(bytes.data());
    if (!contradicts_a_prologue(image, table)) return bytes;
    auto report = SONDE_TRY(check::check_image(image, table));
    return mark_refuted(table, report.refuted());
  });
}

}  // namespace sonde::host
