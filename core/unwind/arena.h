// All that the walker needs to know of a process, as one position-independent block: mapped read-only into the target
// for stacks taken there, built in the host's own memory for walks from outside. Written completely before any reader
// sees it; a new block replaces the old one when libraries come or go (readers hold no reference across hits).
//
//   TableArena, ImageEntry[image_count] sorted by begin, DetourEntry[detour_count] sorted by begin, DetourStepEntry...,
//   SpecialEntry[special_count] sorted by begin, and one more that holds nothing and ends behind everything; packed tables (core/unwind/table.h) wherever table_offset says.
// All offsets are bytes from the start of the arena.
#pragma once

#include <cstdint>

namespace sonde {

// Return trampoline i = [trampolines + i * stride, + stride) belongs to the entry at entries + i * stride: {real return
// address, key}. Key: Code<Isa>::kKeyIsSlot ? address of the return slot : sp at the function's entry.
constexpr uint32_t kTrampolines = 131072;  // = simultaneous hooked activations of a process
constexpr uint32_t kTrampolineStride = 16;
constexpr uint32_t kTrampolineCall =
    6;  // bytes in front of each that belong to it: the call that functions are entered by

// Whether a slot's word leads to the trampoline: its address, or its beginning while the function is just being entered.
constexpr bool is_trampoline_of(uint64_t trampolines, uint32_t index, uint64_t word) {
  uint64_t address = trampolines + uint64_t{index} * kTrampolineStride;
  return word == address || word == address - kTrampolineCall;
}

enum class SpecialKind : uint32_t {
  outermost,  // _start, thread start: positively the end of the stack
  plt,  // PLT stubs
  lazy_resolver,  // _dl_runtime_resolve*
  signal_return,  // __restore_rt: the frame is the kernel's rt_sigframe
  vdso,
  return_trampoline,  // sonde's own: sonde_trampolines
  return_common,  // sonde's own: code behind the trampolines
  entry_trampoline,  // sonde's own: sonde_entry
  detour,
  unreliable,  // known hand-written code without an exemption
  trap_handler,  // sonde's own: sonde_trap; a pc it interrupted stands one byte behind the trap
  clone_return,  // behind clone's system call: the child stands there on its new stack by its parent's rows
  bare,  // of crti.o and crtbegin.o: no row, and the return address on top of the stack
  bare_word,  // the same with one word above it
  bare_frame,  // the same with the caller's frame pointer above it
};

struct ImageEntry {
  uint64_t begin, end;  // mapped range in the target
  uint64_t bias;
  uint64_t table_offset;  // 0: no table
  uint64_t text_begin, text_end;  // hull of its executable segments in the target
  uint64_t flags;  // ImageFlags
  // The special code in its text: entries [first_special, first_special + special_count). At special_index, for each
  // 1 << special_shift bytes of text and for its end: how many of them end at or before there (uint32_t). 0: no index.
  uint32_t first_special, special_count;
  uint64_t special_index, special_shift;
};

enum ImageFlags : uint64_t {
  kImageStays = 1,  // its text is readable as long as the process lives: who walks there reads it without asking
};

struct SpecialEntry {
  uint64_t begin, end;
  uint32_t kind;  // SpecialKind
  uint32_t reserved;
};

struct DetourEntry {
  uint64_t begin, end;
  uint64_t patch;
  uint32_t site;
  uint32_t first_step, step_count;
  uint32_t reserved;
};

struct DetourStepEntry {  // as host/plan/plan.h DetourStep
  uint16_t offset;
  int16_t original;
  int16_t sp_adjust;
  uint16_t reserved;
};

struct TableArena {
  uint64_t size;
  uint64_t generation;  // not 0, differs from that of every other arena this process was shown: caches check it
  uint64_t images_offset, detours_offset, steps_offset, specials_offset;
  uint32_t image_count, detour_count, step_count, special_count;
  // sonde's return trampolines in the target, for return-address recovery; 0 where there is no agent
  uint64_t trampolines, entries;
  // Of core/walk/row_cache.h, in the memory of those who walk: writable, zero when the arena was published. 0: none.
  uint64_t row_cache;
};

}  // namespace sonde
