// A row of the table against what execution says at the same place.
#pragma once

#include <string>

#include "core/unwind/table.h"
#include "host/check/state.h"

namespace sonde::host::check {

enum class Verdict : uint8_t {
  unreached,  // no path that is understood leads there
  right,      // everything the row says is so
  unknown,    // nothing it says is refuted, not everything is proven
  missing,    // no row, or one that says nothing
  wrong,      // something it says is not so, on every path
};
constexpr unsigned kVerdicts = 5;
const char* describe(Verdict verdict);

// What a row says wrongly: bit i for saved[i], and these.
enum : uint8_t { kWrongCfa = 1 << 6, kWrongReturn = 1 << 7 };

struct Judgement {
  Verdict verdict = Verdict::unreached;
  uint8_t wrong = 0;
};

Judgement judge(const Table& table, const Row* row, const State& state);

// Register of machine code by its DWARF number; kNone for others.
uint8_t machine_register(unsigned dwarf);

// Where execution says CFA, return address and saved registers are, as rows are printed; "?" for what it does not know.
std::string format_truth(const State& state);

}  // namespace sonde::host::check
