// One thread's memory of which row belongs to which pc: direct mapped, one word per entry, so that a signal handler that
// walks in between needs no protocol: a word is read or written whole. All zero is an empty cache. It only ever holds pcs
// that passed every check of the walker. Signal-safe.
//
//   63         24 23        0
//  +-------------+-----------+   key = pc * 2 + is_return (48 bits); its low bits, mixed with the rest, are the index,
//  | key >> 9    | reference |   so the tag tells keys apart exactly.
//  +-------------+-----------+   reference: (row - arena) / 4, or kOutermost; 0: empty.
#pragma once

#include <cstdint>

#include "core/base/addr.h"

namespace sonde {

struct RowCache {
  static constexpr unsigned kIndexBits = 9, kReferenceBits = 24;
  static constexpr uint32_t kOutermost = 1;  // no row lies there: the arena begins with its header
  static constexpr uint64_t kMaxPc = uint64_t{1} << 47;
  static constexpr uint64_t kMaxDistance = uint64_t{4} << kReferenceBits;  // of a row from the arena's start

  uint64_t generation = 0;  // of the arena that the references mean
  uint64_t words[1u << kIndexBits] = {};

  static constexpr uint64_t key(CodeAddr code) { return code.pc.value << 1 | static_cast<uint64_t>(code.is_return); }
  static constexpr unsigned index(uint64_t key) {
    return static_cast<unsigned>((key ^ key >> kIndexBits ^ key >> 2 * kIndexBits) & ((1u << kIndexBits) - 1));
  }

  // `mine`: generation of the arena of this walk. A handler may have gone over to a newer arena in between.
  uint32_t find(CodeAddr code, uint64_t mine) const {
    uint64_t k = key(code);
    uint64_t word = __atomic_load_n(&words[index(k)], __ATOMIC_RELAXED);
    __atomic_signal_fence(__ATOMIC_SEQ_CST);
    bool hit = word >> kReferenceBits == k >> kIndexBits && code.pc.value < kMaxPc;
    return hit && __atomic_load_n(&generation, __ATOMIC_RELAXED) == mine ? word & ((1u << kReferenceBits) - 1) : 0;
  }

  void keep(CodeAddr code, uint32_t reference, uint64_t mine) {
    if (code.pc.value >= kMaxPc || __atomic_load_n(&generation, __ATOMIC_RELAXED) != mine) return;
    uint64_t k = key(code);
    uint64_t* word = &words[index(k)];
    __atomic_store_n(word, k >> kIndexBits << kReferenceBits | reference, __ATOMIC_RELAXED);
    __atomic_signal_fence(__ATOMIC_SEQ_CST);
    if (__atomic_load_n(&generation, __ATOMIC_RELAXED) != mine) __atomic_store_n(word, 0, __ATOMIC_RELAXED);
  }

  // Empties the cache if it was filled from another arena. A handler that interrupts this sees the new generation only
  // after the words are empty, and repeats the work at worst.
  void follow(uint64_t arena_generation) {
    if (__atomic_load_n(&generation, __ATOMIC_RELAXED) == arena_generation) return;
    for (uint64_t& word : words) __atomic_store_n(&word, 0, __ATOMIC_RELAXED);
    __atomic_signal_fence(__ATOMIC_SEQ_CST);
    __atomic_store_n(&generation, arena_generation, __ATOMIC_RELAXED);
  }
};

}  // namespace sonde
