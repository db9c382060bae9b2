// Words for verdicts, as reports print them.
#pragma once

#include "core/walk/frame.h"

namespace sonde {
const char* describe(Reason reason);
}
