#include "host/report/view.h"

#include <fmt/format.h>
#include <fnmatch.h>

#include <algorithm>

#include "host/report/text.h"

namespace sonde::host {

EntryOrder::Accept accept_for(const Recording& recording, const ViewOptions& options) {
  std::vector<bool> sites(recording.sites.size(), options.functions.empty());
  for (size_t s = 0; s < recording.sites.size(); s++) {
    const std::string& name = recording.sites[s].name;
    std::string plain = name.substr(0, name.find('('));
    for (const std::string& pattern : options.functions)
      if (fnmatch(pattern.c_str(), name.c_str(), 0) == 0 || fnmatch(pattern.c_str(), plain.c_str(), 0) == 0)
        sites[s] = true;
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
