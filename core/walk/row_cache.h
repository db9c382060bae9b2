// One thread's memory of which row belongs to which pc: sets of two words each, so that a signal handler that walks in
// between needs no protocol: a word is read or written whole, and says itself of which pc it speaks. All zero is an empty
// cache. It only ever holds pcs that passed every check of the walker. Signal-safe.
//
//   63       25 24                 1   0
//  +-----------+--------------------+-----+   reference: (row - arena) / 4, or kOutermost; 0: empty.
//  | pc >> 8   | reference          |exact|   The set is pc's low byte, mixed with the rest, so that set and tag tell
//  +-----------+--------------------+-----+   pcs apart exactly; exact: the pc is no return address.
//
// Rows that most frames have are kept decoded as well, which spares a walk two dependent loads (UsualRow).
#pragma once

#include <cstdint>

#include "core/base/addr.h"
#include "core/unwind/row.h"

namespace sonde {

// A row by which nearly all code of x86-64 is walked, in the 25 bits beside a tag: the CFA at a positive offset from sp or
// from the frame pointer; the return address just below it; the frame pointer kept, or saved within the frame, and if the
// CFA is found by it, where it points.
//
//   24      20 19          3  2    1     0
//  +----------+-------------+-----+-----+-----+   saved: fp is at CFA - 8 * saved; 0: unchanged
//  | saved    | offset / 8  | end |by fp|exact|   end: nobody called this code; nothing else is set
//  +----------+-------------+-----+-----+-----+   neither offset nor end: no such row
struct UsualRow {
  static constexpr uint64_t kExact = 1, kByFp = 2, kEnd = 4, kOffset = 0xffff8, kSaved = 31;
  static constexpr unsigned kSavedShift = 20;

  static constexpr uint64_t offset(uint64_t bits) { return bits & kOffset; }
  static constexpr uint64_t saved_below(uint64_t bits) { return (bits >> kSavedShift & kSaved) * 8; }

  // 0 if the row is another one. Rules of the other saved registers may be any that only read the stack.
  static constexpr uint64_t encode(const Row& row, uint8_t sp, uint8_t fp) {
    const SavedReg& saved = row.saved[0];
    bool by_fp = row.cfa_reg == fp, kept = saved.kind == ValueKind::same;
    int64_t offset = row.cfa_offset, below = kept ? 0 : -int64_t{saved.offset};
    if (row.flags || row.cfa_kind != CfaKind::reg_offset || (row.cfa_reg != sp && !by_fp)) return 0;
    if (row.ra_kind != ValueKind::at_cfa || row.ra_offset != -8) return 0;
    if (offset <= 0 || offset & ~int64_t{kOffset}) return 0;
    if (!kept && (saved.kind != ValueKind::at_cfa || below <= 0 || below % 8 || below / 8 > int64_t{kSaved})) return 0;
    if (below > offset || (by_fp && !kept && below != offset)) return 0;
    for (const SavedReg& other : row.saved)
      if (other.kind != ValueKind::same && other.kind != ValueKind::at_cfa && other.kind != ValueKind::undefined)
        return 0;
    return static_cast<uint64_t>(offset) | (by_fp ? kByFp : 0) | static_cast<uint64_t>(below / 8) << kSavedShift;
  }
};

struct RowCache {
  static constexpr unsigned kSets = 256, kWays = 2, kTagShift = 25, kReferenceBits = 24;
  static constexpr uint32_t kOutermost = 1;  // no row lies there: the arena begins with its header
  static constexpr uint64_t kMaxPc = uint64_t{1} << 47;
  static constexpr uint64_t kMaxDistance = uint64_t{4} << kReferenceBits;  // of a row from the arena's start
  static constexpr uint64_t kExact = UsualRow::kExact;
  using Words = uint64_t[kWays][kSets];

  Words usual = {};
  Words references = {};
  uint64_t generation = 0;  // of the arena that the words mean

  static constexpr uint64_t tag(uint64_t pc) { return pc >> 8; }
  static constexpr unsigned set(uint64_t pc) { return static_cast<uint8_t>(pc ^ pc >> 8); }
  static uint64_t load(const uint64_t& word) { return __atomic_load_n(&word, __ATOMIC_RELAXED); }

  // Whether every word read since the walk of arena `mine` began was of that arena: a handler may have gone over to a
  // newer one in between. It never goes back.
  bool is_of(uint64_t mine) const {
    __atomic_signal_fence(__ATOMIC_SEQ_CST);
    return __atomic_load_n(&generation, __ATOMIC_RELAXED) == mine;
  }

  // The reference of the row, 0 if it is not known.
  uint32_t find(CodeAddr code, uint64_t mine) const {
    const uint64_t pc = code.pc.value, exact = code.is_return ? 0 : kExact;
    for (const auto& way : references) {
      uint64_t word = load(way[set(pc)]);
      if (word >> kTagShift != tag(pc) || (word & kExact) != exact) continue;
      return is_of(mine) ? static_cast<uint32_t>(word >> 1 & ((1u << kReferenceBits) - 1)) : 0;
    }
    return 0;
  }

  // `decoded`: the row as a UsualRow, without kExact; 0: it is none.
  void keep(CodeAddr code, uint32_t reference, uint64_t decoded, uint64_t mine) {
    const uint64_t pc = code.pc.value, base = tag(pc) << kTagShift | (code.is_return ? 0 : kExact);
    if (pc >= kMaxPc || !is_of(mine)) return;
    put(references, set(pc), base | uint64_t{reference} << 1);
    if (decoded) put(usual, set(pc), base | decoded);
    if (is_of(mine)) return;
    for (unsigned way = 0; way < kWays; way++) clear(references[way][set(pc)]), clear(usual[way][set(pc)]);
  }

  // Empties the cache if it was filled from another arena. A handler that interrupts this sees the new generation only
  // after the words are empty, and repeats the work at worst.
  void follow(uint64_t arena_generation) {
    if (__atomic_load_n(&generation, __ATOMIC_RELAXED) == arena_generation) return;
    for (unsigned way = 0; way < kWays; way++)
      for (unsigned i = 0; i < kSets; i++) clear(references[way][i]), clear(usual[way][i]);
    __atomic_signal_fence(__ATOMIC_SEQ_CST);
    __atomic_store_n(&generation, arena_generation, __ATOMIC_RELAXED);
  }

 private:
  static void clear(uint64_t& word) { __atomic_store_n(&word, 0, __ATOMIC_RELAXED); }

  // The newest word of a set stands first.
  static void put(Words& words, unsigned at, uint64_t word) {
    constexpr uint64_t kWhose = ~uint64_t{0} << kTagShift | kExact;
    uint64_t first = load(words[0][at]);
    if ((first ^ word) & kWhose) __atomic_store_n(&words[1][at], first, __ATOMIC_RELAXED);
    __atomic_store_n(&words[0][at], word, __ATOMIC_RELAXED);
  }
};

}  // namespace sonde
