// Updates that are atomic against signals of the same thread (one instruction, or a restartable one), without the cost
// of atomicity against other threads. For data with a single writing thread; other threads may only read it.
// Signal-safe, header only.
#pragma once

#include <cstdint>

namespace sonde {

// Adds and returns the old value.
inline uint64_t local_fetch_add(uint64_t* word, uint64_t n) {
#if defined(__x86_64__)
  asm volatile("xaddq %0, %1" : "+r"(n), "+m"(*word) : : "memory", "cc");
  return n;
#else
  return __atomic_fetch_add(word, n, __ATOMIC_RELAXED);
#endif
}

inline void local_add(uint64_t* word, uint64_t n) {
#if defined(__x86_64__)
  asm volatile("addq %1, %0" : "+m"(*word) : "er"(n) : "memory", "cc");
#else
  __atomic_fetch_add(word, n, __ATOMIC_RELAXED);
#endif
}

// Replaces expected by desired; on failure expected becomes what is there.
inline bool local_compare_exchange(uint64_t* word, uint64_t* expected, uint64_t desired) {
#if defined(__x86_64__)
  bool done;
  asm volatile("cmpxchgq %3, %1" : "+a"(*expected), "+m"(*word), "=@ccz"(done) : "r"(desired) : "memory");
  return done;
#else
  return __atomic_compare_exchange_n(word, expected, desired, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
#endif
}

}  // namespace sonde
