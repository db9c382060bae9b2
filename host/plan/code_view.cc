// See code_view.h.
#include "host/plan/code_view.h"

#include <algorithm>

namespace sonde::host {
namespace {

const Piece* piece_at(const CodeView& view, uint64_t addr) {
  for (const Piece& p : view.pieces)
    if (addr - p.begin < p.bytes.size()) return &p;
  return nullptr;
}

}  // namespace

std::span<const uint8_t> CodeView::at(uint64_t addr) const {
  const Piece* p = piece_at(*this, addr);
  return p ? p->bytes.subspan(addr - p->begin) : std::span<const uint8_t>{};
}

std::span<const uint8_t> CodeView::code_at(uint64_t addr) const {
  const Piece* p = piece_at(*this, addr);
  return p && p->executable ? p->bytes.subspan(addr - p->begin) : std::span<const uint8_t>{};
}

bool CodeView::in_code_section(uint64_t addr) const {
  return code_sections.empty() ||
         std::ranges::any_of(code_sections, [&](const CodeRange& s) { return s.begin <= addr && addr < s.end; });
}

bool CodeView::has_unknown_pads(uint64_t addr) const {
  auto it = std::ranges::upper_bound(unknown_pads, addr, {}, &CodeRange::begin);
  return it != unknown_pads.begin() && addr < (it - 1)->end;
}

size_t CodeView::function_from(uint64_t addr) const {
  auto it = std::partition_point(functions.begin(), functions.end(), [&](const CodeRange& f) { return f.end <= addr; });
  return static_cast<size_t>(it - functions.begin());
}

void CodeView::finish() {
  std::sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) { return a.begin < b.begin; });
  std::sort(functions.begin(), functions.end(),
            [](const CodeRange& a, const CodeRange& b) { return a.begin < b.begin; });
  for (size_t i = 0; i + 1 < functions.size(); i++)
    functions[i].end = std::min(functions[i].end, functions[i + 1].begin);
  text_begin = text_end = 0;
  for (const Piece& p : pieces) {
    if (!p.executable) continue;
    if (text_end == 0) text_begin = p.begin;
    text_end = p.end();
  }
}

}  // namespace sonde::host
