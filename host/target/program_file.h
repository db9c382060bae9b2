// The file that a command names, looked at before it is started: what would only fail as "Permission denied" or "No such
// file or directory" is said as what it is.
#pragma once

#include <string>

#include "host/error.h"

namespace sonde::host {

// The error has the exit status that a shell gives: 127 for no such program, 126 for one that cannot be run. Success does
// not promise that exec will succeed.
Result<void> check_program_file(const std::string& program);

// The interpreter that the first line of `program`, looked up as execvp does, names; "" if it is no script.
std::string script_interpreter(const std::string& program);

}  // namespace sonde::host
