// See landing_pads.h. What cannot be read gives no landing pads: their code then counts as not reached.
#include "host/check/landing_pads.h"

#include <algorithm>

#include "host/tables/cfi.h"

namespace sonde::host::check {
namespace {

constexpr uint8_t kOmit = 0xff;  // DW_EH_PE_omit

}  // namespace

LandingPads::LandingPads(const Image& image) {
  for (const Section& section : image.sections()) {
    if (section.name != ".eh_frame" || !section.addr) continue;
    CfiSection source{image.bytes(section), section.addr};
    for (const Fde& fde : read_entries(source).fdes)
      if (fde.lsda) read_area(image, fde.lsda, fde.range);
  }
  std::ranges::sort(sites_, {}, &Site::begin);
}

void LandingPads::read_area(const Image& image, ImageAddr area, ImageRange function) {
  std::span<const uint8_t> bytes;
  for (const Segment& s : image.segments())
    if (s.range.contains(area)) bytes = image.bytes({area, std::min(s.range.end, s.range.begin + static_cast<int64_t>(s.file_size))});
  CfiSection source{bytes, area};
  Cursor at(bytes);
  uint64_t start = function.begin.value;
  if (uint8_t encoding = at.read<uint8_t>(); encoding != kOmit) {
    auto given = read_encoded(at, encoding, source, start);
    if (!given) return;
    start = *given;
  }
  if (at.read<uint8_t>() != kOmit) at.uleb();  // types
  uint8_t encoding = at.read<uint8_t>();
  uint64_t size = at.uleb();
  if (!at.ok() || size > at.left() || encoding & 0xf0) return;
  for (uint64_t end = at.at() + size; at.at() < end;) {
    auto begin = read_encoded(at, encoding, source, 0), length = read_encoded(at, encoding, source, 0),
         pad = read_encoded(at, encoding, source, 0);
    at.uleb();  // action
    if (!begin || !length || !pad || !at.ok()) return;
    if (*pad) sites_.push_back({function.begin.value + *begin, function.begin.value + *begin + *length, start + *pad});
  }
}

uint64_t LandingPads::pad_of(uint64_t pc) const {
  auto it = std::ranges::upper_bound(sites_, pc, {}, &Site::begin);
  return it != sites_.begin() && pc < (it - 1)->end ? (it - 1)->pad : 0;
}

}  // namespace sonde::host::check
