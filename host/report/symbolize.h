// Addresses of recorded stacks to names, by the images that were mapped when the stack was taken. A file that was
// replaced since (another build id) gives no names: module+offset is right, a wrong name is not.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>

#include "core/base/addr.h"
#include "host/image/image.h"
#include "host/report/recording.h"

namespace sonde::host {

class Symbolizer {
 public:
  explicit Symbolizer(const Recording& recording) : recording_(recording) {}
  // "name+0x12", "module+0x1234" or "0x1234". Return addresses are looked up one byte earlier and shown as they are.
  std::string name(CodeAddr code, uint64_t ticks);

 private:
  std::shared_ptr<const Image> image(size_t index);
  const Recording& recording_;
  std::map<size_t, std::shared_ptr<const Image>> opened_;
};

}  // namespace sonde::host
