// The names by which a person may call for a function, and how a pattern is held against them.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "host/image/image.h"

namespace sonde::host {

// "/usr/lib/libx.so.1" -> "libx.so.1".
std::string base_name(std::string_view path);
// "net::send(int)" -> "net::send"; "S::operator()(int) const" -> "S::operator()"; "f<(E)1>(int)" -> "f<(E)1>";
// "f[abi:cxx11]()" -> "f".
std::string without_parameters(std::string_view demangled);
// "fn.constprop.0" -> "fn": a compiler's clone counts as the function it was made of.
std::string_view without_clone_suffix(std::string_view raw);
// Where the module of "module:name" ends: at a single colon, as "::" belongs to a C++ name and brackets to a glob or an ABI tag;
// npos: there is none.
size_t module_end(std::string_view text);
// A module as a person writes it and, if it is the path of a file, that file as processes' maps name it.
struct ModuleGlob {
  std::string text, file;
  ModuleGlob() = default;
  explicit ModuleGlob(std::string written);
  bool empty() const { return text.empty(); }
  // By base name, soname or, with a slash, path. libx.so and libx.so.0 are also meant where the file is libx.so.0.8.6.
  bool matches(const Image& image) const;
};

// *, ?, [..]; a name that is the pattern letter by letter matches also where it contains brackets ("operator[]").
bool matches_glob(const std::string& glob, const std::string& name);

struct CallName {
  std::string name;
  // foo@V1 where plain foo means another function: only a pattern with @ may choose it.
  bool versioned = false;
};
// Raw, demangled, demangled without parameters, the parents' of clones; each with and without version. Empty for
// functions without a symbol.
std::vector<CallName> call_names(const Function& function);

// Changes between a and b (insert, delete, replace), or limit + 1 if there are more.
unsigned edit_distance(std::string_view a, std::string_view b, unsigned limit);

}  // namespace sonde::host
