// From a return trampoline to the return address that it stands for. The trampoline's number is the entry's number; the
// entry must name the slot in which the trampoline was found, so an equal value that is mere data, a copied stack or a
// reused entry is never translated (semantics S5, S13, S18). Signal-safe.
#pragma once

#include "core/unwind/arena.h"
#include "core/walk/memory.h"

namespace sonde {

// Bytes from the start of the trampolines. Each begins with its call, kTrampolineCall before the address that functions
// return to; the slot holds its beginning until that call is made.
inline uint64_t trampoline_offset(const TableArena& arena, Addr pc) {
  return pc.value - (arena.trampolines - kTrampolineCall);
}
inline bool in_trampolines(const TableArena& arena, Addr pc) {
  return arena.trampolines && trampoline_offset(arena, pc) < uint64_t{kTrampolines} * kTrampolineStride;
}

inline AddrRange entries_of(const TableArena& arena) {
  return {Addr(arena.entries), Addr(arena.entries + uint64_t{kTrampolines} * kTrampolineStride)};
}

enum class Recovery : uint8_t { not_hooked, recovered, failed };

// Layers of hooks on one slot: each entry may again hold a trampoline. More than this many is a ring.
constexpr unsigned kMaxRecoveries = 256;

// Replaces *pc, found at `key` (Code<Isa>::kKeyIsSlot), until it is nobody's trampoline. `inside`: pc need not be the first
// byte of its trampoline (execution stands in it). On `failed` *pc is the trampoline that could not be resolved.
template <WalkMemory Memory>
Recovery recover(const TableArena& arena, Memory& memory, Addr key, bool inside, Addr* pc) {
  Recovery result = Recovery::not_hooked;
  for (unsigned i = 0; in_trampolines(arena, *pc); i++) {
    uint64_t offset = trampoline_offset(arena, *pc), real, owner;
    uint64_t part = offset % kTrampolineStride;
    if (!inside && part != kTrampolineCall && part != 0) return Recovery::failed;
    Addr entry = Addr(arena.entries + offset / kTrampolineStride * kTrampolineStride);
    if (i == kMaxRecoveries || !memory.read(entry, &real) || !memory.read(entry + 8, &owner)) return Recovery::failed;
    if (owner != key.value) return Recovery::failed;
    *pc = Addr(real);
    inside = false;
    result = Recovery::recovered;
  }
  return result;
}

}  // namespace sonde
