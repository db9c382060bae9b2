// libsonde-agent.so on disk: where it is, and the addresses of what the host uses in it (core/probe/control.h).
#pragma once

#include <memory>
#include <string>

#include "host/image/image.h"

namespace sonde::host {

struct AgentFile {
  std::string path;
  std::shared_ptr<const Image> image;
  ImageAddr control, entry, trampolines, entries, calls, owners, fresh_entries, trap_action, sum_calls, handlers,
      handler_table;
};

// Beside the running sonde, else in ../lib/sonde; SONDE_AGENT overrides. An agent of another version is refused.
Result<AgentFile> find_agent();

}  // namespace sonde::host
