#include "host/report/symbolize.h"

#include <fmt/format.h>

namespace sonde::host {

std::shared_ptr<const Image> Symbolizer::image(size_t index) {
  auto [at, added] = opened_.try_emplace(index);
  if (!added) return at->second;
  auto opened = Image::open(recording_.images[index].path);
  if (opened && (*opened)->build_id() == recording_.images[index].build_id) at->second = *opened;
  return at->second;
}

std::string Symbolizer::name(CodeAddr code, uint64_t ticks) {
  for (size_t i = 0; i < recording_.images.size(); i++) {
    const RecordedImage& mapped = recording_.images[i];
    if (!mapped.range.contains(code.lookup()) || ticks < mapped.from_ticks || ticks > mapped.to_ticks) continue;
    uint64_t offset = code.pc.value - mapped.bias;
    auto file = image(i);
    if (file) {
      if (auto hit = file->find(ImageAddr(code.lookup().value - mapped.bias))) {
        std::string name = hit->function->name;
        if (size_t cold = name.find(".cold"); cold != std::string::npos) name.resize(cold);
        if (!name.empty()) return fmt::format("{}+{:#x}", demangle(name), offset - hit->function->range.begin.value);
      }
    }
    return fmt::format("{}+{:#x}", mapped.path.substr(mapped.path.rfind('/') + 1), offset);
  }
  return fmt::format("{:#x}", code.pc.value);
}

}  // namespace sonde::host
