// Any bytes as an .eh_frame section. The first byte chooses the machine and the section's place.
#include "tests/fuzz/rows.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace sonde;
  if (size == 0) return 0;
  host::RowSources sources;
  sources.machine = data[0] & 1 ? fuzz::kMachineAarch64 : fuzz::kMachineX86_64;
  sources.sections.push_back(
      {{data + 1, size - 1}, ImageAddr(data[0] & 2 ? 0x16000 : 0), ImageAddr(0x1000), ImageAddr(0x15000)});
  fuzz::compile_and_use(sources);
  return 0;
}
