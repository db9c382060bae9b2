// Addresses of recorded stacks to names, by the images that were mapped when the stack was taken. A file that was
// replaced since (another build id) gives no names: module+offset is right, a wrong name is not.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/base/addr.h"
#include "host/image/image.h"
#include "host/report/recording.h"

namespace sonde::host {

class Symbolizer {
 public:
  explicit Symbolizer(const Recording& recording) : recording_(recording) {}
  // "name+0x12", "module+0x1234" or "0x1234". Return addresses are looked up one byte earlier and shown as they are.
  std::string name(CodeAddr code, uint64_t ticks);
  // The functions that were inlined there, innermost first; empty without debug information.
  const std::vector<std::string>& inlined(CodeAddr code, uint64_t ticks);

 private:
  static constexpr size_t kNowhere = ~size_t{0};

  size_t image_at(CodeAddr code, uint64_t ticks) const;
  std::shared_ptr<const Image> image(size_t index);
  const Recording& recording_;
  std::map<size_t, std::shared_ptr<const Image>> opened_;
  std::map<std::pair<size_t, uint64_t>, std::vector<std::string>> inlined_;  // by image and address in it
};

}  // namespace sonde::host
