// Images whose functions must keep their return addresses, all of them: runtimes that scan stacks and look return
// addresses up in tables of their own (V8, HotSpot, Go, CoreCLR, Mono, SpiderMonkey), and programs with an unwinder of
// their own that nobody can find the functions of.
#pragma once

#include "host/image/image.h"
#include "host/plan/plan.h"

namespace sonde::host {

// The image is a sanitizer's runtime (address, leak, memory, hardware address, thread), has one in it or needs one. It takes the
// stack of each malloc and free by frame pointers, through the frames of all images: none of them may have its returns hooked, or
// reports and suppressions change.
bool is_sanitized(const Image& image);

// NoHijack::none if returns of the image's functions may be hooked.
NoHijack no_hijack_in_image(const Image& image);

}  // namespace sonde::host
