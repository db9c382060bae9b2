// `--sum`: instead of a record per call, each thread keeps its calls as an aggregated tree in the data area of its ring.
// One thread writes (and its signal handlers, at any instruction); everybody may read at any time, so every counter is
// right at every instruction, and the target may die anywhere.
//
//   0        SumArea       (one page)
//   4096     table         u64[bytes / 64]: (parent, site) -> node, open addressing
//   ...      nodes         SumNode[], number 0 is the root, which stands for no function
//
// A node is one function below one chain of callers. Calls are counted in `entered` when they begin and in the other
// fields when they end: the difference is in flight. What would have no node, because the tree is full or too deep, is
// counted with the nearest caller that is a call of the same function (`within`: its time is that caller's already), else
// in the function's node below the root (`displaced`; the caller's `elsewhere` holds the time), else only in the caller
// (`unplaced`). Nothing is left out silently.
//
// Where a call belongs: `top` is the innermost running call of the thread, and each running call keeps what top was before
// it, by entry number (SumCall). A call whose slot lies below top's is made by it. If it does not, then calls were left
// without a return (longjmp: their slots lie below or at the new one), or the thread runs on another stack now (fibers,
// signal stacks): then top is remembered by where its stack lies, and the new call continues the stack whose innermost
// call lies next above it, or stands below the root. A handler on the stack of what it interrupted nests there.
// What a handler on the alternate signal stack did not leave is gone when the thread goes on with the stack that was
// interrupted. Signal-safe: a handler leaves top as it found it, and what it did not leave (longjmp) is found dead by the next call.
#pragma once

#include <cstdint>

#include "core/event/record.h"
#include "core/native/local.h"
#include "core/unwind/arena.h"  // kTrampolineStride

