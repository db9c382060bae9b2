// Which processes are the target: those that were forked from the program and are still what they were. Each of them has
// one page of a memory file mapped, shared, that nothing else maps: fork copies the mapping, exec and the end of a process
// take it away. Whether there is one left is asked of the kernel, whatever its number, user or namespace.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <vector>

#include "host/error.h"

namespace sonde::host {

constexpr uint64_t kPresenceBytes = 4096;

// Whether the process maps that memory file, as far as we may look.
bool maps_memory_file(pid_t pid, int fd);

class Presence {
 public:
  // `fd`: a new memory file of that kind, which stays the caller's; -1: one is made.
  static Result<Presence> create(int fd = -1);
  Presence(Presence&& other) noexcept;
  Presence& operator=(Presence&&) = delete;
  ~Presence();

  int fd() const { return fd_; }  // close-on-exec; to be mapped shared into the target, without any access

  // Whether a process has it mapped. To be asked when one had: after the first "no" nobody can map it any more.
  bool anyone() const;
  // Those that we see and may look into, for messages and for their calls in flight: anyone() knows of more. Of processes
  // that share their memory (vfork) one.
  std::vector<pid_t> processes() const;

 private:
  explicit Presence(int fd) : fd_(fd) {}
  int fd_;
};

}  // namespace sonde::host
