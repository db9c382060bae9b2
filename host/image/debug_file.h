// Finds the file that holds what `strip` took away: by build id, by .gnu_debuglink, or the small symbol table packed
// into .gnu_debugdata.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "host/image/elf_file.h"

namespace sonde::host {

// Folders with debug files, by build id (.build-id/ab/cdef.debug) and by path: /usr/lib/debug. Others may be put in front
// of it. Start-up only.
std::vector<std::string>& debug_roots();

// Null if there is none that belongs to `file`: a debug file must have the same build id, and one that is found by
// .gnu_debuglink the check sum stated there. `problem` (may be null) names one that does not. A file that was opened through
// /proc/PID/root is looked for there too.
std::unique_ptr<ElfFile> find_debug_file(const ElfFile& file, const std::string& path, std::string* problem,
                                         std::span<const std::string> roots = debug_roots());

}  // namespace sonde::host
