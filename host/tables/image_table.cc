#include "host/tables/image_table.h"

#include <algorithm>

namespace sonde::host {

Result<CompiledTable> compile_table(const Image& image) {
  EhFrameSource source;
  source.machine = image.machine();
  for (const Segment& segment : image.segments())
    if (segment.executable) source.executable.push_back(segment.range);
  std::sort(source.executable.begin(), source.executable.end(),
            [](const ImageRange& a, const ImageRange& b) { return a.begin < b.begin; });
  const Section* text = image.section(".text");
  const Section* got = image.section(".got");
  uint64_t header_bytes = 0;
  for (const Section& section : image.sections()) {
    if (section.name == ".eh_frame_hdr") header_bytes += section.size;
    if (section.name != ".eh_frame" || !section.addr) continue;
    source.sections.push_back({image.bytes(section), section.addr, text ? text->addr : ImageAddr{}, got ? got->addr : ImageAddr{}});
  }
  auto compiled = SONDE_TRY_CONTEXT(compile_eh_frame(source), image.path());
  compiled.stats.source_bytes += header_bytes;
  return compiled;
}

}  // namespace sonde::host
