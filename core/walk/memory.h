// How a walk reads its target. A reader gives eight bytes at any address or says that it cannot, and knows which stack an
// address lies on. Two readers: RawMemory for this thread, AnyMemory for everything that is looked at from outside.
// Signal-safe.
#pragma once

#include <concepts>
#include <cstdint>

#include "core/base/addr.h"
#include "core/unwind/step.h"

namespace sonde {

// stack_at: the readable memory around sp that may be its stack; false where no stack is known.
template <class M>
concept WalkMemory = MemoryReader<M> && requires(M& memory, Addr sp, AddrRange* stack) {
  { memory.stack_at(sp, stack) } -> std::same_as<bool>;
};

// The memory of the thread that walks. Stacks that the caller vouches for are read directly; everything else (code,
// return entries, other stacks) through `other`, which must survive any address, or directly if it is null.
struct RawMemory {
  static constexpr unsigned kMaxStacks = 3;
  AddrRange stacks[kMaxStacks];
  unsigned stack_count = 0;
  AddrRange entries;  // sonde's return entries: always readable
  bool (*other)(Addr address, uint64_t* value) = nullptr;

  bool stack_at(Addr sp, AddrRange* stack) const {
    for (unsigned i = 0; i < stack_count; i++)
      if (stacks[i].contains(sp)) return *stack = stacks[i], true;
    return false;
  }
  bool always_has(AddrRange range) const {
    return !other || (entries.begin <= range.begin && range.end <= entries.end);
  }
  static bool holds_word(const AddrRange& range, Addr a) {
    return a.value - range.begin.value < range.size() && range.end.value - a.value >= 8;
  }
  static uint64_t load(Addr address) {
    uint64_t value;
    __builtin_memcpy(&value, reinterpret_cast<const void*>(address.value), sizeof value);
    return value;
  }
  bool read(Addr address, uint64_t* value) const {
    for (unsigned i = 0; i < stack_count; i++)
      if (holds_word(stacks[i], address)) return *value = load(address), true;
    if (other && !holds_word(entries, address)) return other(address, value);
    return *value = load(address), true;
  }
};
static_assert(WalkMemory<RawMemory>);

// Any reader, behind two function pointers.
struct AnyMemory {
  void* object;
  bool (*read_word)(void* object, Addr address, uint64_t* value);
  bool (*find_stack)(void* object, Addr sp, AddrRange* stack);

  bool read(Addr address, uint64_t* value) const { return read_word(object, address, value); }
  bool stack_at(Addr sp, AddrRange* stack) const { return find_stack(object, sp, stack); }
};
static_assert(WalkMemory<AnyMemory>);

}  // namespace sonde
