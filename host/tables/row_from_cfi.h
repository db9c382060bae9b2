// The state of call frame instructions at one place -> a row of the table, or the reason why no row says the same.
#pragma once

#include <optional>

#include "host/tables/builder.h"
#include "host/tables/cfi_program.h"
#include "host/tables/compile.h"

namespace sonde::host {

// The linker's rule for a procedure linkage table: CFA = reg + offset, and 8 more in the part of each 16-byte stub that
// starts at `threshold`, where the stub has pushed.
struct PltRule {
  uint8_t reg;
  int64_t offset;
  unsigned threshold;
};

struct RowResult {
  std::optional<Inexpressible> reason;  // then nothing else has a meaning
  Row row;
  std::optional<PltRule> plt;  // row's CFA is to be replaced in each half of each stub
  bool lost_register = false;
};

// Where the source gives the caller's stack pointer a rule of its own (longjmp's and setcontext's last instructions), the
// row's CFA is that stack pointer, and whatever the source relates to its CFA becomes an expression.
class RowMaker {
 public:
  RowMaker(const CfiSection& section, uint32_t machine, TableBuilder& builder);
  RowResult make(const FrameState& state, const Slots& slots, const Cie& cie);

 private:
  using Code = std::vector<uint8_t>;  // of an expression
  struct Value {
    ValueKind kind;
    int32_t offset = 0;
  };
  bool set_cfa(const CfaRule& cfa, RowResult* result);
  bool set_cfa_expression(std::span<const uint8_t> expression, RowResult* result);
  bool set_cfa_from_stack_pointer(const FrameState& state, RowResult* result);
  bool set_return(const FrameState& state, const Slots& slots, const Cie& cie, Row* row);
  bool stack_pointer_is_cfa(const FrameState& state) const;
  Code cfa_plus(const CfaRule& cfa, int64_t offset) const;
  // Without value: no row holds it. Offsets of values lie within `limit`, beyond it an expression does the addition.
  std::optional<Value> value_of(const RegisterRule& rule, unsigned self, int64_t limit);
  std::optional<Value> by_expression(bool load, const Code& code);
  std::span<const uint8_t> bytes(Block block) const { return section_.bytes.subspan(block.begin, block.size); }

  const CfiSection& section_;
  uint32_t machine_;
  TableBuilder& builder_;
  unsigned regs_, stack_pointer_, default_return_;
  std::span<const uint8_t> saved_;
  const CfaRule* moved_ = nullptr;  // the source's CFA, where the row's is another one
};

}  // namespace sonde::host
