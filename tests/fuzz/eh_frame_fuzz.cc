// Any bytes as an .eh_frame section: the table made of them is accepted, covers no byte outside of the code, and each of
// its rows can be executed. The first byte chooses the machine and the section's place.
#include <cstdlib>

#include "core/unwind/step.h"
#include "host/tables/eh_frame.h"
#include "host/tables/print.h"

namespace {

using namespace sonde;

struct AnyMemory {
  bool read(Addr address, uint64_t* value) { return *value = address.value * 0x9e3779b97f4a7c15, address.value & 0x100; }
};

void require(bool condition) {
  if (!condition) std::abort();
}

template <class Isa>
void execute(const Table& table, const Row& row) {
  RegSet<Isa> regs, caller;
  for (unsigned r = 0; r < Isa::kRegs; r += 1 + r % 3) regs.set(r, 0x1000 + r);
  AnyMemory memory;
  if (step(table, row, regs, memory, 0, &caller) == StepStatus::ok) require(caller.has(Isa::kPc) && caller.has(Isa::kSp));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  constexpr ImageRange kCode[] = {{ImageAddr(0x1000), ImageAddr(0x3000)}, {ImageAddr(0x3800), ImageAddr(0x14000)}};
  host::EhFrameSource source;
  source.machine = data[0] & 1 ? 183 : 62;
  source.executable.assign(std::begin(kCode), std::end(kCode));
  source.sections.push_back({{data + 1, size - 1}, ImageAddr(data[0] & 2 ? 0x16000 : 0), ImageAddr(0x1000), ImageAddr(0x15000)});
  auto compiled = host::compile_eh_frame(source);
  require(compiled.has_value());
  auto table = Table::open(compiled->bytes);
  require(table.has_value());
  for (const Row& row : table->rows()) {
    host::format_row(*table, &row);
    source.machine == 62 ? execute<X86_64>(*table, row) : execute<Aarch64>(*table, row);
  }
  table->for_each([&](ImageAddr begin, ImageAddr end, const Row* row) {
    require(table->lookup(begin) == row && table->lookup(end - 1) == row);
    require(!row || (kCode[0].begin <= begin && end <= kCode[0].end) || (kCode[1].begin <= begin && end <= kCode[1].end));
  });
  return 0;
}
