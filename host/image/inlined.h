// Functions that exist only inside others: what DWARF says of a name that no symbol has.
#pragma once

#include <string>

#include "host/image/elf_file.h"

namespace sonde::host {

// Whether a function whose name, plain or qualified, matches the glob was inlined (DW_AT_inline, DWARF 5, 3.3.8.1).
// Looks at no more than the first two million entries.
bool knows_inlined(const ElfFile& file, const std::string& glob);

}  // namespace sonde::host
