// Where exceptions come back to: the landing pads that a file's language-specific data areas name, in the form that the
// C++, Rust, D and Ada compilers of GCC and LLVM use (Itanium C++ ABI: Exception Handling, level II, the call-site table).
// Trusts nothing in the bytes: an area that cannot be read whole makes its function one whose pads are unknown.
#pragma once

#include <vector>

#include "host/image/image.h"

namespace sonde::host {

struct ThrowingRange {
  uint64_t begin, end;  // calls in here that throw go on
  uint64_t pad;  // here
};

struct ExceptionTables {
  std::vector<ThrowingRange> ranges;  // sorted by begin; image addresses
  std::vector<ImageRange> unreadable;  // code whose area, or a part of it, cannot be read
};

ExceptionTables read_exception_tables(const Image& image);

}  // namespace sonde::host
