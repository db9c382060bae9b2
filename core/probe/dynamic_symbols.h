// Names in loaded images, through the loader's own list, without calling the loader. ELF gABI chapter 5; the GNU hash
// table as in binutils' and glibc's elf/dl-lookup.c. Reads images through safe_read where the list may be wrong. Signal-safe.
#pragma once

#include <cstdint>

namespace sonde {

struct DynamicSymbols {
  uint64_t begin, end;  // of the image's mappings
  uint64_t bias;
  uint64_t symbols, strings, gnu_hash, hash;  // addresses; 0: none
};

// The image that holds `address`. loader_debug: address of struct r_debug; all link-map namespaces that it chains.
bool find_image(uint64_t loader_debug, uint64_t address, DynamicSymbols* image);

// Address of a defined dynamic function; 0: none.
uint64_t find_symbol(const DynamicSymbols& image, const char* name);

}  // namespace sonde
