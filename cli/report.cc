#include "cli/commands.h"

namespace sonde::cli {

void add_report(CLI::App&, int&) {}

}  // namespace sonde::cli
