// The table of an image: its unwind sections found and compiled. cache.h keeps the result.
#pragma once

#include "host/image/image.h"
#include "host/tables/eh_frame.h"

namespace sonde::host {

// An image without .eh_frame gives a table of gaps.
Result<CompiledTable> compile_table(const Image& image);

}  // namespace sonde::host
