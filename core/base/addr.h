// Addresses with a space: a number in the running target, a number in an ELF file's own address space and an offset in
// a file are different types, so that a bias can never be forgotten. Signal-safe, header only.
#pragma once

#include <compare>
#include <cstdint>

namespace sonde {

template <class Space>
struct Address {
  uint64_t value = 0;

  constexpr Address() = default;
  constexpr explicit Address(uint64_t v) : value(v) {}
  constexpr auto operator<=>(const Address&) const = default;
  constexpr Address operator+(int64_t n) const { return Address(value + static_cast<uint64_t>(n)); }
  constexpr Address operator-(int64_t n) const { return Address(value - static_cast<uint64_t>(n)); }
  constexpr int64_t operator-(Address other) const { return static_cast<int64_t>(value - other.value); }
  constexpr Address& operator+=(int64_t n) { return value += static_cast<uint64_t>(n), *this; }
  constexpr explicit operator bool() const { return value != 0; }
};

using Addr = Address<struct TargetSpace>;      // in the running target (or a core file's memory)
using ImageAddr = Address<struct ImageSpace>;  // p_vaddr space of one ELF file
using FileOffset = Address<struct FileSpace>;  // bytes from the start of a file

// Half-open range [begin, end).
template <class A>
struct Range {
  A begin, end;
  constexpr bool contains(A a) const { return begin <= a && a < end; }
  constexpr bool overlaps(Range other) const { return begin < other.end && other.begin < end; }
  constexpr uint64_t size() const { return static_cast<uint64_t>(end - begin); }
  constexpr bool operator==(const Range&) const = default;
};
using AddrRange = Range<Addr>;
using ImageRange = Range<ImageAddr>;

// A code address that knows whether it is exact (an interrupted pc, a function's start) or a return address. A call may
// be the last instruction of its function, so a return address is looked up one byte earlier.
struct CodeAddr {
  Addr pc;
  bool is_return = false;
  constexpr Addr lookup() const { return is_return ? pc - 1 : pc; }
};

}  // namespace sonde
