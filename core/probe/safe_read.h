// Reads memory of this process that may not be there. Rare paths only: one system call. Signal-safe.
#pragma once

#include <cstdint>

namespace sonde {

// Copies up to `bytes` bytes from `from`, returns how many could be read. Where the program's sandbox forbids the
// system call, reads only the first `known` bytes, which the caller knows to be mapped.
uint64_t safe_read(uint64_t from, void* to, uint64_t bytes, uint64_t known = 0);

// The 64-bit words at many addresses at once. found[i] tells whether addresses[i] could be read; count <= kMaxSafeWords.
constexpr unsigned kMaxSafeWords = 32;
void safe_read_words(const uint64_t* addresses, uint64_t* words, bool* found, unsigned count);

}  // namespace sonde
