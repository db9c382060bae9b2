// Any bytes as an SFrame section: the first one chooses the machine and whether the header is made right, so that what lies
// behind it is reached.
#include <cstring>
#include <vector>

#include "tests/fuzz/rows.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace sonde;
  if (size == 0) return 0;
  bool aarch64 = data[0] & 1;
  std::vector<uint8_t> bytes(data + 1, data + size);
  if (data[0] & 2 && bytes.size() >= 28) {
    bytes[0] = 0xe2, bytes[1] = 0xde, bytes[2] = 1 + (bytes[2] & 1);
    bytes[3] &= bytes[2] == 1 ? 3 : 7, bytes[4] = aarch64 ? 2 : 3, bytes[6] = aarch64 ? 0 : 0xf8, bytes[7] = 0;
    uint32_t entry = bytes[2] == 1 ? 17 : 20, left = static_cast<uint32_t>(bytes.size() - 28);
    uint32_t functions = left / entry < 8 ? left / entry : bytes[8] % 8, rows = 0;
    for (uint32_t i = 0; i < functions; i++)
      rows += bytes[28 + i * entry + 12] &= 15, std::memset(&bytes[28 + i * entry + 13], 0, 3);
    uint32_t fields[] = {functions, rows, left - functions * entry, 0, functions * entry};
    std::memcpy(&bytes[8], fields, sizeof fields);
  }
  host::RowSources sources;
  sources.machine = aarch64 ? fuzz::kMachineAarch64 : fuzz::kMachineX86_64;
  sources.sframes.push_back({bytes, ImageAddr(0x800)});
  fuzz::compile_and_use(sources);
  return 0;
}
