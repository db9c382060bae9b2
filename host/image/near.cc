#include "host/image/near.h"

#include <fmt/format.h>

#include <algorithm>

#include "host/image/names.h"

namespace sonde::host {
namespace {

class Nearest {
 public:
  explicit Nearest(std::string wanted) : wanted_(std::move(wanted)) {
    std::erase_if(wanted_, [](char c) { return c == '*' || c == '?'; });
    if (auto at = wanted_.find('@'); at != std::string::npos) wanted_.resize(at);
  }

  void offer(const std::string& name) {
    unsigned limit = best_.size() < 3 ? 1000 : best_.back().first;
    unsigned d = rank(name, limit);
    if (d > limit) return;
    std::pair entry(d, name);
    auto at = std::ranges::lower_bound(best_, entry);
    if (at != best_.end() && *at == entry) return;
    best_.insert(at, std::move(entry));
    if (best_.size() > 3) best_.pop_back();
  }

  std::vector<std::string> names() const {
    std::vector<std::string> names;
    for (auto& [d, name] : best_) names.push_back(name);
    return names;
  }

 private:
  unsigned rank(const std::string& name, unsigned limit) const {
    unsigned d = edit_distance(wanted_, name, limit);
    if (auto at = name.rfind("::"); at != name.npos)
      d = std::min(d, 1 + edit_distance(wanted_, std::string_view(name).substr(at + 2), limit));
    if (wanted_.size() >= 4 && name.size() > wanted_.size() && name.find(wanted_) != name.npos)
      d = std::min(d, 2 + static_cast<unsigned>(name.size() - wanted_.size()) / 8);
    return d;
  }

  std::string wanted_;
  std::vector<std::pair<unsigned, std::string>> best_;  // sorted
};

}  // namespace

std::vector<std::string> nearest(const std::string& wanted, const std::vector<std::string>& candidates) {
  Nearest nearest(wanted);
  for (auto& candidate : candidates) nearest.offer(candidate);
  return nearest.names();
}

std::vector<std::string> nearest_functions(const std::string& wanted, std::span<const Image* const> images) {
  Nearest nearest(wanted);
  for (const Image* image : images)
    for (const Function& f : image->functions()) {
      if (f.cold_part || f.label || f.ifunc) continue;
      for (auto& [name, versioned] : call_names(f)) {
        bool mangled = name.starts_with("_Z") || name.starts_with("_R");
        if (!mangled && name.find_first_of("@(") == name.npos) nearest.offer(name);
      }
    }
  return nearest.names();
}

std::string nearest_text(const std::vector<std::string>& names) {
  return names.empty() ? "" : fmt::format("; nearest: {}", fmt::join(names, ", "));
}

std::string nearest_functions_text(const std::string& wanted, const Image* first,
                                   std::span<const Image* const> images) {
  auto own = nearest_functions(wanted, {&first, 1}), others = nearest_functions(wanted, images);
  if (own.empty()) return nearest_text(others);
  std::erase_if(others, [&](auto& name) { return std::ranges::find(own, name) != own.end(); });
  return nearest_text(own) + (others.empty() ? "" : fmt::format("; in libraries: {}", fmt::join(others, ", ")));
}

std::vector<std::string> facts_about(const std::string& wanted, const Image& image) {
  std::vector<std::string> facts;
  std::string base = base_name(image.path());
  if (auto addr = image.symbol(wanted)) {
    auto hit = image.find(*addr);
    if (hit && hit->offset)
      facts.push_back(fmt::format("{} is a place inside {}", wanted, display_name(image, *hit->function)));
    else if (!hit) facts.push_back(fmt::format("{} is a variable", wanted));
  }
  if (image.has_inlined(wanted)) facts.push_back(fmt::format("in {} it exists only inlined into its callers", base));
  if (image.stripped())
    facts.push_back(
        fmt::format("{} is stripped: only its exported names are known, '*' means all its functions", base));
  if (image.is_static())
    facts.push_back(fmt::format("{} is statically linked: there are no libraries to look in", base));
  return facts;
}

}  // namespace sonde::host
