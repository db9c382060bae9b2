// Files without section headers (sstrip, packers): the sections that reading needs, found through the program headers as
// the loader finds them.
#pragma once

#include <vector>

#include "host/image/elf_file.h"

namespace sonde::host {

struct FoundSection {
  Section section;
  uint32_t link = 0;  // sh_link: 1-based index of the string table
};

// .dynamic, .dynsym, .dynstr, versions, .eh_frame_hdr and .eh_frame, as far as they are there and lie in the file.
std::vector<FoundSection> sections_of_segments(const ElfFile& file);

}  // namespace sonde::host
