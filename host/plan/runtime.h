// Images whose functions must keep their return addresses, all of them: runtimes that scan stacks and look return
// addresses up in tables of their own (V8, HotSpot, Go, CoreCLR, Mono, SpiderMonkey). And images for whose sake those of the
// whole process must.
#pragma once

#include "host/image/image.h"
#include "host/plan/plan.h"
#include "host/plan/static_unwinder.h"

namespace sonde::host {

// Not none: with this image in the process no function of any image may have its return hooked.
//   sanitized    it is a sanitizer's runtime (address, leak, memory, hardware address, thread), has one in it or needs one. That takes
//                the stack of each malloc and free by frame pointers, through the frames of all images: reports and suppressions
//                would change.
//   no_unwinder  it throws exceptions with an unwinder of its own that nobody can find the functions of, perhaps through the
//                frames of other images (a callback of qsort).
// `unwinder`: gets one that has no symbols and was found all the same.
NoHijack no_hijack_beside(const Image& image, std::optional<StaticUnwinder>* unwinder = nullptr);

// It throws or resumes with an unwinder that no symbol names: linked statically and stripped.
bool has_hidden_unwinder(const Image& image);

// Its functions run on stacks that are as large as they need, and no hit's stack or sum has room there: goroutines', of 2 KB.
bool has_small_stacks(const Image& image);

// NoHijack::none if returns of the image's functions may be hooked.
NoHijack no_hijack_in_image(const Image& image);

}  // namespace sonde::host
