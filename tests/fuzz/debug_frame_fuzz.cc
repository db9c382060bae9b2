// Any bytes as a .debug_frame section, or cut in two as one .eh_frame and one .debug_frame that fills its gaps. The first
// byte chooses the machine, the second where the cut is.
#include "tests/fuzz/rows.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace sonde;
  if (size < 2) return 0;
  host::RowSources sources;
  sources.machine = data[0] & 1 ? fuzz::kMachineAarch64 : fuzz::kMachineX86_64;
  std::span<const uint8_t> rest(data + 2, size - 2), eh_frame = rest.first(rest.size() * data[1] / 256);
  if (!eh_frame.empty())
    sources.sections.push_back({eh_frame, ImageAddr(0x16000), ImageAddr(0x1000), ImageAddr(0x15000)});
  sources.debug_frames.push_back(
      {.bytes = rest.subspan(eh_frame.size()), .address = {}, .text_base = {}, .data_base = {}, .debug_frame = true});
  fuzz::compile_and_use(sources);
  return 0;
}
