// Addresses of recorded stacks to names, by the images that were mapped when the stack was taken. A file that was
// replaced since (another build id) gives no names: module+offset is right, a wrong name is not.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/base/addr.h"
#include "core/walk/frame.h"
#include "host/image/image.h"
#include "host/report/recording.h"

namespace sonde::host {

class Symbolizer {
 public:
  explicit Symbolizer(const Recording& recording) : recording_(recording) {}
  // "name+0x12", "module+0x1234" or "0x1234"; functions are named as their calls are, those without a symbol
  // "module+0x1200+0x34". Return addresses are looked up one byte earlier and shown as they are.
  std::string name(CodeAddr code, uint64_t ticks);
  // The functions that were inlined there, innermost first; empty without debug information.
  const std::vector<std::string>& inlined(CodeAddr code, uint64_t ticks);
  // A frame as an object of JSON: docs/formats.md.
  std::string json(const Frame& frame, uint64_t ticks);

 private:
  struct Place {
    size_t image;  // of the recording's; kNone: in none
    std::string function;  // "" if no function of the file is known to hold it
    uint64_t offset = 0;  // from the function, else from the file's address 0
  };
  static constexpr size_t kNone = ~size_t{0};

  size_t image_at(CodeAddr code, uint64_t ticks) const;
  Place place_of(CodeAddr code, size_t image);
  std::shared_ptr<const Image> file(size_t image);
  const Recording& recording_;
  std::map<size_t, std::shared_ptr<const Image>> opened_;
  std::map<std::pair<size_t, uint64_t>, std::vector<std::string>> inlined_;  // by image and address in it
  std::unordered_map<uint64_t, std::pair<size_t, std::string>> json_;  // by packed frame, of the image it lay in last
};

}  // namespace sonde::host
