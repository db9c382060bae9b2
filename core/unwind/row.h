// One unwind rule, the same for every source of rows (.eh_frame, .debug_frame, SFrame, ORC): at this pc, where is the
// caller's frame. A file has only a few hundred distinct rows; a table (table.h) is a dictionary of them.
//
//   CFA      = register + offset | *(register + offset) | expression
//   RA       = *(CFA + offset) | register | expression (its value, or the address that holds it) | undefined: outermost
//   saved[i] = caller's Isa::kSaved[i]: unchanged | *(CFA + offset) | CFA + offset | register | expression | unknown
//
#pragma once

#include <cstdint>

#include "core/base/addr.h"
#include "core/isa/regset.h"

namespace sonde {

enum class CfaKind : uint8_t { reg_offset, deref_reg_offset, expression };
enum class ValueKind : uint8_t {
  same,  // unchanged (for RA on AArch64: still in x30)
  at_cfa,  // *(CFA + offset)
  cfa_plus,  // CFA + offset
  in_register,  // register number = offset
  at_expression,  // *(expression number offset)
  is_expression,  // expression number offset
  undefined,  // RA: this is the outermost frame; others: lost
};

enum RowFlags : uint8_t {
  kRowSignalFrame = 1,  // the caller's pc is exact (interrupted), not a return address
  kRowRaSigned = 2,  // AArch64: RA carries a pointer-authentication code
  kRowRefuted = 4,  // sonde check proved this row wrong: never use it for a reliable walk
  kRowInexpressible = 8,  // the source said something a row cannot: walk must stop here, reason no_table_row
};

struct SavedReg {
  int16_t offset = 0;  // bytes; or register / expression number
  ValueKind kind = ValueKind::same;
  uint8_t reserved = 0;
  bool operator==(const SavedReg&) const = default;
};

constexpr unsigned kMaxSavedRegs = 12;

struct Row {
  int32_t cfa_offset = 0;  // bytes; expression number for CfaKind::expression
  uint8_t cfa_reg = 0;  // DWARF number
  CfaKind cfa_kind = CfaKind::reg_offset;
  uint8_t flags = 0;  // RowFlags
  ValueKind ra_kind = ValueKind::undefined;
  int32_t ra_offset = 0;
  SavedReg saved[kMaxSavedRegs] = {};  // by position in Isa::kSaved
  bool operator==(const Row&) const = default;
};
static_assert(sizeof(Row) == 60);

}  // namespace sonde
