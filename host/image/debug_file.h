// Finds the file that holds what `strip` took away: by build id, by .gnu_debuglink, or the small symbol table packed
// into .gnu_debugdata.
#pragma once

#include <memory>
#include <string>

#include "host/image/elf_file.h"

namespace sonde::host {

// Null if there is none that belongs to `file`: a debug file must have the same build id, or where there is no build
// id the check sum that .gnu_debuglink states. `debug_root` is /usr/lib/debug but for tests.
std::unique_ptr<ElfFile> find_debug_file(const ElfFile& file, const std::string& path,
                                         const std::string& debug_root = "/usr/lib/debug");

}  // namespace sonde::host
