// Any bytes as an ELF file: refused with a reason, or an image whose functions are sorted, found again and readable.
// A corpus of tiny programs and libraries, stripped and not, gets it past the first checks.
#include <cstdlib>

#include "host/image/image.h"

namespace {

void require(bool condition) {
  if (!condition) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace sonde;
  auto opened = host::Image::from_memory({data, data + size}, "input");
  if (!opened) {
    require(opened.error().message.size() > 6);
    return 0;
  }
  const host::Image& image = **opened;
  ImageAddr end;
  for (const host::Function& f : image.functions()) {
    require(f.range.begin >= end && f.range.begin < f.range.end);
    end = f.range.end;
    auto hit = image.find(f.range.end - 1);
    require(hit && hit->function == &f);
    host::display_name(image, f);
    unsigned sum = 0;
    for (uint8_t byte : image.bytes(f.range)) sum += byte;
    require(sum + 1 != 0);
  }
  for (const host::Section& section : image.sections())
    if (auto bytes = image.bytes(section); !bytes.empty()) require(bytes.front() + bytes.back() >= 0);
  image.symbol("main");
  return 0;
}
