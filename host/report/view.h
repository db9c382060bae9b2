// The views of `sonde report`. Each reads the recording once or twice in a stream, prints to `out`, and ends with the
// footer (footer.h).
#pragma once

#include <cstdio>
#include <optional>
#include <string>
#include <vector>

#include "host/report/order.h"
#include "host/report/recording.h"

namespace sonde::host {

struct ViewOptions {
  std::vector<std::string> functions;  // globs of names; others are left out of the view
  std::optional<uint32_t> tid;
  bool per_thread = false;
  bool full_names = false;
  bool json = false, colour = false, counts = false;
  unsigned width = 120;
  unsigned depth = 0;      // tree: levels shown; 0: all
  size_t limit = 0;        // rows; 0: all
  double min_time_ns = 0;  // shorter calls and branches are left out
  std::string sort = "total";
};

Result<void> print_tree(const Recording& recording, const ViewOptions& options, std::FILE* out);
Result<void> print_stats(const Recording& recording, const ViewOptions& options, std::FILE* out);
Result<void> print_calls(const Recording& recording, const ViewOptions& options, std::FILE* out);
Result<void> print_folded(const Recording& recording, const ViewOptions& options, std::FILE* out);

// A function pattern that is no probed function's, a thread that there was not: a mistake; the error (exit status 2) names
// what is near, or there.
Result<void> check_functions(const Recording& recording, const ViewOptions& options);
Result<void> check_thread(const Recording& recording, const ViewOptions& options);
// Which records a view wants.
EntryOrder::Accept accept_for(const Recording& recording, const ViewOptions& options);
// A site's name as a view shows it, at most `width` columns.
std::string site_name(const Recording& recording, uint32_t site, const ViewOptions& options, size_t width);

}  // namespace sonde::host
