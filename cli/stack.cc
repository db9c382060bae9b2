#include "cli/commands.h"

namespace sonde::cli {

void add_stack(CLI::App&, int&) {}

}  // namespace sonde::cli
