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

size_t Symbolizer::image_at(CodeAddr code, uint64_t ticks) const {
  for (size_t i = 0; i < recording_.images.size(); i++) {
    const RecordedImage& mapped = recording_.images[i];
    if (mapped.range.contains(code.lookup()) && mapped.from_ticks <= ticks && ticks <= mapped.to_ticks) return i;
  }
  return kNowhere;
}

std::string Symbolizer::name(CodeAddr code, uint64_t ticks) {
  size_t index = image_at(code, ticks);
  if (index == kNowhere) return fmt::format("{:#x}", code.pc.value);
  const RecordedImage& mapped = recording_.images[index];
  uint64_t offset = code.pc.value - mapped.bias;
  if (auto file = image(index)) {
    if (auto hit = file->find(ImageAddr(code.lookup().value - mapped.bias))) {
      std::string name = hit->function->name;
      if (size_t cold = name.find(".cold"); cold != std::string::npos) name.resize(cold);
      if (!name.empty()) return fmt::format("{}+{:#x}", demangle(name), offset - hit->function->range.begin.value);
    }
  }
  return fmt::format("{}+{:#x}", mapped.path.substr(mapped.path.rfind('/') + 1), offset);
}

const std::vector<std::string>& Symbolizer::inlined(CodeAddr code, uint64_t ticks) {
  size_t index = image_at(code, ticks);
  uint64_t address = index == kNowhere ? 0 : code.lookup().value - recording_.images[index].bias;
  auto [found, added] = inlined_.try_emplace({index, address});
  auto file = added && index != kNowhere ? image(index) : nullptr;
  if (file)
    for (const SourceRow& row : file->source_rows(ImageAddr(address)))
      if (row.inlined) found->second.push_back(row.function.empty() ? "??" : row.function);
  return found->second;
}

}  // namespace sonde::host
