// Which instructions a user means: the places of `record --at` and `list --at`.
//
//   symbol, symbol+0x12     an instruction of a function of the program or, if that has none, of a library; the offset counts
//                           bytes from the function's start, decimal or with 0x
//   libx.so+0x1234          the byte at that address of the file, as instructions of functions without a name are called
//   glob+*                  every instruction of the functions that the glob matches
//   file.c:12               the first instruction of that source line in each function that has code of it, from debug
//                           information; of the next line that has code, if this one has none
//   module:PLACE            one of the above in the files that `module` matches, as in a pattern (host/image/select.h)
//   module:0x1234           the byte at that offset in the file, as objdump -F and uprobe_events count
//   0x401136                the byte at that address of the process
//   @file                   the places that stand in the file, one a line; a # begins a comment
//
// A place is an instruction's first byte. A landing pad (endbr64) stays as it is: for it the instruction behind it is taken, and
// if both are wanted, that one alone.
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
  // The same, and also those where no instruction begins: the plan refuses them.
  Result<std::vector<ImageAddr>> find_any(const LoadedImage& loaded, bool is_program);
  // After the program's first images went through find(): which places were in none, and what is near. Places in a library that
  // is named by its path may be found later.
  std::optional<Error> unmatched(std::span<const std::shared_ptr<const Image>> images) const;
  // Places that still have not been found: their library never came.
  std::vector<std::string> waiting() const;
  // Functions that a glob matches and of which nothing can be probed.
  std::vector<std::string> notes() const { return notes_; }

 private:
  struct Place {
    std::string text;
    ModuleGlob module;  // empty: the program or, if it has no such place, the libraries
    std::string symbol;  // one of these three
    std::string source;
    std::optional<uint64_t> number;  // with a module: file offset, else an address of the process
    uint64_t offset = 0;  // from `symbol`
    bool every = false;  // instruction of the functions that `symbol`, a glob, matches
    unsigned line = 0;  // of `source`
    bool found = false, in_program = false;
  };
  class Finder;
  static Result<Place> parse_one(const std::string& text);
  Result<std::vector<ImageAddr>> find(const LoadedImage& loaded, bool is_program, bool any);

  std::vector<Place> places_;
  std::vector<std::string> notes_;
  const Image* program_ = nullptr;
};

// "main+0x12"; a place in no function is named by its file: "libx.so+0x1234".
std::string point_name(const Image& image, ImageAddr at);

// An endbr64 begins there.
bool is_landing_pad(const Image& image, ImageAddr at);

// Where an image's instructions begin. x86-64.
class Instructions {
 public:
  explicit Instructions(const Image& image) : image_(image) {}

  bool begins(ImageAddr at);
  // Those of the function that holds `at`; empty: they cannot be told apart up to there.
  std::span<const ImageAddr> around(ImageAddr at);
  // The last in front of `at` and the first behind it.
  std::vector<ImageAddr> beside(ImageAddr at);
  // "; instructions begin at main+0x1 and main+0x5": those; "": nobody knows.
  std::string beside_text(ImageAddr at);
  // All of a function; empty: they cannot be told apart, or nobody knows where it ends.
  std::span<const ImageAddr> of(const Function& function);

 private:
  void decode_function(const Function& function, ImageRange range);

  const Image& image_;
  const Function* function_ = nullptr;  // the last asked about: questions often stand together
  std::vector<ImageAddr> starts_;
  ImageAddr end_;  // of the last of these
};

}  // namespace sonde::host
