// What every report ends with: how much was recorded, what was lost and why, and what the probes themselves cost.
#pragma once

#include <string>

#include "host/report/order.h"

namespace sonde::host {

std::string footer_text(const Recording& recording, const Survey& survey);
// The same as a JSON object.
std::string footer_json(const Recording& recording, const Survey& survey);

}  // namespace sonde::host
