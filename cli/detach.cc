// `sonde detach`: takes out an agent that a recorder has left in a process, because it was killed. Recorders that live do so
// themselves.
#include <fmt/format.h>

#include "cli/commands.h"
#include "cli/options.h"
#include "host/image/names.h"
#include "host/target/attach.h"

namespace sonde::cli {

void add_detach(CLI::App& app, int& status) {
  auto pid = std::make_shared<int>(0);
  CLI::App* command = app.add_subcommand("detach", "Take out what a recorder that was killed has left in a process");
  command->add_option("PID", *pid, "The process")->type_name("")->required();
  command->footer(
      "A recorder that ends, also by Ctrl-C, takes everything out itself. After one that was killed (SIGKILL) the "
      "process\n"
      "goes on with its probes, without effect; this gives it its code back. `sonde record -p PID` does it first, "
      "too.\n"
      "Example:\n"
      "  sonde detach 4711");
  command->callback([pid, &status] {
    host::AgentFile agent = require(host::find_agent());
    bool left;
    pid_t process = require(host::check_attachable(*pid, agent, &left));
    if (!left)
      throw CommandError{{fmt::format("process {} ({}) has no agent in it: there is nothing to take out", process,
                                      host::printable(host::status_field(process, "Name")))}};
    if (std::string stays = require(host::take_out_left(process, agent)); !stays.empty()) throw CommandError{{stays}};
    status = 0;
  });
}

}  // namespace sonde::cli
