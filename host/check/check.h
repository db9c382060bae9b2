// The checker: executes every function of an image abstractly and compares each instruction with the row of the unwind
// table that is in force there. A row is called wrong only where execution proves the contrary of what it says; where the
// execution cannot be followed the answer is unknown.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "core/unwind/table.h"
#include "host/check/judge.h"
#include "host/image/image.h"

namespace sonde::host::check {

struct Finding {
  ImageAddr pc;
  Verdict verdict;  // wrong, missing or unknown
  uint8_t length;  // of the instruction
  uint8_t wrong;  // what of the row: see judge.h
  bool elsewhere;  // the row describes another context than the caller's, as longjmp's do
  std::string insn;
  std::string row, truth;  // both answers
};

using Counts = std::array<uint64_t, kVerdicts>;  // instructions, by verdict

struct FunctionReport {
  uint32_t function;  // of Image::functions()
  Counts counts{};
  uint8_t clobbered = 0;  // saved[i] that it gives back changed at every exit, by a convention of its own
  std::vector<Finding> findings;
};

struct Judged {
  uint64_t pc;
  Verdict verdict;
};

struct Report {
  std::vector<FunctionReport> functions;  // in order of address; all whose code is there
  Counts counts{};
  std::vector<Judged> judged;  // every instruction, sorted
  Verdict at(ImageAddr pc) const;  // `unreached` also where no instruction begins
  std::vector<ImageRange> refuted() const;  // the instructions whose rows are wrong, sorted
};

// x86-64 only; an error says so of others.
Result<Report> check_image(const Image& image, const Table& table);

// "cfa, rbx": what of a row is wrong.
std::string describe_wrong(uint8_t wrong);

}  // namespace sonde::host::check
