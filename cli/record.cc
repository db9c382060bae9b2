#include "cli/commands.h"

namespace sonde::cli {

void add_record(CLI::App&, int&) {}

}  // namespace sonde::cli
