#include "core/probe/dynamic_symbols.h"

#include <elf.h>

#include "core/probe/safe_read.h"

namespace sonde {
namespace {

struct LinkMap {  // the public beginning of struct link_map
  uint64_t bias, name, dynamic, next, previous;
};
struct LoaderDebug {  // struct r_debug_extended (glibc 2.35); `next` only from version 2 on
  int32_t version;
  uint64_t map, brk;
  int32_t state;
  uint64_t base, next;
};
constexpr int kMaxImages = 4096, kMaxNamespaces = 16, kMaxSegments = 64;

template <class T>
bool read(uint64_t from, T* to) {
  return safe_read(from, to, sizeof *to) == sizeof *to;
}

// The image's range, from its program headers. The ELF header is mapped in front of them, at the start of the page-aligned
// mapping that l_addr names for all but position-dependent executables.
bool read_extent(const LinkMap& map, DynamicSymbols* image) {
  uint64_t header_address = map.bias ? map.bias : map.dynamic & ~uint64_t{0xfff};
  Elf64_Ehdr header;
  // A position-dependent executable has bias 0: look for its header below its dynamic section.
  for (int pages = 0;; pages++, header_address -= 0x1000) {
    if (pages == 1 << 16 || !read(header_address, &header)) return false;
    if (header.e_ident[0] == 0x7f && header.e_ident[1] == 'E' && header.e_ident[2] == 'L' && header.e_ident[3] == 'F')
      break;
    if (map.bias) return false;
  }
  image->begin = ~uint64_t{0}, image->end = 0;
  for (int i = 0; i < header.e_phnum && i < kMaxSegments; i++) {
    Elf64_Phdr segment;
    if (!read(header_address + header.e_phoff + uint64_t(i) * header.e_phentsize, &segment)) return false;
    if (segment.p_type != PT_LOAD) continue;
    uint64_t begin = map.bias + segment.p_vaddr, end = begin + segment.p_memsz;
    if (begin < image->begin) image->begin = begin;
    if (end > image->end) image->end = end;
  }
  return image->begin < image->end;
}

bool read_dynamic(const LinkMap& map, DynamicSymbols* image) {
  for (int i = 0; i < 256; i++) {
    Elf64_Dyn entry;
    if (!read(map.dynamic + uint64_t(i) * sizeof entry, &entry)) return false;
    // The loader relocates these in place, except in read-only dynamic sections.
    uint64_t value = entry.d_un.d_ptr;
    uint64_t address = value < image->begin ? value + map.bias : value;
    switch (entry.d_tag) {
      case DT_NULL: return image->symbols && image->strings && (image->gnu_hash || image->hash);
      case DT_SYMTAB: image->symbols = address; break;
      case DT_STRTAB: image->strings = address; break;
      case DT_GNU_HASH: image->gnu_hash = address; break;
      case DT_HASH: image->hash = address; break;
    }
  }
  return false;
}

template <class T>
T at(uint64_t address, uint64_t index = 0) {
  return reinterpret_cast<const T*>(address)[index];
}

bool same_text(const char* a, const char* b) {
  while (*a && *a == *b) a++, b++;
  return *a == *b;
}

uint64_t match(const DynamicSymbols& image, uint32_t index, const char* name) {
  auto symbol = at<Elf64_Sym>(image.symbols, index);
  if (symbol.st_shndx == SHN_UNDEF || !symbol.st_value || ELF64_ST_TYPE(symbol.st_info) != STT_FUNC) return 0;
  return same_text(reinterpret_cast<const char*>(image.strings) + symbol.st_name, name) ? image.bias + symbol.st_value
                                                                                        : 0;
}

//   nbuckets, symoffset, bloom_size, bloom_shift: u32; bloom[bloom_size]: u64; buckets[nbuckets]: u32; chain: u32...
uint64_t find_gnu(const DynamicSymbols& image, const char* name) {
  uint32_t hash = 5381;
  for (const char* c = name; *c; c++) hash = hash * 33 + static_cast<unsigned char>(*c);
  auto bucket_count = at<uint32_t>(image.gnu_hash, 0), first = at<uint32_t>(image.gnu_hash, 1);
  uint64_t buckets = image.gnu_hash + 16 + uint64_t{at<uint32_t>(image.gnu_hash, 2)} * 8;
  uint64_t chain = buckets + uint64_t{bucket_count} * 4;
  if (!bucket_count) return 0;
  uint32_t index = at<uint32_t>(buckets, hash % bucket_count);
  if (index < first) return 0;
  for (;; index++) {
    uint32_t there = at<uint32_t>(chain, index - first);
    if ((there | 1) == (hash | 1))
      if (uint64_t found = match(image, index, name)) return found;
    if (there & 1) return 0;
  }
}

}  // namespace

bool find_image(uint64_t loader_debug, uint64_t address, DynamicSymbols* image) {
  for (int spaces = 0; loader_debug && spaces < kMaxNamespaces; spaces++) {
    LoaderDebug debug;
    if (!read(loader_debug, &debug)) return false;
    LinkMap map;
    uint64_t next = debug.map;
    for (int i = 0; next && i < kMaxImages && read(next, &map); i++, next = map.next) {
      *image = {0, 0, map.bias, 0, 0, 0, 0};
      if (!map.dynamic || !read_extent(map, image) || address < image->begin || address >= image->end) continue;
      return read_dynamic(map, image);
    }
    loader_debug = debug.version >= 2 ? debug.next : 0;
  }
  return false;
}

uint64_t find_symbol(const DynamicSymbols& image, const char* name) {
  if (image.gnu_hash) return find_gnu(image, name);
  uint32_t count = at<uint32_t>(image.hash, 1);  // nchain: number of symbols
  for (uint32_t i = 0; i < count; i++)
    if (uint64_t found = match(image, i, name)) return found;
  return 0;
}

}  // namespace sonde
