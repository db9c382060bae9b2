#include "cli/commands.h"

namespace sonde::cli {

void add_dump(CLI::App&, int&) {}

}  // namespace sonde::cli
