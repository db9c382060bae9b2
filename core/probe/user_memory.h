// Pointers that the program gave to the kernel. Whether they can be read is found out by system calls that read just as much
// and do nothing, so that a bad pointer gets the kernel's own answer and never faults in the agent. They are calls of
// the kinds that the program makes with such pointers, so a sandbox that lets it make them lets these through. Signal-safe.
#pragma once

#include <cstdint>

#include "core/native/syscall.h"
#include "core/probe/control.h"
#include "core/probe/signal_abi.h"

namespace sonde {

// 8 bytes at `from`; false: EFAULT.
inline bool read_user_word(uint64_t from, uint64_t* to) {
  constexpr uint64_t kNoSuchWay = 99;  // a way to change a mask that does not exist: looked at after the mask is read
  if (system_call(__NR_rt_sigprocmask, kNoSuchWay, from, 0, kMaskBytes) == kEfault) return false;
  *to = *reinterpret_cast<const volatile uint64_t*>(from);
  return true;
}

// A struct sigaction; false: EFAULT.
inline bool read_user_action(uint64_t from, KernelSigaction* to) {
  // Nothing can be done about SIGKILL, but that is said after the action is read.
  if (system_call(__NR_rt_sigaction, kSigkill, from, 0, kMaskBytes) == kEfault) return false;
  auto* words = reinterpret_cast<const volatile uint64_t*>(from);
  *to = {words[0], words[1], words[2], words[3]};
  return true;
}

}  // namespace sonde
