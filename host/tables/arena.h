// Builds the block of core/unwind/arena.h for one process: its images with their tables, sonde's detours, and the ranges of
// code that a walk treats specially.
#pragma once

#include <vector>

#include "core/unwind/arena.h"
#include "host/image/maps.h"
#include "host/tables/cache.h"

namespace sonde::host {

struct ArenaImage {
  LoadedImage loaded;
  SharedTable table;  // null: none, its code is a gap
  bool stays = false;  // it cannot be unmapped before the process ends
};

struct ArenaSpecial {
  AddrRange range;
  SpecialKind kind;
};

struct ArenaDetour {
  AddrRange range;  // of its instructions
  Addr patch;
  uint32_t site;
  std::vector<DetourStepEntry> steps;  // sorted by offset
};

struct ArenaInput {
  std::vector<ArenaImage> images;
  std::vector<ArenaDetour> detours;
  std::vector<ArenaSpecial> specials;  // where two overlap the earlier one in this list holds
  Addr trampolines, entries;  // of the agent; 0: none
  Addr row_cache;  // core/walk/row_cache.h, fresh memory of the process that walks; 0: none
};

// An error if images or detours overlap each other: a process cannot have that, so the input is wrong.
Result<std::vector<uint8_t>> build_arena(const ArenaInput& input);

// Special code of one loaded image, found by symbol, by section or by its bytes:
//   outermost      the entry point's function, the dynamic linker's start, where makecontext's functions return to. Thread
//                  starts need no range: their rows say that nobody called them.
//   clone_return   clone's few instructions that parent and child share
//   any            what the program declares itself (include/sonde/special.h); this goes first
//   signal_return  the instructions that return from a signal; a frame there has exactly their first address as its pc
//   lazy_resolver  _dl_runtime_resolve*, in the dynamic linker
//   plt            sections of linkage stubs
//   vdso           its whole code
//   unreliable     where swapcontext has loaded the new sp and no pc yet; where a throw has written over return addresses
//   bare...        their system call; what every file has from crti.o and crtbegin.o (host/tables/start_files.h)
std::vector<ArenaSpecial> find_specials(const LoadedImage& loaded, const Table* table);

// Special code of no image, known by the kernel's name for its mapping: "[uprobes]", where functions return to that a return
// probe of the kernel has hooked. The real address is kept by the kernel alone: unreliable.
std::vector<ArenaSpecial> mapped_specials(std::span<const Mapping> mappings);

}  // namespace sonde::host
