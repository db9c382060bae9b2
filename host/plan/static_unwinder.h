// The unwinder of an image that libgcc is linked into statically and whose symbols are stripped: found by its code. Who asks
// for a context's fields does it by functions of a few known bytes, so what has these bytes does the same; _Unwind_Resume is
// what landing pads call and, alone of what they call, keeps a frame to return elsewhere and looks at the exception's
// private_1 (libgcc's unwind.inc; Itanium C++ ABI: Exception Handling, 1.2).
#pragma once

#include <optional>

#include "host/image/image.h"

namespace sonde::host {

struct StaticUnwinder {
  ImageAddr get_ip, set_ip, set_gr, resume;
};

// Nothing unless all four are found, and one candidate only for the last.
std::optional<StaticUnwinder> find_static_unwinder(const Image& image);

}  // namespace sonde::host
