#include "core/walk/reason.h"

namespace sonde {

const char* describe(Reason reason) {
  switch (reason) {
    case Reason::reliable: return "reliable";
    case Reason::end: return "end";
    case Reason::unknown_code: return "unknown-code";
    case Reason::special_code: return "special-code";
    case Reason::boundary_next: return "boundary-next";
    case Reason::no_table_row: return "no-table-row";
    case Reason::fp_mismatch: return "fp-mismatch";
    case Reason::ra_not_after_call: return "ra-not-after-call";
    case Reason::recovery_failed: return "recovery-failed";
    case Reason::stack_out_of_range: return "stack-out-of-range";
    case Reason::non_progress: return "non-progress";
    case Reason::depth_limit: return "depth-limit";
    case Reason::buffer_full: return "buffer-full";
    case Reason::foreign_stack: return "foreign-stack";
    case Reason::null_pc: return "null-pc";
    case Reason::row_refuted: return "row-refuted";
  }
  return "?";
}

}  // namespace sonde
