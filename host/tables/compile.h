// Sources of rows -> packed table: .eh_frame; .debug_frame for code without that; SFrame for code that neither describes.
// Code that nothing describes is a gap; what an entry says but a row cannot is marked kRowInexpressible and counted by
// reason, so that a walk stops there knowingly. The next source is never asked about code that one has an entry for.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "host/error.h"
#include "host/tables/cfi.h"
#include "host/tables/sframe.h"

namespace sonde::host {

enum class Inexpressible : uint8_t {
  malformed_program,  // the instructions of the entry contradict themselves
  unknown_operation,  // an instruction that is not known
  unknown_augmentation,  // a letter whose meaning is not known
  no_cfa,  // no rule for the CFA, or one that no row holds
  cfa_expression,  // the CFA's expression has operations or registers that are not known
  no_return_rule,  // no rule for the return address, or one that no row holds
  stack_pointer_rule,  // the caller's stack pointer is not the CFA
  overlap,  // two entries disagree about this code
  malformed_sframe,  // row entries of a function in SFrame contradict themselves
  sframe_row,  // an SFrame row without a meaning that is known
  too_many_rows,  // the dictionary is full
};
constexpr unsigned kInexpressibles = 11;
const char* describe(Inexpressible reason);

struct TableStats {
  uint64_t source_bytes = 0;  // .eh_frame and .eh_frame_hdr
  uint64_t table_bytes = 0;
  uint64_t common_entries = 0, entries = 0;  // of .eh_frame
  uint64_t debug_entries = 0;  // of .debug_frame, those that gave rows
  uint64_t sframe_entries = 0;  // of SFrame, those that gave rows
  uint64_t unusable_entries = 0;  // range unknown: left as gaps
  uint64_t empty_entries = 0;  // of length zero
  uint64_t outside_entries = 0;  // not (only) in executable code: clipped or left out
  uint64_t overlapping_entries = 0;
  uint64_t plt_stubs = 0;  // stubs whose rule by pc became rows
  uint64_t lost_registers = 0;  // changes in which a saved register has a rule that no row holds: it counts as lost
  uint64_t changes = 0, rows = 0, expressions = 0, gaps = 0;  // of the table
  uint64_t by_expression = 0;  // of its changes, to rows with an expression
  uint64_t inexpressible_changes = 0;
  std::array<uint64_t, kInexpressibles> inexpressible{};  // changes, by reason
  std::vector<std::string> refused;  // sections that are not read, and why
};

struct RowSources {
  std::vector<CfiSection> sections;  // .eh_frame
  std::vector<CfiSection> debug_frames;  // .debug_frame
  std::vector<SFrameSection> sframes;
  uint32_t machine = 0;  // EM_*
  std::vector<ImageRange> executable;  // sorted
};

struct CompiledTable {
  std::vector<uint8_t> bytes;  // Table::open accepts them
  TableStats stats;
};

Result<CompiledTable> compile_rows(const RowSources& sources);

}  // namespace sonde::host