namespace sonde {

constexpr uint32_t kMaxSumDepth = 512;
constexpr uint32_t kMaxSumNodes = 1u << 20;
constexpr uint32_t kSumStacks = 63;  // stacks that were left and may be gone on with, per thread

struct SumNode {
  uint32_t site, parent;  // written before the node is counted in
  uint32_t depth;  // of a call from the root: 1
  uint32_t reserved;
  uint64_t entered;
  uint64_t returned;
  uint64_t total;  // ticks of calls that ended, those `within` others left out
  uint64_t longest, shortest_inverted;  // ticks and ~ticks; 0: none has ended
  uint64_t within;  // of entered: made inside another call that is counted here
  uint64_t unwound, abandoned;
  uint64_t entries;  // hits whose return was not hooked; not in entered
  uint64_t tail_calls;  // of entered: by a jump from the parent
  uint64_t displaced;  // of entered: not called from the root, but with no room for a node elsewhere
  uint64_t elsewhere;  // ticks of calls made from here that are `displaced`
  uint64_t unplaced;  // calls made from here that have no node at all
  uint64_t moved;  // of entered: ended in another thread, which counts them too; written by that thread
};
static_assert(sizeof(SumNode) == 128);

// On the way of every call both are read and written as whole words, so that no load waits for two stores.
using SumWord [[gnu::may_alias]] = uint64_t;
constexpr uint64_t sum_word(uint32_t low, uint32_t high) { return uint64_t{high} << 32 | low; }

// A running call as its callees need it. slot 0: none.
struct SumPosition {
  uint64_t slot;
  uint32_t call;  // number of its return entry + 1; 0: no call, the outermost frames of the thread's first stack
  uint32_t node;
  uint32_t base;  // outermost call of its stack, as `call`; 0: the thread's first stack
  uint32_t reserved;
};

// What is known of a return entry's activation beside core/probe/entries.h. In the process's private memory.
struct SumCall {
  uint64_t slot;  // 0: not running
  SumPosition caller;  // what top becomes when it ends; another stack's if the call is its stack's outermost
  uint64_t left_ticks;  // when it was seen to be left by longjmp; 0: it was not
  uint32_t node;
  uint16_t area;  // whose node that is
  uint16_t flags;  // SumCallFlags
  uint32_t parent;  // node of the caller
  uint32_t base;
};
static_assert(sizeof(SumCall) == 56 && sizeof(SumPosition) == 24);
enum SumCallFlags : uint16_t { kSumWithin = 1, kSumDisplaced = 2, kSumUnplaced = 4 };

struct SumArea {
  SumPosition top;
  uint64_t remembered;  // bit i: stacks[i] is set; bit kSumStacks: first
  uint64_t nodes_taken;  // may pass node_limit by a few
  uint32_t node_limit, table_bits;
  uint64_t stride;  // from one area to the next
  uint32_t number;
  uint32_t process;  // 0: not prepared yet
  uint64_t trampolines;  // what hijacked slots hold, see sum_is_left; 0: slots must not be read
  // Calls that did not get the node they should have.
  uint64_t too_deep, no_node;
  uint64_t outermost;  // about where the thread's first stack begins; 0: nothing was called yet
  uint64_t signal_begin, signal_end;  // the thread's alternate signal stack; both 0: it has none
  SumPosition first;  // where the thread's first stack was left
  SumPosition stacks[kSumStacks];
};
constexpr uint64_t kSumPage = 4096;
static_assert(sizeof(SumArea) <= kSumPage);

constexpr uint64_t sum_table_entries(uint64_t area_bytes) { return area_bytes / 64; }
constexpr uint32_t sum_node_limit(uint64_t area_bytes) {
  uint64_t fit = (area_bytes - kSumPage - sum_table_entries(area_bytes) * 8) / sizeof(SumNode);
  return static_cast<uint32_t>(fit < kMaxSumNodes ? fit : kMaxSumNodes);
}
inline uint64_t* sum_table(SumArea* area) {
  return reinterpret_cast<uint64_t*>(reinterpret_cast<char*>(area) + kSumPage);
}
inline SumNode* sum_nodes(SumArea* area) {
  return reinterpret_cast<SumNode*>(reinterpret_cast<char*>(sum_table(area)) + (uint64_t{8} << area->table_bits));
}

// area_bytes: a power of two, all zero. Done by the thread that owns it, before anything else; area i lies at area 0 +
// i * stride. process: the number of the thread's.
void sum_prepare(SumArea* area, uint64_t area_bytes, uint32_t number, uint64_t stride, uint32_t process);

// --- The tree.

// A table entry: node | site << 20 | parent << 41. It is its own key, so a hit needs no look at the node.
constexpr uint64_t sum_key(uint32_t parent, uint32_t site) { return uint64_t{parent} << 41 | uint64_t{site} << 20; }
static_assert(kMaxSites <= 1u << 21);
inline uint32_t sum_hash(uint64_t key, uint32_t bits) {
  return static_cast<uint32_t>((key * 0x9e3779b97f4a7c15) >> (64 - bits));
}
// 0: there is none and no room for one.
uint32_t sum_child_slow(SumArea* area, uint32_t parent, uint32_t site);
inline uint32_t sum_child(SumArea* area, uint32_t parent, uint32_t site) {
  uint64_t key = sum_key(parent, site);
  uint64_t found = __atomic_load_n(&sum_table(area)[sum_hash(key, area->table_bits)], __ATOMIC_RELAXED) - key;
  if (__builtin_expect(found - 1 < kMaxSumNodes - 1, 1)) return static_cast<uint32_t>(found);
  return sum_child_slow(area, parent, site);
}

// --- Calls. `calls`: one for each return entry.

constexpr uint64_t kSumFrames = 4 << 20;  // between a call's slot and its callee's, on a thread's first stack
constexpr uint64_t kSumOtherFrames = 16 << 10;  // on others: fibers' stacks may lie side by side, from 16 KiB each
constexpr uint64_t sum_reach(const SumPosition& at) { return at.base ? kSumOtherFrames : kSumFrames; }

// Whether a call of the first stack was left by longjmp, although its slot lies above the new call's as a caller's does: what
// is there now is not its trampoline. Only that stack is surely there to be read.
inline bool sum_is_left(const SumArea* area, const SumPosition& at) {
  if (!area->trampolines || at.base || !at.call) return false;
  uint64_t word = __atomic_load_n(reinterpret_cast<const uint64_t*>(at.slot), __ATOMIC_RELAXED);
  return !is_trampoline_of(area->trampolines, at.call - 1, word);
}

// Where a call belongs: its caller as `top` will be again, the caller's node, and its stack.
struct SumPlace {
  SumPosition caller;
  uint32_t parent, base;  // base 0 on the first stack, kSumOwnBase: the call itself
};
constexpr uint32_t kSumOwnBase = ~0u;
SumPlace sum_find_place(SumArea* area, SumCall* calls, uint64_t slot, bool tail);
// Where a call is counted that has no node of its own, and the flags that say so. Counts the cause.
uint32_t sum_find_room(SumArea* area, uint32_t parent, uint32_t site, uint16_t* flags);
void sum_count_without_node(SumNode& counted, uint16_t flags);

// A call begins in entry `index`. tail: the slot belongs to a running call already, its caller by a jump.
inline void sum_begin(SumArea* area, SumCall* calls, uint32_t index, uint32_t site, uint64_t slot, bool tail) {
  auto* words = reinterpret_cast<const SumWord*>(&area->top);
  uint64_t link = words[1];
  SumPosition top{words[0], static_cast<uint32_t>(link), static_cast<uint32_t>(link >> 32),
                  static_cast<uint32_t>(words[2]), 0};
  SumPlace place{top, top.node, top.base};
  if (__builtin_expect((top.slot - slot - (tail ? 0 : 8) > sum_reach(top)) | (area->remembered != 0), 0) ||
      __builtin_expect(sum_is_left(area, top), 0))
    place = sum_find_place(area, calls, slot, tail);
  uint32_t node = sum_child(area, place.parent, site);
  uint16_t flags = 0;
  if (__builtin_expect(node == 0, 0)) node = sum_find_room(area, place.parent, site, &flags);
  if (__builtin_expect(place.base == kSumOwnBase, 0)) place.base = index + 1;
  auto* call = reinterpret_cast<SumWord*>(&calls[index]);
  call[0] = slot;
  call[1] = place.caller.slot;
  call[2] = sum_word(place.caller.call, place.caller.node);
  call[3] = place.caller.base;
  call[4] = 0;
  call[5] = sum_word(node, area->number | uint32_t{flags} << 16);
  call[6] = sum_word(place.parent, place.base);
  SumNode& counted = sum_nodes(area)[node];
  if (__builtin_expect(flags == 0, 1)) local_add(&counted.entered, 1);
  else sum_count_without_node(counted, flags);
  if (__builtin_expect(tail, 0) && place.caller.slot == slot) local_add(&counted.tail_calls, 1);
  auto* top_words = reinterpret_cast<SumWord*>(&area->top);
  top_words[0] = slot;
  top_words[1] = sum_word(index + 1, node);
  top_words[2] = place.base;
}

// The node of this area for the same chain of functions as a node of another area; shorter if there is no room.
uint32_t sum_translate(SumArea* area, uint32_t from, uint32_t node);

// A hit of a function whose return is not hooked.
void sum_entry(SumArea* area, SumCall* calls, uint32_t site, uint64_t slot);

inline void sum_raise(uint64_t* word, uint64_t least) {
  uint64_t seen = __atomic_load_n(word, __ATOMIC_RELAXED);
  while (__builtin_expect(seen < least, 0) && !local_compare_exchange(word, &seen, least)) {
  }
}
void sum_count_otherwise(SumArea* area, const SumCall& call, uint32_t site, ExitKind kind, uint64_t ticks);
// Counts the end of the call, not changing where the thread is.
inline void sum_count_end(SumArea* area, const SumCall& call, uint32_t site, ExitKind kind, uint64_t ticks) {
  if (__builtin_expect((kind != ExitKind::returned) | (call.flags != 0) | (call.area != area->number), 0))
    return sum_count_otherwise(area, call, site, kind, ticks);
  SumNode& node = sum_nodes(area)[call.node];
  local_add(&node.total, ticks);
  sum_raise(&node.longest, ticks);
  sum_raise(&node.shortest_inverted, ~ticks);
  local_add(&node.returned, 1);
}

void sum_leave_slow(SumArea* area, SumCall* calls, uint32_t index);
// The call in entry `index` ends, `ticks` after it began.
inline void sum_end(SumArea* area, SumCall* calls, uint32_t index, uint32_t site, ExitKind kind, uint64_t ticks) {
  SumCall& call = calls[index];
  if (__builtin_expect(call.slot == 0, 0)) return;  // its beginning was not seen
  sum_count_end(area, call, site, kind, ticks);
  bool usual = (area->top.call == index + 1) & (call.area == area->number) & (call.base != index + 1);
  if (__builtin_expect(usual, 1)) {
    auto *to = reinterpret_cast<SumWord*>(&area->top), *from = reinterpret_cast<SumWord*>(&call.caller);
    to[0] = from[0], to[1] = from[1], to[2] = from[2];
  } else {
    sum_leave_slow(area, calls, index);
  }
  call.slot = 0;
}
// It was left by longjmp some time ago: ended as abandoned, then or now. The thread is not there.
void sum_end_abandoned(SumArea* area, SumCall* calls, uint32_t index, uint32_t site, uint64_t entry_ticks,
                       uint64_t now);

}  // namespace sonde
