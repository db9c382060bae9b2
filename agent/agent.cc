// The agent's one piece of data that the host writes: see core/probe/control.h.
#include "core/probe/control.h"

namespace sonde {
extern "C" {
__attribute__((used)) AgentControl sonde_agent_control = {.version = kAgentVersion,
                                                          .reserved = 0,
                                                          .session = nullptr,
                                                          .thread_area = nullptr,
                                                          .tables = nullptr,
                                                          .main_stack_end = 0,
                                                          .loader_debug = 0,
                                                          .flags = 0,
                                                          .unwinder_count = 0,
                                                          .unwinders = {},
                                                          .traps = nullptr,
                                                          .program_trap = {},
                                                          .host_actions = {},
                                                          .handle = 0,
                                                          .mapped_count = 0,
                                                          .reserved_too = 0,
                                                          .mapped = {}};
}
}  // namespace sonde
