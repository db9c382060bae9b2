// See code_view.h. Symbol tables: System V gABI chapter 4.
#include "host/plan/code_view.h"

#include <elf.h>

#include <algorithm>
#include <cstring>

namespace sonde::host {
namespace {

const Piece* piece_at(const CodeView& view, uint64_t addr) {
  for (const Piece& p : view.pieces)
    if (addr - p.begin < p.bytes.size()) return &p;
  return nullptr;
}

void collect_labels(const Image& image, uint64_t bias, CodeView& view) {
  for (const Section& section : image.sections()) {
    if (section.type != SHT_SYMTAB && section.type != SHT_DYNSYM) continue;
    auto bytes = image.bytes(section);
    for (size_t at = 0; at + sizeof(Elf64_Sym) <= bytes.size(); at += sizeof(Elf64_Sym)) {
      Elf64_Sym symbol;
      std::memcpy(&symbol, bytes.data() + at, sizeof symbol);
      int type = ELF64_ST_TYPE(symbol.st_info);
      bool code = type == STT_NOTYPE || type == STT_FUNC || type == STT_GNU_IFUNC;
      if (code && symbol.st_shndx != SHN_UNDEF && symbol.st_shndx != SHN_ABS) view.labels.push_back(symbol.st_value + bias);
    }
  }
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

size_t CodeView::function_from(uint64_t addr) const {
  auto it = std::partition_point(functions.begin(), functions.end(), [&](const CodeRange& f) { return f.end <= addr; });
  return static_cast<size_t>(it - functions.begin());
}

void CodeView::finish() {
  std::sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) { return a.begin < b.begin; });
  std::sort(functions.begin(), functions.end(), [](const CodeRange& a, const CodeRange& b) { return a.begin < b.begin; });
  for (size_t i = 0; i + 1 < functions.size(); i++) functions[i].end = std::min(functions[i].end, functions[i + 1].begin);
  text_begin = text_end = 0;
  for (const Piece& p : pieces) {
    if (!p.executable) continue;
    if (text_end == 0) text_begin = p.begin;
    text_end = p.end();
  }
}

CodeView view_code(const LoadedImage& loaded) {
  const Image& image = *loaded.image;
  CodeView view;
  view.bias = loaded.bias;
  view.begin = loaded.range.begin.value, view.end = loaded.range.end.value;
  view.position_dependent = image.type() == ET_EXEC;
  // The kernel places programs below the region for mappings, libraries in it.
  view.main_program = view.begin < 0x700000000000;
  for (const Segment& s : image.segments()) {
    auto bytes = image.bytes({s.range.begin, s.range.begin + static_cast<int64_t>(std::min(s.file_size, s.range.size()))});
    if (!bytes.empty()) view.pieces.push_back({s.range.begin.value + loaded.bias, bytes, s.executable});
  }
  for (const Function& f : image.functions())
    view.functions.push_back({f.range.begin.value + loaded.bias, f.range.end.value + loaded.bias});
  collect_labels(image, loaded.bias, view);
  view.finish();
  return view;
}

}  // namespace sonde::host
