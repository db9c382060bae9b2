// The thread pointer, from its register: works before and without thread-local storage. Signal-safe, header only.
// x86-64 needs FSGSBASE enabled by the kernel (5.9 on; AT_HWCAP2 bit 1): the host checks before it arms anything.
#pragma once

#include <cstdint>

namespace sonde {

inline uint64_t thread_pointer() {
  uint64_t value;
#if defined(__x86_64__)
  asm volatile(".byte 0xf3, 0x48, 0x0f, 0xae, 0xc0" : "=a"(value));  // rdfsbase %rax
#else
  asm volatile("mrs %0, tpidr_el0" : "=r"(value));
#endif
  return value;
}

}  // namespace sonde
