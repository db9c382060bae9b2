#include "host/image/select.h"

#include <fmt/format.h>
#include <fnmatch.h>

#include <algorithm>
#include <set>

namespace sonde::host {

namespace {

std::string base_name(const std::string& path) { return path.substr(path.rfind('/') + 1); }

bool glob(const std::string& pattern, const std::string& text) {
  return fnmatch(pattern.c_str(), text.c_str(), FNM_NOESCAPE) == 0;
}

// "net::send(int)" -> "net::send"; operator() keeps its own parentheses.
std::string without_parameters(const std::string& name) {
  size_t from = name.find("operator()");
  size_t open = name.find('(', from == std::string::npos ? 0 : from + 10);
  return name.substr(0, open);
}

// "fn.constprop.0" -> "fn": compilers' clones count as the function they were made of.
std::string without_clone_suffix(const std::string& raw) {
  for (const char* suffix : {".constprop.", ".isra.", ".part.", ".lto_priv."})
    if (size_t at = raw.find(suffix); at != std::string::npos) return raw.substr(0, at);
  return raw;
}

// All names by which a function may be called for.
std::vector<std::string> names_of(const Function& function) {
  std::vector<std::string> names;
  auto add = [&](const std::string& raw) {
    names.push_back(raw);
    std::string parent = without_clone_suffix(raw);
    if (parent != raw) names.push_back(parent);
    if (raw.starts_with("_Z") || raw.starts_with("_R")) {
      std::string readable = demangle(parent);
      names.push_back(without_parameters(readable));
      names.push_back(std::move(readable));
    }
  };
  if (!function.name.empty()) add(function.name);
  for (const std::string& alias : function.aliases) {
    names.push_back(alias);
    // foo@@V3 is what plain foo means; foo@V1 is meant by its version only.
    if (size_t at = alias.find("@@"); at != std::string::npos) add(alias.substr(0, at));
    else if (alias.find('@') == std::string::npos) add(alias);
  }
  return names;
}

// Levenshtein distance, given up above `limit`.
unsigned distance(std::string_view a, std::string_view b, unsigned limit) {
  if (a.size() > b.size()) std::swap(a, b);
  if (b.size() - a.size() > limit) return limit + 1;
  std::vector<unsigned> row(a.size() + 1);
  for (unsigned i = 0; i <= a.size(); i++) row[i] = i;
  for (unsigned j = 1; j <= b.size(); j++) {
    unsigned diagonal = row[0], best = row[0] = j;
    for (unsigned i = 1; i <= a.size(); i++) {
      unsigned changed = diagonal + (a[i - 1] != b[j - 1]);
      diagonal = row[i];
      row[i] = std::min({row[i] + 1, row[i - 1] + 1, changed});
      best = std::min(best, row[i]);
    }
    if (best > limit) return limit + 1;
  }
  return row[a.size()];
}

}  // namespace

Result<Selection> Selection::parse(const std::vector<std::string>& patterns) {
  Selection selection;
  for (std::string text : patterns) {
    Pattern pattern;
    if (text.starts_with('!')) pattern.exclude = true, text.erase(0, 1);
    // "::" belongs to a C++ name; a single colon ends the module.
    for (size_t at = text.find(':'); at != std::string::npos; at = text.find(':', at)) {
      if (at + 1 < text.size() && text[at + 1] == ':') {
        at += 2;
        continue;
      }
      pattern.module = text.substr(0, at);
      text.erase(0, at + 1);
      break;
    }
    if (text.empty()) return fail("an empty pattern matches nothing: write * for every function", 2);
    pattern.name = text;
    selection.patterns_.push_back(std::move(pattern));
  }
  if (!patterns.empty() &&
      std::all_of(selection.patterns_.begin(), selection.patterns_.end(), [](auto& p) { return p.exclude; }))
    return selection;  // only exclusions: from the program's own functions
  return selection;
}

bool Selection::beyond_program() const {
  return std::any_of(patterns_.begin(), patterns_.end(), [](const Pattern& p) { return !p.exclude; });
}

bool Selection::matches(const Pattern& pattern, const Function& function, const std::vector<std::string>& names) const {
  return std::any_of(names.begin(), names.end(), [&](const std::string& name) { return glob(pattern.name, name); }) ||
         (names.empty() && pattern.name == "*");
}

std::vector<uint32_t> Selection::select(const Image& image, bool is_program) const {
  std::vector<Pattern> here;
  std::string base = base_name(image.path());
  bool wanted = false;
  for (const Pattern& pattern : patterns_) {
    // libx.so.0 is also meant where the mapped file is libx.so.0.8.6.
    if (!pattern.module.empty() && !glob(pattern.module, base) && !glob(pattern.module + ".*", base)) continue;
    // A bare "*" would otherwise mean the C library too.
    if (pattern.module.empty() && pattern.name == "*" && !pattern.exclude && !is_program) continue;
    here.push_back(pattern);
    wanted |= !pattern.exclude;
  }
  bool all = !beyond_program() && is_program;
  std::vector<uint32_t> chosen;
  if (!wanted && !all) return chosen;
  auto functions = image.functions();
  for (uint32_t i = 0; i < functions.size(); i++) {
    const Function& function = functions[i];
    if (function.cold_part || function.ifunc) continue;
    if (here.empty()) {
      chosen.push_back(i);
      continue;
    }
    std::vector<std::string> names = names_of(function);
    bool in = all;
    for (const Pattern& pattern : here)
      if (!pattern.exclude && matches(pattern, function, names)) in = true;
    for (const Pattern& pattern : here)
      if (pattern.exclude && matches(pattern, function, names)) in = false;
    if (in) chosen.push_back(i);
  }
  return chosen;
}

Error nothing_matches(const std::vector<std::string>& patterns,
                      const std::vector<std::shared_ptr<const Image>>& images) {
  std::string listed;
  for (const std::string& p : patterns) listed += (listed.empty() ? "'" : ", '") + p + "'";
  std::string message = patterns.empty() ? "the program has no function that could be probed"
                                         : fmt::format("no function matches {}", listed);
  std::set<std::pair<unsigned, std::string>> near;
  for (const std::string& text : patterns) {
    std::string wanted =
        text.substr(text.find_first_not_of('!') == std::string::npos ? 0 : text.find_first_not_of('!'));
    if (size_t colon = wanted.find(':'); colon != std::string::npos && wanted.compare(colon, 2, "::") != 0)
      wanted.erase(0, colon + 1);
    std::erase_if(wanted, [](char c) { return c == '*' || c == '?'; });
    unsigned limit = std::max<unsigned>(2, static_cast<unsigned>(wanted.size() / 2));
    for (const auto& image : images)
      for (const Function& function : image->functions())
        for (const std::string& name : names_of(function)) {
          unsigned d = distance(wanted, name, limit);
          if (d > limit) continue;
          near.insert({d, name});
          if (near.size() > 3) near.erase(std::prev(near.end()));
        }
  }
  if (!near.empty()) {
    message += "; nearest:";
    for (const auto& [d, name] : near) message += " " + name;
  }
  if (!images.empty() && images.front()->stripped())
    message += fmt::format(" ({} is stripped: only exported names are known; -f '*' means all its functions)",
                           base_name(images.front()->path()));
  return Error{message, 2};
}

}  // namespace sonde::host
