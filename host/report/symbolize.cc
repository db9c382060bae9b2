#include "host/report/symbolize.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "host/report/frame_json.h"

namespace sonde::host {

std::shared_ptr<const Image> Symbolizer::file(size_t index) {
  auto [at, added] = opened_.try_emplace(index);
  if (!added) return at->second;
  auto opened = Image::open(recording_.images[index].path);
  if (opened && (*opened)->build_id() == recording_.images[index].build_id) at->second = *opened;
  return at->second;
}

size_t Symbolizer::image_at(CodeAddr code, uint64_t ticks) const {
  for (size_t i = 0; i < recording_.images.size(); i++) {
    const RecordedImage& mapped = recording_.images[i];
    if (mapped.range.contains(code.lookup()) && ticks >= mapped.from_ticks && ticks <= mapped.to_ticks) return i;
  }
  return kNone;
}

Symbolizer::Place Symbolizer::place_of(CodeAddr code, size_t index) {
  if (index == kNone) return {kNone, "", code.pc.value};
  uint64_t bias = recording_.images[index].bias;
  auto image = file(index);
  auto hit = image ? image->find(ImageAddr(code.lookup().value - bias)) : std::nullopt;
  if (!hit) return {index, "", code.pc.value - bias};
  std::string raw = hit->function->name;
  if (size_t cold = raw.find(".cold"); cold != std::string::npos) raw.resize(cold);
  return {index, raw.empty() ? display_name(*image, *hit->function) : demangle(raw),
          code.pc.value - bias - hit->function->range.begin.value};
}

std::string Symbolizer::name(CodeAddr code, uint64_t ticks) {
  Place place = place_of(code, image_at(code, ticks));
  if (place.image == kNone) return fmt::format("{:#x}", place.offset);
  const std::string& path = recording_.images[place.image].path;
  return fmt::format("{}+{:#x}", place.function.empty() ? path.substr(path.rfind('/') + 1) : place.function,
                     place.offset);
}

const std::vector<std::string>& Symbolizer::inlined(CodeAddr code, uint64_t ticks) {
  size_t index = image_at(code, ticks);
  uint64_t address = index == kNone ? 0 : code.lookup().value - recording_.images[index].bias;
  auto [found, added] = inlined_.try_emplace({index, address});
  auto image = added && index != kNone ? file(index) : nullptr;
  if (image)
    for (const SourceRow& row : image->source_rows(ImageAddr(address)))
      if (row.inlined) found->second.push_back(row.function.empty() ? "??" : row.function);
  return found->second;
}

std::string Symbolizer::json(const Frame& frame, uint64_t ticks) {
  size_t image = image_at(frame.code(), ticks);
  auto [known, added] = json_.try_emplace(pack_frame(frame));
  auto& [of_image, text] = known->second;
  if (!added && of_image == image) return text;
  Place place = place_of(frame.code(), image);
  nlohmann::ordered_json out{{"pc", fmt::format("{:#x}", frame.pc.value)}, {"is_return", frame.is_return}};
  if (!place.function.empty()) out["function"] = place.function;
  if (image != kNone) {
    out["file"] = recording_.images[image].path;
    out["offset"] = place.offset;
    out["build_id"] = recording_.images[image].build_id;
  }
  auto opened = image == kNone ? nullptr : file(image);
  ImageAddr lookup(opened ? frame.code().lookup().value - recording_.images[image].bias : 0);
  add_source(out, opened ? opened->source_rows(lookup) : std::vector<SourceRow>{});
  add_judgement(out, frame);
  of_image = image;
  return text = out.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

}  // namespace sonde::host
