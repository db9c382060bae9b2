#include "host/target/agent_file.h"

#include <fmt/format.h>
#include <limits.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>

#include "core/probe/control.h"

namespace sonde::host {

namespace {

Result<std::string> find_path() {
  if (const char* chosen = getenv("SONDE_AGENT")) return std::string(chosen);
  char self[PATH_MAX];
  ssize_t length = readlink("/proc/self/exe", self, sizeof self);
  if (length < 0) return fail_errno("readlink /proc/self/exe");
  std::string folder(self, static_cast<size_t>(length));
  folder.resize(folder.rfind('/'));
  for (const char* place : {"/libsonde-agent.so", "/../lib/sonde/libsonde-agent.so", "/../libsonde-agent.so"}) {
    char real[PATH_MAX];
    if (realpath((folder + place).c_str(), real)) return std::string(real);
  }
  return fail(fmt::format(
      "libsonde-agent.so is neither in {} nor in {}/../lib/sonde: sonde is not installed completely", folder, folder));
}

}  // namespace

Result<AgentFile> find_agent() {
  AgentFile agent;
  agent.path = SONDE_TRY(find_path());
  agent.image = SONDE_TRY_CONTEXT(Image::open(agent.path), "the agent " + agent.path);
  struct {
    const char* name;
    ImageAddr* address;
  } wanted[] = {{"sonde_agent_control", &agent.control},
                {"sonde_entry", &agent.entry},
                {"sonde_trampolines", &agent.trampolines},
                {"sonde_entries", &agent.entries},
                {"sonde_calls", &agent.calls},
                {"sonde_owners", &agent.owners},
                {"sonde_fresh_entries", &agent.fresh_entries},
                {"sonde_trap_action", &agent.trap_action},
                {"sonde_sum_calls", &agent.sum_calls},
                {"sonde_handlers", &agent.handlers},
                {"sonde_handler_table", &agent.handler_table}};
  for (auto& [name, address] : wanted) {
    auto found = agent.image->symbol(name);
    if (!found)
      return fail(fmt::format("{} has no symbol {}: it was stripped or is not sonde's agent", agent.path, name));
    *address = *found;
  }
  auto version = agent.image->bytes({agent.control, agent.control + 4});
  uint32_t number = 0;
  if (version.size() == 4) std::memcpy(&number, version.data(), 4);
  if (number != kAgentVersion)
    return fail(fmt::format("{} is of version {}, this sonde needs {}", agent.path, number, kAgentVersion));
  return agent;
}

}  // namespace sonde::host
