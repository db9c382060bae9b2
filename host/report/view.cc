#include "host/report/view.h"

#include <fmt/format.h>
#include <fnmatch.h>

#include <algorithm>

#include "host/image/near.h"
#include "host/report/text.h"

namespace sonde::host {

namespace {

std::string without_parameters(const std::string& name) { return name.substr(0, name.find('(')); }

bool matches(const std::string& pattern, const std::string& name) {
  return fnmatch(pattern.c_str(), name.c_str(), 0) == 0 ||
         fnmatch(pattern.c_str(), without_parameters(name).c_str(), 0) == 0;
}

}  // namespace

Result<void> check_functions(const Recording& recording, const ViewOptions& options) {
  std::string message;
  for (const std::string& pattern : options.functions) {
    // The engine's own sites and refused functions have none.
    auto probed = [](const RecordedSite& s) { return !s.method.empty(); };
    if (std::ranges::any_of(recording.sites, [&](auto& s) { return probed(s) && matches(pattern, s.name); })) continue;
    if (!message.empty()) message += ". ";
    auto refused = std::ranges::find_if(recording.refused, [&](auto& r) { return matches(pattern, r.name); });
    if (refused != recording.refused.end()) {
      message += fmt::format("'{}' was not probed in {}: {}", pattern, recording.path, refused->reason);
      continue;
    }
    std::vector<std::string> names;
    for (const RecordedSite& s : recording.sites)
      if (probed(s)) names.push_back(without_parameters(s.name));
    message +=
        fmt::format("no function in {} matches '{}'{}", recording.path, pattern, nearest_text(nearest(pattern, names)));
  }
  if (!message.empty()) return fail(printable(message), 2);
  return {};
}

Result<void> check_thread(const Recording& recording, const ViewOptions& options) {
  constexpr size_t kNamed = 12;
  if (!options.tid) return {};
  std::string there;
  size_t n = recording.threads.size();
  for (size_t t = 0; t < n; t++) {
    if (recording.threads[t].tid == *options.tid) return {};
    if (t < kNamed) there += fmt::format("{}{}", t ? ", " : "", recording.threads[t].tid);
  }
  if (n > kNamed) there += fmt::format(" and {} more", n - kNamed);
  return fail(fmt::format("no thread {} in {}; there {}", *options.tid, printable(recording.path),
                          n == 0 ? "is none" : fmt::format("{} {}", n == 1 ? "is" : "are", there)),
              2);
}

EntryOrder::Accept accept_for(const Recording& recording, const ViewOptions& options) {
  std::vector<bool> sites(recording.sites.size(), options.functions.empty());
  for (size_t s = 0; s < recording.sites.size(); s++) {
    for (const std::string& pattern : options.functions)
      if (matches(pattern, recording.sites[s].name)) sites[s] = true;
  }
  std::vector<bool> threads(recording.threads.size(), true);
  for (size_t t = 0; t < threads.size(); t++) threads[t] = !options.tid || recording.threads[t].tid == *options.tid;
  return [sites, threads](uint32_t thread, uint32_t site) {
    return site < sites.size() && sites[site] && (thread >= threads.size() || threads[thread]);
  };
}

std::string site_name(const Recording& recording, uint32_t site, const ViewOptions& options, size_t width) {
  std::string name = site < recording.sites.size() ? recording.sites[site].name : fmt::format("site {}", site);
  if (options.full_names) return printable(name);
  return shorten(printable(name), std::max<size_t>(width, 20));
}

}  // namespace sonde::host
