// For the fuzz targets: a table made of any bytes is accepted, covers no byte outside of the code, and each of its rows can
// be executed and printed.
#pragma once

#include <cstdlib>

#include "core/unwind/step.h"
#include "host/tables/compile.h"
#include "host/tables/print.h"

namespace sonde::fuzz {

inline constexpr ImageRange kCode[] = {{ImageAddr(0x1000), ImageAddr(0x3000)}, {ImageAddr(0x3800), ImageAddr(0x14000)}};
inline constexpr uint32_t kMachineX86_64 = 62, kMachineAarch64 = 183;

struct AnyMemory {
  bool read(Addr address, uint64_t* value) {
    return *value = address.value * 0x9e3779b97f4a7c15, address.value & 0x100;
  }
};

inline void require(bool condition) {
  if (!condition) std::abort();
}

template <class Isa>
void execute(const Table& table, const Row& row) {
  RegSet<Isa> regs, caller;
  for (unsigned r = 0; r < Isa::kRegs; r += 1 + r % 3) regs.set(r, 0x1000 + r);
  AnyMemory memory;
  if (step(table, row, regs, memory, 0, &caller) == StepStatus::ok)
    require(caller.has(Isa::kPc) && caller.has(Isa::kSp));
}

inline void compile_and_use(host::RowSources& sources) {
  sources.executable.assign(std::begin(kCode), std::end(kCode));
  auto compiled = host::compile_rows(sources);
  require(compiled.has_value());
  auto table = Table::open(compiled->bytes);
  require(table.has_value());
  for (const Row& row : table->rows()) {
    host::format_row(*table, &row);
    sources.machine == kMachineX86_64 ? execute<X86_64>(*table, row) : execute<Aarch64>(*table, row);
  }
  table->for_each([&](ImageAddr begin, ImageAddr end, const Row* row) {
    require(table->lookup(begin) == row && table->lookup(end - 1) == row);
    require(!row || (kCode[0].begin <= begin && end <= kCode[0].end) ||
            (kCode[1].begin <= begin && end <= kCode[1].end));
  });
}

}  // namespace sonde::fuzz
