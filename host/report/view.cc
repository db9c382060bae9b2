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
    if (std::ranges::any_of(recording.sites, [&](const RecordedSite& s) { return matches(pattern, s.name); })) continue;
    std::vector<std::string> names;
    for (const RecordedSite& s : recording.sites) names.push_back(without_parameters(s.name));
    message += fmt::format("{}no function in {} matches '{}'{}", message.empty() ? "" : ". ", recording.path, pattern,
                           nearest_text(nearest(pattern, names)));
  }
  if (!message.empty()) return fail(printable(message), 2);
  return {};
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
