#include "host/image/names.h"

#include <fnmatch.h>

#include <algorithm>
#include <array>
#include <filesystem>

#include "host/image/symbols.h"

namespace sonde::host {
namespace {

bool digits(std::string_view text) { return text.find_first_not_of("0123456789") == text.npos; }

// Length of the template argument list that begins at text[0] == '<', operators < and << left aside.
size_t skip_template(std::string_view text) {
  int angle = 0, round = 0;
  for (size_t i = 0; i < text.size(); i++) {
    if (text[i] == '(') round++;
    else if (text[i] == ')') round--;
    else if (text[i] == '<' && round == 0) angle++;
    else if (text[i] == '>' && round == 0 && (i == 0 || text[i - 1] != '-') && --angle == 0) return i + 1;
  }
  return text.size();
}

}  // namespace

std::string base_name(std::string_view path) { return std::string(path.substr(path.rfind('/') + 1)); }

std::string without_parameters(std::string_view name) {
  constexpr std::string_view kOperator = "operator", kAbiTag = "[abi:";
  std::string out;
  auto keep = [&](size_t n) { out += name.substr(0, n), name.remove_prefix(std::min(n, name.size())); };
  while (!name.empty()) {
    if (name.starts_with(kOperator) && (out.empty() || out.back() == ':' || out.back() == ' ')) {
      keep(kOperator.size());
      if (name.starts_with("()")) keep(2);
      else keep(std::min(name.find_first_not_of("<>=-+!~*/%^&|,[]"), name.size()));
    } else if (name.starts_with(kAbiTag) && name.find(']') != name.npos) {
      name.remove_prefix(name.find(']') + 1);
    } else if (name[0] == '<') {
      keep(skip_template(name));
    } else if (name.starts_with("(anonymous namespace)")) {
      keep(21);
    } else if (name[0] == '(' && !out.empty()) {
      break;
    } else {
      keep(1);
    }
  }
  return out;
}

std::string_view without_clone_suffix(std::string_view raw) {
  constexpr std::array<std::string_view, 8> kSuffixes = {"constprop", "isra",       "part",  "lto_priv",
                                                         "llvm",      "localalias", "clone", "__uniq"};
  while (true) {
    size_t end = raw.size(), dot = raw.rfind('.');
    if (dot != raw.npos && dot > 0 && dot + 1 < end && digits(raw.substr(dot + 1)))
      end = dot, dot = raw.rfind('.', dot - 1);
    if (dot == raw.npos || dot == 0 || dot >= end) return raw;
    if (std::ranges::find(kSuffixes, raw.substr(dot + 1, end - dot - 1)) == kSuffixes.end()) return raw;
    raw = raw.substr(0, dot);
  }
}

size_t module_end(std::string_view text) {
  int brackets = 0;
  for (size_t i = 0; i < text.size(); i++) {
    if (text[i] == '[') brackets++;
    else if (text[i] == ']' && brackets > 0) brackets--;
    else if (text[i] == ':' && brackets == 0) {
      if (i + 1 >= text.size() || text[i + 1] != ':') return i;
      i++;
    }
  }
  return text.npos;
}

ModuleGlob::ModuleGlob(std::string written) : text(std::move(written)) {
  std::error_code ignored;
  if (text.find('/') != text.npos) file = std::filesystem::canonical(text, ignored).string();
}

bool ModuleGlob::matches(const Image& image) const {
  if (text.find('/') != text.npos) return file == image.path() || matches_glob(text, image.path());
  std::string base = base_name(image.path());
  return matches_glob(text, base) || matches_glob(text + ".*", base) || matches_glob(text, std::string(image.soname()));
}

bool matches_glob(const std::string& glob, const std::string& name) {
  return glob == name || fnmatch(glob.c_str(), name.c_str(), FNM_NOESCAPE) == 0;
}

std::vector<CallName> call_names(const Function& function) {
  std::vector<CallName> names;
  auto add = [&](std::string name, bool versioned) {
    auto known = std::ranges::find(names, name, &CallName::name);
    if (known == names.end()) names.push_back({std::move(name), versioned});
    else known->versioned &= versioned;
  };
  auto add_plain = [&](std::string_view raw, bool versioned) {
    std::string parent(without_clone_suffix(raw));
    add(std::string(raw), versioned);
    add(parent, versioned);
    if (!raw.starts_with("_Z") && !raw.starts_with("_R")) return;
    std::string readable = demangle(parent);
    add(without_parameters(readable), versioned);
    add(std::move(readable), versioned);
  };
  bool plain_seen = false;
  for (const std::string& alias : function.aliases) {
    auto [name, version, is_default] = split_version(alias);
    bool hidden = !version.empty() && !is_default;
    plain_seen |= name == function.name;
    add_plain(name, hidden);
    if (!version.empty()) add(alias, false);
  }
  if (!function.name.empty() && !plain_seen) add_plain(function.name, false);
  return names;
}

unsigned edit_distance(std::string_view a, std::string_view b, unsigned limit) {
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
  return std::min(row[a.size()], limit + 1);
}

}  // namespace sonde::host
