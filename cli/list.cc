#include "cli/commands.h"

namespace sonde::cli {

void add_list(CLI::App&, int&) {}

}  // namespace sonde::cli
