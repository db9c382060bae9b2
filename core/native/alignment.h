// A program may have the processor refuse unaligned accesses (EFLAGS.AC); the agent's own are allowed while this lives.
// Signal-safe, header only.
#pragma once

#include <cstdint>

namespace sonde {

class UnalignedAllowed {
 public:
#if defined(__x86_64__)
  UnalignedAllowed() : flags_(__builtin_ia32_readeflags_u64()) {
    if (__builtin_expect((flags_ & kAlignmentCheck) != 0, 0)) __builtin_ia32_writeeflags_u64(flags_ & ~kAlignmentCheck);
  }
  ~UnalignedAllowed() {
    if (__builtin_expect((flags_ & kAlignmentCheck) != 0, 0)) __builtin_ia32_writeeflags_u64(flags_);
  }
#else
  UnalignedAllowed() {}  // only the kernel decides
#endif
  UnalignedAllowed(const UnalignedAllowed&) = delete;

#if defined(__x86_64__)
 private:
  static constexpr uint64_t kAlignmentCheck = 1 << 18;
  uint64_t flags_;
#endif
};

}  // namespace sonde
