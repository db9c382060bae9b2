#include "host/image/select.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>

#include "host/image/names.h"
#include "host/image/near.h"

namespace sonde::host {
namespace {

const char* why_not_entered(const Function& f) {
  if (f.cold_part) return "is a split-off part, entered by jumps";
  if (f.label) return "is a label, not a function";
  if (f.ifunc) return "is indirect: the loader chooses one of its implementations; name that one";
  return nullptr;
}

// How to write a pattern of a library that the program opens later.
std::string where_it_is_meant(const std::string& module, const std::string& name) {
  if (module.find('/') != module.npos) return "nor is there a file that could be loaded later";
  std::error_code ignored;
  bool here = std::filesystem::exists(module, ignored), glob = module.find_first_of("*?[") != module.npos;
  return fmt::format("a library that is loaded later is named by its path: -f '{}{}:{}'", here ? "./" : "/path/to/",
                     glob && !here ? "libx.so" : module, name);
}

}  // namespace

Result<Selection::Pattern> Selection::parse_one(const std::string& text) {
  Pattern pattern;
  pattern.text = pattern.name = text;
  if (pattern.name.starts_with('!')) pattern.exclude = true, pattern.name.erase(0, 1);
  if (size_t colon = module_end(pattern.name); colon != std::string::npos) {
    pattern.module = ModuleGlob(pattern.name.substr(0, colon));
    pattern.name.erase(0, colon + 1);
    if (pattern.module.empty())
      return fail(
          fmt::format("pattern '{}' has nothing before its colon: write MODULE:GLOB, or *:GLOB for all files", text),
          2);
  }
  if (pattern.name.empty())
    return fail(fmt::format("pattern '{}' names no function: write * for all of them", text), 2);
  pattern.wildcard = pattern.name.find_first_of("*?[") != std::string::npos;
  return pattern;
}

Result<Selection> Selection::parse(const std::vector<std::string>& patterns) {
  Selection selection;
  for (const std::string& text : patterns) {
    selection.patterns_.push_back(SONDE_TRY(parse_one(text)));
    if (!selection.patterns_.back().exclude) selection.default_set_ = false;
  }
  return selection;
}

bool Selection::matches(Pattern& pattern, const Image& image, const Function& function,
                        const std::vector<CallName>& names) {
  if (names.empty())  // no symbol: meant by * and by the name that reports give it
    return pattern.name == "*" ||
           (pattern.name.find("+0x") != std::string::npos && matches_glob(pattern.name, display_name(image, function)));
  bool at = pattern.name.find('@') != std::string::npos, matched = false;
  for (auto& [name, versioned] : names) {
    if (!at && name.find('@') != std::string::npos) continue;
    if (versioned && !pattern.wildcard) {
      if (name == pattern.name)
        for (auto& alias : function.aliases)
          if (alias.starts_with(name + "@")) pattern.other_versions.insert(alias);
      continue;
    }
    if (!matches_glob(pattern.name, name)) continue;
    if (!pattern.wildcard)
      for (auto& alias : function.aliases)
        if (alias.starts_with(name + "@@")) pattern.chosen_version = alias;
    matched = true;
  }
  return matched;
}

std::vector<uint32_t> Selection::select(const Image& image, bool is_program) {
  if (is_program) program_ = &image;
  std::vector<Pattern*> here;
  bool wanted = default_set_ && is_program;
  for (Pattern& pattern : patterns_) {
    // A bare * would otherwise mean the C library where a program has no function at all.
    bool everywhere = pattern.exclude || (!pattern.in_program && pattern.name != "*");
    bool applies = pattern.module.empty() ? is_program || everywhere : pattern.module.matches(image);
    if (!applies) continue;
    pattern.module_seen = true;
    here.push_back(&pattern);
    wanted |= !pattern.exclude;
  }
  std::vector<uint32_t> chosen;
  if (!wanted) return chosen;
  auto functions = image.functions();
  for (uint32_t i = 0; i < functions.size(); i++) {
    const Function& function = functions[i];
    auto names = here.empty() ? std::vector<CallName>{} : call_names(function);
    const char* why_not = why_not_entered(function);
    bool in = default_set_, out = false;
    for (Pattern* pattern : here) {
      if (!matches(*pattern, image, function, names)) continue;
      if (pattern->exclude) {
        out = pattern->found = true;
      } else if (!why_not) {
        in = pattern->found = true;
        pattern->in_program |= is_program;
      } else if (pattern->not_entered.empty()) {
        pattern->not_entered = fmt::format("{} {}", display_name(image, function), why_not);
      }
    }
    if (in && !out && !why_not) chosen.push_back(i);
  }
  selected_ += chosen.size();
  return chosen;
}

std::vector<std::string> Selection::waiting() const {
  std::vector<std::string> texts;
  for (auto& p : patterns_)
    if (!p.exclude && !p.found) texts.push_back(p.text);
  return texts;
}

std::vector<std::string> Selection::notes() const {
  std::vector<std::string> notes;
  for (auto& p : patterns_) {
    if (!p.chosen_version.empty() && !p.other_versions.empty())
      notes.push_back(fmt::format("{} means {}; {} {} too", p.name, p.chosen_version, fmt::join(p.other_versions, ", "),
                                  p.other_versions.size() == 1 ? "exists" : "exist"));
    if (p.exclude && !p.found && p.module_seen) notes.push_back(fmt::format("{} takes nothing away", p.text));
  }
  return notes;
}

std::string Selection::why_unmatched(const Pattern& p, std::span<const std::shared_ptr<const Image>> images) const {
  std::vector<const Image*> meant;
  for (auto& image : images)
    if (p.module.empty() || p.module.matches(*image)) meant.push_back(image.get());
  if (meant.empty()) {
    std::vector<std::string> files;
    for (auto& image : images) files.push_back(base_name(image->path()));
    return fmt::format("no loaded file is called {}; {}{}", p.module.text, where_it_is_meant(p.module.text, p.name),
                       nearest_text(nearest(p.module.text, files)));
  }
  if (!p.not_entered.empty()) return p.not_entered;
  const Image* blamed = p.module.empty() && program_ ? program_ : meant.front();
  std::string text = fmt::format("no function matches '{}'{}", p.text, nearest_functions_text(p.name, blamed, meant));
  if (!p.other_versions.empty())
    text += fmt::format("; it has no default version, only {}", fmt::join(p.other_versions, ", "));
  for (auto& fact : facts_about(p.name, *blamed)) text += "; " + fact;
  return text;
}

std::optional<Error> Selection::unmatched(std::span<const std::shared_ptr<const Image>> images) const {
  std::string message;
  for (auto& p : patterns_) {
    if (p.exclude || p.found) continue;
    if (!p.module_seen && !p.module.file.empty()) continue;
    message += (message.empty() ? "" : ". ") + why_unmatched(p, images);
  }
  bool later = std::ranges::any_of(patterns_, [](auto& p) { return !p.exclude && !p.found; });
  if (message.empty() && selected_ == 0 && !later)
    message = patterns_.empty() ? "the program has no function that could be probed"
                                : "the patterns take every function away";
  if (message.empty()) return std::nullopt;
  return Error{printable(message), 2};
}

}  // namespace sonde::host
