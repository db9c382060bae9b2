// Whether a process that holds an image can have trap sites: SIGTRAP must stay deliverable in all its threads, so every
// system call that changes masks or handlers must come by the agent.
#pragma once

#include <string>

#include "host/plan/plan.h"

namespace sonde::host {

// Why it cannot, in words for people; "" if it can. `plan` was made with system_calls and with traps allowed.
std::string trap_obstacle(const LoadedImage& loaded, const ImagePlan& plan);

}  // namespace sonde::host
