// The code that every linked file gets from crti.o and crtbegin.o and that no compiler describes: _init, _fini, and the
// functions around them that run with the constructors and destructors. x86-64 only. Recognised by all of its bytes, so that
// where its return address lies is known at each of them.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/unwind/arena.h"

namespace sonde::host {

struct BareCode {
  size_t begin, end;  // bytes from the start of what was searched
  SpecialKind kind;  // bare, bare_word or bare_frame
};

// crtbegin.o's functions, wherever they lie in this code: deregister_tm_clones and what follows it, as gcc 5 and later have
// them. A function whose bytes are not those known is left out.
std::vector<BareCode> find_crtbegin(std::span<const uint8_t> code);

// The whole of a section .init or .fini; nothing if it does anything but call.
std::vector<BareCode> find_init(std::span<const uint8_t> section);

}  // namespace sonde::host
