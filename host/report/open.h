// A recording from a trace file (host/trace/file.h).
#pragma once

#include "host/report/recording.h"

namespace sonde::host {

Result<Recording> open_recording(const std::string& path);

}  // namespace sonde::host
