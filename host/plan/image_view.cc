// A CodeView of an image file. Symbol tables: System V gABI chapter 4.
#include <elf.h>

#include <algorithm>
#include <cstring>

#include "host/plan/code_view.h"
#include "host/plan/interval_set.h"
#include "host/tables/exception_tables.h"

namespace sonde::host {
namespace {

void collect_labels(const Image& image, uint64_t bias, CodeView& view) {
  for (const Section& section : image.sections()) {
    if (section.type != SHT_SYMTAB && section.type != SHT_DYNSYM) continue;
    auto bytes = image.bytes(section);
    for (size_t at = 0; at + sizeof(Elf64_Sym) <= bytes.size(); at += sizeof(Elf64_Sym)) {
      Elf64_Sym symbol;
      std::memcpy(&symbol, bytes.data() + at, sizeof symbol);
      int type = ELF64_ST_TYPE(symbol.st_info);
      bool code = type == STT_NOTYPE || type == STT_FUNC || type == STT_GNU_IFUNC;
      if (code && symbol.st_shndx != SHN_UNDEF && symbol.st_shndx != SHN_ABS)
        view.labels.push_back(symbol.st_value + bias);
    }
  }
}

}  // namespace

CodeView view_code(const LoadedImage& loaded) {
  const Image& image = *loaded.image;
  CodeView view;
  view.bias = loaded.bias;
  view.begin = loaded.range.begin.value, view.end = loaded.range.end.value;
  view.position_dependent = image.type() == ET_EXEC;
  // The kernel places programs below the region for mappings, libraries in it.
  view.main_program = view.begin < 0x700000000000;
  for (const Segment& s : image.segments()) {
    auto bytes =
        image.bytes({s.range.begin, s.range.begin + static_cast<int64_t>(std::min(s.file_size, s.range.size()))});
    if (!bytes.empty()) view.pieces.push_back({s.range.begin.value + loaded.bias, bytes, s.executable});
  }
  for (const Function& f : image.functions()) {
    ImageAddr end = f.range.end;
    // Where its code ends is found by decoding; finish() cuts it off at the next function.
    if (f.sizeless)
      for (const Segment& s : image.segments())
        if (s.range.contains(f.range.begin)) end = s.range.end;
    view.functions.push_back({f.range.begin.value + loaded.bias, end.value + loaded.bias});
  }
  for (const Section& s : image.sections())
    if (s.flags & SHF_EXECINSTR && s.flags & SHF_ALLOC && s.type == SHT_PROGBITS)
      view.code_sections.push_back({s.addr.value + loaded.bias, s.addr.value + loaded.bias + s.size});
  collect_labels(image, loaded.bias, view);
  view.finish();
  return view;
}

void add_landing_pads(const LoadedImage& loaded, CodeView& view) {
  ExceptionTables tables = read_exception_tables(*loaded.image);
  for (const ThrowingRange& r : tables.ranges) view.labels.push_back(r.pad + loaded.bias);
  IntervalSet unknown;
  for (ImageRange r : tables.unreadable) {
    uint64_t begin = std::max(r.begin.value + loaded.bias, view.text_begin),
             end = std::min(r.end.value + loaded.bias, view.text_end);
    unknown.add(begin, end);
  }
  for (auto [begin, end] : unknown) view.unknown_pads.push_back({begin, end});
}

}  // namespace sonde::host
