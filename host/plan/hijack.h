// Whether a function's return address may be replaced: by its name where what it does is known, else by what its
// instructions do to the return slot. When in doubt: entry only.
#pragma once

#include <string_view>

#include "host/plan/code_view.h"
#include "host/plan/plan.h"

namespace sonde::host {

NoHijack no_hijack_by_name(std::string_view raw_name);
NoHijack no_hijack_by_code(const CodeView& view, CodeRange function);

}  // namespace sonde::host
