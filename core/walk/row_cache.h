// What has been found out about pcs of one arena: a pc that passed every check of the walker, and its row. All threads and
// handlers of a process share one, in memory that was zero when the arena was published (TableArena::row_cache); it is
// never emptied, since a new arena has a new one. Signal-safe, no locks: a word is read and written whole and says itself
// of which pc it speaks. Of two writers at one place at once, one is forgotten.
//
//   59         32 31     25 24                 1   0    reference: (row - arena) / 4, kOutermost or kSignalReturn; 0:
//  +-------------+---------+--------------------+-----+ empty. exact: the pc is no return address. The place is pc's bits
//  | pc >> 19    | pc & 127| reference          |exact| 4..18, mixed with those above, or another of the same line of the
//  +-------------+---------+--------------------+-----+ processor's cache: line and tag tell pcs apart exactly.
//
// So 128 bytes of code share eight words: calls near each other lie side by side, and as long as there are no more than eight
// of them none drives another out, wherever in those bytes they stand. Code rarely has a call every 16 bytes; where one stands
// every 32, lines are half full, and chance, as of where a linker puts code, decides nothing.
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
//  | saved    | offset / 8  | end |by fp|exact|   end: nobody called this code, offset is 0; or with an offset of 1: sp
//  +----------+-------------+-----+-----+-----+   stands at the kernel's signal frame. Neither offset nor end: no such row
struct UsualRow {
  static constexpr uint64_t kExact = 1, kByFp = 2, kEnd = 4, kOffset = 0xffff8, kSaved = 31;
  static constexpr uint64_t kSignal = kEnd | 8;
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
  static constexpr unsigned kPlaceBits = 15, kLowBits = 4, kLineBits = 3, kTagShift = 25, kReferenceBits = 24;
  static constexpr uint32_t kOutermost = 1, kSignalReturn = 2;  // no row lies there: the arena begins with its header
  static constexpr uint64_t kMaxPc = uint64_t{1} << 47;
  static constexpr uint64_t kMaxDistance = uint64_t{4} << kReferenceBits;  // of a row from the arena's start
  static constexpr uint64_t kExact = UsualRow::kExact;
  using Words = uint64_t[uint64_t{1} << kPlaceBits];  // beginning at a multiple of 64

  alignas(64) Words usual = {};
  Words references = {};
  uint64_t generation = 0;  // of the arena that the words mean; 0: of the first that comes
  uint64_t drawn = 0;

  static constexpr uint64_t place(uint64_t pc) {
    return (pc >> kLowBits ^ pc >> (kLowBits + kPlaceBits)) & ((uint64_t{1} << kPlaceBits) - 1);
  }
  // The other places that a word may stand at, for each i in [1, kLine), the first to look at first.
  static constexpr uint64_t kLine = 1 << kLineBits;
  static constexpr uint64_t beside(uint64_t place, uint64_t i) { return place ^ i; }
  static constexpr uint64_t tag(uint64_t pc) {
    constexpr unsigned kBits = kLowBits + kLineBits;  // those that tell places of a line apart are in the tag too
    return pc >> (kLowBits + kPlaceBits) << kBits | (pc & ((uint64_t{1} << kBits) - 1));
  }
  static uint64_t load(const uint64_t& word) { return __atomic_load_n(&word, __ATOMIC_RELAXED); }

  // Whether the words are of the arena with this generation. A cache that nobody has used becomes that arena's.
  bool is_of(uint64_t mine) {
    uint64_t whose = __atomic_load_n(&generation, __ATOMIC_RELAXED);
    if (whose) return whose == mine;
    return __atomic_compare_exchange_n(&generation, &whose, mine, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED) ||
           whose == mine;
  }

  // The reference of the row, 0 if it is not known.
  uint32_t find(CodeAddr code) const {
    const uint64_t pc = code.pc.value, exact = code.is_return ? 0 : kExact;
    for (uint64_t i = 0; i < kLine; i++) {
      uint64_t word = load(references[beside(place(pc), i)]);
      if (word >> kTagShift != tag(pc) || (word & kExact) != exact) continue;
      return static_cast<uint32_t>(word >> 1 & ((1u << kReferenceBits) - 1));
    }
    return 0;
  }

  // `decoded`: the row as a UsualRow, without kExact; 0: it is none. reference 0: that one alone.
  void keep(CodeAddr code, uint32_t reference, uint64_t decoded) {
    const uint64_t pc = code.pc.value, base = tag(pc) << kTagShift | (code.is_return ? 0 : kExact);
    if (pc >= kMaxPc) return;
    if (reference) put(references, place(pc), base | uint64_t{reference} << 1);
    put(usual, place(pc), base | decoded);  // no usual row: says that there is a reference
  }

 private:
  // The newest word stands at its place. The one before it goes beside that, if need be in another's stead: whose, is drawn, so
  // that no few of them drive each other out in turns for ever.
  void put(Words& words, uint64_t at, uint64_t word) {
    constexpr uint64_t kWhose = ~uint64_t{0} << kTagShift | kExact;
    uint64_t first = load(words[at]);
    if (first && (first ^ word) & kWhose) {
      uint64_t i = 1;
      for (; i < kLine; i++) {
        uint64_t other = load(words[beside(at, i)]);
        if (!other || !((other ^ word) & kWhose)) break;
      }
      if (i == kLine) i = 1 + draw() % (kLine - 1);
      __atomic_store_n(&words[beside(at, i)], first, __ATOMIC_RELAXED);
    }
    __atomic_store_n(&words[at], word, __ATOMIC_RELAXED);
  }
  // Of two who draw at once both may get the same.
  uint64_t draw() {
    uint64_t mine = load(drawn) + 1;
    __atomic_store_n(&drawn, mine, __ATOMIC_RELAXED);
    return mine * 0x9e3779b97f4a7c15 >> 32;
  }
};

}  // namespace sonde
