// The bytes of one detour (core/isa/x86_64_detour.h has the picture) and what the walker needs to know of them.
#pragma once

#include <cstdint>
#include <vector>

#include "host/plan/insn.h"
#include "host/plan/plan.h"
#include "host/plan/relocate.h"

namespace sonde::host {

struct Displaced {
  std::vector<Insn> insns;
  uint32_t length = 0;   // bytes of all
  bool copied = true;    // false: nops, which need no copy
};

struct Detour {
  std::vector<uint8_t> bytes;  // header included
  std::vector<DetourStep> steps;
};

// No detour of these instructions is longer, header included.
size_t detour_bound(const Displaced& displaced);

// The detour whose first instruction stands at `at`. pointer: the word that holds the entry trampoline's address.
Moved build_detour(uint64_t at, uint64_t pointer, uint32_t site, uint64_t patch, const Displaced& displaced,
                   Detour* out);

}  // namespace sonde::host
