// Which instructions a user means: the places of `record --at` and `list --at`.
//
//   symbol, symbol+0x12     an instruction of a function of the program or, if that has none, of a library; the offset counts
//                           bytes from the function's start, decimal or with 0x
//   file.c:12               the first instruction of that source line in each function that has code of it, from debug
//                           information; of the next line that has code, if this one has none
//   module:PLACE            one of the above in the files that `module` matches, as in a pattern (host/image/select.h)
//   module:0x1234           the byte at that offset in the file, as objdump -F and uprobe_events count
//   0x401136                the byte at that address of the process
//
// A place is an instruction's first byte. For the start of a function that begins with a landing pad (endbr64) the
// instruction behind it is taken.
#pragma once

#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "host/image/maps.h"
#include "host/image/names.h"

namespace sonde::host {

class Places {
 public:
  // An error has exit status 2 and says what is wrong with which place.
  static Result<Places> parse(const std::vector<std::string>& texts);

  bool empty() const { return places_.empty(); }
  // Places in this image, ascending. Give the program before its libraries. An error (exit status 2): there is a function, line or
  // byte as named, but no instruction begins there.
  Result<std::vector<ImageAddr>> find(const LoadedImage& loaded, bool is_program);
  // After the program's first images went through find(): which places were in none, and what is near. Places in a library that
  // is named by its path may be found later.
  std::optional<Error> unmatched(std::span<const std::shared_ptr<const Image>> images) const;
  // Places that still have not been found: their library never came.
  std::vector<std::string> waiting() const;

 private:
  struct Place {
    std::string text;
    ModuleGlob module;  // empty: the program or, if it has no such place, the libraries
    std::string symbol;  // one of these three
    std::string source;
    std::optional<uint64_t> number;  // with a module: file offset, else an address of the process
    uint64_t offset = 0;  // from `symbol`
    unsigned line = 0;  // of `source`
    bool found = false, in_program = false;
  };
  static Result<Place> parse_one(const std::string& text);
  static Result<std::vector<ImageAddr>> find_one(const Place& place, const LoadedImage& loaded);

  std::vector<Place> places_;
  const Image* program_ = nullptr;
};

// "main+0x12"; a place in no function is named by its file: "libx.so+0x1234".
std::string point_name(const Image& image, ImageAddr at);

// Where the instructions of the function that holds `at` begin, `at`'s own among them if one begins there; empty: they
// cannot be told apart up to there. x86-64.
std::vector<ImageAddr> instructions_around(const Image& image, ImageAddr at);

}  // namespace sonde::host
