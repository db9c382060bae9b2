// Raw ELF symbols with their versions, as views into the file they were read from.
#pragma once

#include <string_view>
#include <vector>

#include "host/image/elf_file.h"

namespace sonde::host {

struct RawSymbol {
  ImageAddr addr;
  uint64_t size;
  uint64_t limit;            // end of its section (or segment): no symbol reaches beyond
  std::string_view name;     // without version
  std::string_view version;  // "" if none
  bool default_version;      // foo@@V, not foo@V
  bool dynamic;              // from .dynsym
  bool executable;           // in a section (or segment) of code
  uint8_t type, binding;     // STT_*, STB_*
};

// Appends the defined symbols of the file's .symtab (or .dynsym) that have a name and an address. Symbols whose table
// is damaged are left out. Views live as long as `file`.
void read_symbols(const ElfFile& file, bool dynamic, std::vector<RawSymbol>& out);

// foo@@V and foo@V in the way ld writes them into .symtab, split; a name that begins with @ stays whole.
struct VersionedName {
  std::string_view name, version;
  bool default_version;
};
VersionedName split_version(std::string_view name);

}  // namespace sonde::host
