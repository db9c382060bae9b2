// Recordings with --sum hold a call tree per thread instead of records: what the views make of it. Of times only sums and
// extremes are known, so there are no single calls and no percentiles.
#pragma once

#include "host/report/order.h"
#include "host/report/tree.h"
#include "host/report/view.h"

namespace sonde::host {

// The counts of the first pass over records.
Survey survey_sums(const Recording& recording);
// The threads' trees as one per group, functions that the view does not want left out: their callees hang below the next
// function above that it wants.
CallTree tree_of_sums(const Recording& recording, const EntryOrder::Accept& accept, std::vector<uint32_t> group_of);

struct SummedFunction {
  uint64_t calls = 0, entries = 0;
  uint64_t total = 0, self = 0;  // ticks; total of outermost calls only
  uint64_t sum = 0, timed = 0;  // ticks of `timed` calls, recursive ones too
  uint64_t min = ~0ull, max = 0;
  std::array<uint64_t, 5> kinds{};
};
// By site.
std::vector<SummedFunction> functions_of_sums(const Recording& recording, const EntryOrder::Accept& accept);

// What did not fit into the trees, for the footer.
struct SumLimits {
  uint64_t too_deep = 0, no_node = 0;  // calls, by cause
  uint64_t within = 0, displaced = 0, unplaced = 0;  // the same by where they are counted
  uint64_t untimed = 0;  // in flight when their process was killed: without their time
};
SumLimits limits_of_sums(const Recording& recording);

}  // namespace sonde::host
