// Images whose functions must keep their return addresses, all of them: runtimes that scan stacks and look return
// addresses up in tables of their own (V8, HotSpot, Go, CoreCLR, Mono, SpiderMonkey), and programs with an unwinder of
// their own that nobody can find the functions of.
#pragma once

#include "host/image/image.h"
#include "host/plan/plan.h"

namespace sonde::host {

// NoHijack::none if returns of the image's functions may be hooked.
NoHijack no_hijack_in_image(const Image& image);

}  // namespace sonde::host
