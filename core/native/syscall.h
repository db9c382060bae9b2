// System calls without libc: no errno, no cancellation point, nothing to interpose. A result in [-4095, -1] is -errno.
// Rare paths only: a hit makes none. Signal-safe, header only.
#pragma once

#include <asm/unistd.h>

#include <cstdint>

namespace sonde {

inline int64_t system_call(int64_t number, uint64_t a = 0, uint64_t b = 0, uint64_t c = 0, uint64_t d = 0,
                           uint64_t e = 0, uint64_t f = 0) {
#if defined(__x86_64__)
  register uint64_t r10 asm("r10") = d;
  register uint64_t r8 asm("r8") = e;
  register uint64_t r9 asm("r9") = f;
  int64_t result;
  asm volatile("syscall"
               : "=a"(result)
               : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
               : "rcx", "r11", "memory");
  return result;
#else
  register uint64_t x8 asm("x8") = static_cast<uint64_t>(number);
  register uint64_t x0 asm("x0") = a;
  register uint64_t x1 asm("x1") = b;
  register uint64_t x2 asm("x2") = c;
  register uint64_t x3 asm("x3") = d;
  register uint64_t x4 asm("x4") = e;
  register uint64_t x5 asm("x5") = f;
  asm volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5) : "memory");
  return static_cast<int64_t>(x0);
#endif
}

constexpr bool is_error(int64_t result) { return result < 0 && result >= -4095; }

}  // namespace sonde
