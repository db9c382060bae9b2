// Which functions a user means: the patterns of `record -f` and `sonde list`.
//
//   glob            of a raw or demangled name, the latter with or without its parameters: net::* matches
//                   net::send(int). Looked for in the program; only if it has none, in the libraries.
//   module:glob     only in files whose base name, soname or, if it has a slash, path matches `module`; `*:glob` in all
//   !pattern        takes away what it matches, wherever it stands
//   name@V1         one version of a symbol; a plain name means the default one, name@* all
//
// Compilers' clones (foo.part.0) count as what they were made of. What calls do not enter is never meant: parts entered
// by jumps (X.cold), labels, and resolvers of indirect functions. Without a pattern: all functions of the program itself.
#pragma once

#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "host/image/image.h"
#include "host/image/names.h"

namespace sonde::host {

class Selection {
 public:
  // An error has exit status 2.
  static Result<Selection> parse(const std::vector<std::string>& patterns);

  // Indices into image.functions(), ascending. Give the program before its libraries.
  std::vector<uint32_t> select(const Image& image, bool is_program);

  // After the program's first images went through select(): why a pattern matched nothing and what is near. Patterns for
  // a library that is named by its path may match later.
  std::optional<Error> unmatched(std::span<const std::shared_ptr<const Image>> images) const;
  // Patterns that still have matched nothing: their library never came.
  std::vector<std::string> waiting() const;
  // What the user should know of patterns that did match: "foo means foo@@V3; foo@V1 exists too".
  std::vector<std::string> notes() const;

 private:
  struct Pattern {
    std::string text, name;
    ModuleGlob module;  // empty: the program, or else the libraries
    bool exclude = false, wildcard = false;
    // What select() has seen.
    bool module_seen = false, found = false, in_program = false;
    std::string chosen_version;  // "foo@@V3"
    std::set<std::string> other_versions;  // "foo@V1"
    std::string not_entered;  // why what it names cannot be probed
  };
  static Result<Pattern> parse_one(const std::string& text);
  static bool matches(Pattern& pattern, const Image& image, const Function& function,
                      const std::vector<struct CallName>& names);
  std::string why_unmatched(const Pattern& pattern, std::span<const std::shared_ptr<const Image>> images) const;

  std::vector<Pattern> patterns_;
  bool default_set_ = true;  // no pattern that includes
  const Image* program_ = nullptr;
  size_t selected_ = 0;
};

}  // namespace sonde::host
