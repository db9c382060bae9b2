#include "host/tables/image_table.h"

#include <algorithm>

namespace sonde::host {

RowSources row_sources(const Image& image) {
  RowSources sources;
  sources.machine = image.machine();
  for (const Segment& segment : image.segments())
    if (segment.executable) sources.executable.push_back(segment.range);
  std::sort(sources.executable.begin(), sources.executable.end(),
            [](const ImageRange& a, const ImageRange& b) { return a.begin < b.begin; });
  const Section* text = image.section(".text");
  const Section* got = image.section(".got");
  for (const Section& section : image.sections()) {
    if (!section.addr) continue;
    if (section.name == ".eh_frame")
      sources.sections.push_back(
          {image.bytes(section), section.addr, text ? text->addr : ImageAddr{}, got ? got->addr : ImageAddr{}});
    if (section.name == ".sframe") sources.sframes.push_back({image.bytes(section), section.addr});
  }
  if (auto bytes = image.debug_section(".debug_frame"); !bytes.empty())
    sources.debug_frames.push_back(
        {.bytes = bytes, .address = {}, .text_base = {}, .data_base = {}, .debug_frame = true});
  return sources;
}

Result<CompiledTable> compile_table(const Image& image) {
  auto compiled = SONDE_TRY_CONTEXT(compile_rows(row_sources(image)), image.path());
  for (const Section& section : image.sections())
    if (section.name == ".eh_frame_hdr") compiled.stats.source_bytes += section.size;
  return compiled;
}

}  // namespace sonde::host
