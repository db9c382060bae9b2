// The table of an image: the sections that rows come from, found and compiled. cache.h keeps the result.
#pragma once

#include "host/image/image.h"
#include "host/tables/compile.h"

namespace sonde::host {

// Valid as long as the image.
RowSources row_sources(const Image& image);

// An image without any source of rows gives a table of gaps.
Result<CompiledTable> compile_table(const Image& image);

}  // namespace sonde::host
