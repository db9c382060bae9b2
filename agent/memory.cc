// The functions that compilers call by themselves, for the agent alone: libc's may be probed, or not there yet. Loops
// that no compiler may turn back into calls or string instructions (agent/CMakeLists.txt).
#include <cstddef>

#include "core/base/check.h"

extern "C" {

__attribute__((used)) void* memcpy(void* to, const void* from, size_t bytes) {
  for (size_t i = 0; i < bytes; i++) static_cast<char*>(to)[i] = static_cast<const char*>(from)[i];
  return to;
}

__attribute__((used)) void* memmove(void* to, const void* from, size_t bytes) {
  auto* target = static_cast<char*>(to);
  auto* source = static_cast<const char*>(from);
  if (target < source) return memcpy(to, from, bytes);
  while (bytes--) target[bytes] = source[bytes];
  return to;
}

__attribute__((used)) void* memset(void* to, int value, size_t bytes) {
  for (size_t i = 0; i < bytes; i++) static_cast<char*>(to)[i] = static_cast<char>(value);
  return to;
}

__attribute__((used)) int memcmp(const void* a, const void* b, size_t bytes) {
  auto* left = static_cast<const unsigned char*>(a);
  auto* right = static_cast<const unsigned char*>(b);
  for (size_t i = 0; i < bytes; i++)
    if (left[i] != right[i]) return left[i] - right[i];
  return 0;
}

// std::expected::value() and friends: never reached, must not end the program.
__attribute__((used)) void abort() {
  sonde::check_failed("abort", 0, "not reached");
  for (;;) {
  }
}

}  // extern "C"
