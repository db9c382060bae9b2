// Which functions a user means: the patterns of `record -f` and `sonde list`.
//
//   glob            of a raw or demangled name, the latter with or without its parameters: net::* matches net::send(int)
//   module:glob     only in files whose base name matches `module`
//   !pattern        takes away what it matches, wherever it stands
//   name@VERSION    one version of a symbol; without it the default one
//
// Parts that are entered by jumps (X.cold) are never meant. Without a pattern: all functions of the program itself.
#pragma once

#include <string>
#include <vector>

#include "host/image/image.h"

namespace sonde::host {

class Selection {
 public:
  static Result<Selection> parse(const std::vector<std::string>& patterns);

  // Indices into image.functions(), ascending.
  std::vector<uint32_t> select(const Image& image, bool is_program) const;

  // Whether any pattern may match in files other than the program.
  bool beyond_program() const;

 private:
  struct Pattern {
    std::string module;  // glob of base names; "" any
    std::string name;  // glob
    bool exclude = false;
  };
  bool matches(const Pattern& pattern, const Function& function, const std::vector<std::string>& names) const;
  std::vector<Pattern> patterns_;
};

// The error when nothing matched: the nearest three names of the images, and what may be the reason (stripped, inlined).
Error nothing_matches(const std::vector<std::string>& patterns,
                      const std::vector<std::shared_ptr<const Image>>& images);

}  // namespace sonde::host
