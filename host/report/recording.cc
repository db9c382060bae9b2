#include "host/report/recording.h"

namespace sonde::host {

Result<void> MemorySource::each(const RecordSink& sink) {
  for (uint32_t thread = 0; thread < threads_.size(); ++thread) {
    std::span<const uint64_t> rest = threads_[thread];
    while (!rest.empty()) {
      uint32_t words = record_words(rest[0]);
      if (words == 0 || words > rest.size()) return fail("a record in memory has no valid length");
      sink(thread, rest.first(words));
      rest = rest.subspan(words);
    }
  }
  return {};
}

const char* describe(LossCause cause) {
  switch (cause) {
    case LossCause::nesting: return "nested too deep in signal handlers";
    case LossCause::no_return_entry: return "return not hooked, all trampolines in use";
    case LossCause::ring_full: return "ring full";
    case LossCause::no_ring: return "no ring for the thread";
    case LossCause::abandoned: return "left behind by a longjmp out of a signal handler";
    case LossCause::no_stack: return "too little room on a small stack";
    case LossCause::stack_left_out: return "stacks not taken (their calls are here)";
    case LossCause::count: break;
  }
  return "?";
}

}  // namespace sonde::host
