// What to tell somebody whose pattern matched nothing: names that are near, and reasons that the file itself shows.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "host/image/image.h"

namespace sonde::host {

// The three candidates with the fewest changes to `wanted` (wildcards left out), nearest first. One that has `wanted`
// as its last component or inside it counts as near.
std::vector<std::string> nearest(const std::string& wanted, const std::vector<std::string>& candidates);
// The same among all function names of the images as people write them: demangled, without parameters and versions.
std::vector<std::string> nearest_functions(const std::string& wanted, std::span<const Image* const> images);
// "; nearest: a, b, c", or "".
std::string nearest_text(const std::vector<std::string>& names);
// The functions of `first`, the file that is meant before all others, come first and whatever the others have; of theirs
// only names that are nearer: "; nearest: a, b, c; in libraries: d".
std::string nearest_functions_text(const std::string& wanted, const Image* first, std::span<const Image* const> images);
// Stripped, static, inlined away, a variable, a place inside another function: whole clauses.
std::vector<std::string> facts_about(const std::string& wanted, const Image& image);

}  // namespace sonde::host
