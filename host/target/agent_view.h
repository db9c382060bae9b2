// sonde's agent inside a process that somebody looks at from outside: where its trampolines and return entries are, which
// of its code a walk must know, and the detours that lead into it. Nothing but the process's images and memory is needed,
// so a core file serves as well as a process that is being recorded.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "host/tables/arena.h"
#include "host/target/memory.h"

namespace sonde::host {

struct AgentView {
  Addr control, trampolines, entries;
  std::vector<ArenaSpecial> specials;
};

// Without value if the image is not the agent, or one whose symbols are missing.
std::optional<AgentView> view_agent(const LoadedImage& image);

// Address of the arena that the agent was given; 0: none, or its memory cannot be read.
Addr published_arena(const AgentView& agent, TargetMemory& memory);

// The detours that the arena at `at` describes. An error says what in it contradicts itself.
Result<std::vector<ArenaDetour>> published_detours(Addr at, TargetMemory& memory);

}  // namespace sonde::host
