// Starts a program with the agent in place before its first constructor, unseen by the program.
//
//   fork, seize, exec          stop at the loader's first instruction
//   one more DT_NEEDED         the last of the program's libraries is the agent, for the loader only: a spare DT_NULL of
//                              the dynamic section in memory is borrowed (or the section copied) and given back
//   run to _dl_start_user      every library is mapped and relocated, no constructor has run
//
// No environment variable, no memory of the program's own allocator, no change in the order of its libraries.
#pragma once

#include <string>
#include <vector>

#include "host/target/tracee.h"

namespace sonde::host {

struct LaunchRequest {
  std::vector<std::string> command;
  std::string agent;  // path of libsonde-agent.so
  std::vector<int> inherited;  // descriptors the program's process gets under the same numbers, until closed by us
};

struct Launched {
  pid_t pid = 0;
  Tracee tracee;
  Addr syscall_instruction;  // some `syscall` in the loader
  Addr loader_base;
  std::string program;  // path of the executable that runs
};

// Errors carry exit status 127 if the program does not exist, 126 if it cannot be run, as shells do. On every error the
// child is gone. If the loader itself ends the program (a missing library), its exit status is in `ended`.
Result<Launched> launch(const LaunchRequest& request, std::optional<ExitStatus>* ended);

}  // namespace sonde::host
