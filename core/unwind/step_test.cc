// Rows executed over a small memory: both instruction sets.
#include "core/unwind/step.h"

#include <doctest/doctest.h>

#include <cstring>
#include <map>
#include <vector>

namespace sonde {
namespace {

struct FakeMemory {
  std::map<uint64_t, uint64_t> words;
  bool read(Addr address, uint64_t* value) {
    auto found = words.find(address.value);
    return found != words.end() && (*value = found->second, true);
  }
};

using Bytes = std::vector<uint8_t>;

// A table that only holds expressions.
struct ExpressionTable {
  explicit ExpressionTable(std::vector<Bytes> expressions) {
    std::vector<uint32_t> starts = {0};
    std::vector<uint8_t> text;
    for (auto& e : expressions) {
      text.insert(text.end(), e.begin(), e.end());
      starts.push_back(static_cast<uint32_t>(text.size()));
    }
    auto& h = header;
    h.magic = kTableMagic, h.version = kTableVersion, h.machine = 62;
    h.expression_count = static_cast<uint32_t>(expressions.size());
    h.expression_bytes = static_cast<uint32_t>(text.size());
    auto up = [](size_t n) { return static_cast<uint32_t>((n + 7) & ~size_t{7}); };
    h.rows = h.blocks = sizeof h;
    h.expression_starts = h.blocks + sizeof(TableBlock);
    h.fine = h.change_offsets = h.change_rows = h.expressions = h.expression_starts + up(starts.size() * 4);
    h.size = h.expressions + up(text.size());
    bytes.resize(h.size / 8);
    auto* raw = reinterpret_cast<uint8_t*>(bytes.data());
    std::memcpy(raw + h.expression_starts, starts.data(), starts.size() * 4);
    if (!text.empty()) std::memcpy(raw + h.expressions, text.data(), text.size());
    std::memcpy(raw, &h, sizeof h);
    reinterpret_cast<TableHeader*>(raw)->checksum = table_checksum({raw + kChecksummedFrom, h.size - kChecksummedFrom});
  }
  Table table() const {
    auto opened = Table::open({reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size() * 8});
    REQUIRE(opened);
    return *opened;
  }
  TableHeader header{};
  std::vector<uint64_t> bytes;
};

Row x86_row(uint8_t reg, int offset) {
  Row row;
  row.cfa_reg = reg, row.cfa_offset = offset;
  row.ra_kind = ValueKind::at_cfa, row.ra_offset = -8;
  return row;
}

RegSet<X86_64> x86_regs() {
  RegSet<X86_64> regs;
  for (unsigned r = 0; r < X86_64::kRegs; r++) regs.set(r, 0x9000 + r);
  regs.set(X86_64::rip, 0x401000);
  regs.set(X86_64::rsp, 0x7000);
  regs.set(X86_64::rbp, 0x7040);
  return regs;
}

TEST_CASE("step x86-64: after push rbp; mov rsp, rbp") {
  ExpressionTable none({});
  FakeMemory memory{{{0x7048, 0x402345}, {0x7040, 0x70f0}}};
  Row row = x86_row(X86_64::rbp, 16);
  row.saved[0] = {-16, ValueKind::at_cfa};
  RegSet<X86_64> caller;
  REQUIRE(step(none.table(), row, x86_regs(), memory, 0, &caller) == StepStatus::ok);
  CHECK(caller.pc() == Addr(0x402345));
  CHECK(caller.sp() == Addr(0x7050));
  CHECK(caller.get(X86_64::rbp) == 0x70f0);
  CHECK(caller.get(X86_64::rbx) == 0x9000 + X86_64::rbx);
  CHECK(caller.has(X86_64::r15));
  CHECK(!caller.has(X86_64::rax));
  CHECK(!caller.has(X86_64::r10));
}

TEST_CASE("step x86-64: CFA in a register other than rsp and rbp, as in the lazy resolver") {
  ExpressionTable none({});
  FakeMemory memory{{{0x9000 + X86_64::rbx + 16, 0x402345}, {0x9000 + X86_64::rbx, 0xb0b}}};
  Row row = x86_row(X86_64::rbx, 24);
  row.saved[1] = {-24, ValueKind::at_cfa};
  RegSet<X86_64> caller;
  REQUIRE(step(none.table(), row, x86_regs(), memory, 0, &caller) == StepStatus::ok);
  CHECK(caller.pc() == Addr(0x402345));
  CHECK(caller.get(X86_64::rbx) == 0xb0b);
}

TEST_CASE("step x86-64: realigned stack, CFA = *(rbp - 8), and r10 before that") {
  ExpressionTable none({});
  FakeMemory memory{{{0x7038, 0x7100}, {0x70f8, 0x402345}, {0x7040, 0x7200}, {0x9000 + X86_64::r10 - 8, 0x405555}}};
  ExpressionTable table({Bytes{0x76, 0x00}});
  Row row = x86_row(X86_64::rbp, -8);
  row.cfa_kind = CfaKind::deref_reg_offset;
  row.saved[0] = {0, ValueKind::at_expression};
  RegSet<X86_64> caller;
  REQUIRE(step(table.table(), row, x86_regs(), memory, 0, &caller) == StepStatus::ok);
  CHECK(caller.sp() == Addr(0x7100));
  CHECK(caller.pc() == Addr(0x402345));
  CHECK(caller.get(X86_64::rbp) == 0x7200);
  REQUIRE(step(table.table(), x86_row(X86_64::r10, 0), x86_regs(), memory, 0, &caller) == StepStatus::ok);
  CHECK(caller.pc() == Addr(0x405555));
}

TEST_CASE("step x86-64: every kind of rule for a register") {
  ExpressionTable table({Bytes{0x23, 0x08}, Bytes{0x77, 0x08, 0x06}});
  FakeMemory memory{{{0x7000, 0x402345}, {0x7008, 0x77}, {0x7010, 0x88}}};
  Row row = x86_row(X86_64::rsp, 8);
  row.saved[0] = {-16, ValueKind::cfa_plus};
  row.saved[1] = {X86_64::rdi, ValueKind::in_register};
  row.saved[2] = {0, ValueKind::at_expression};  // *(CFA + 8)
  row.saved[3] = {1, ValueKind::is_expression};  // *(rsp + 8)
  row.saved[4] = {0, ValueKind::undefined};
  row.saved[5] = {0x100, ValueKind::at_cfa};  // not readable
  RegSet<X86_64> caller;
  REQUIRE(step(table.table(), row, x86_regs(), memory, 0, &caller) == StepStatus::ok);
  CHECK(caller.get(X86_64::rbp) == 0x6ff8);
  CHECK(caller.get(X86_64::rbx) == 0x9000 + X86_64::rdi);
  CHECK(caller.get(X86_64::r12) == 0x88);
  CHECK(caller.get(X86_64::r13) == 0x77);
  CHECK(!caller.has(X86_64::r14));
  CHECK(!caller.has(X86_64::r15));
}

TEST_CASE("step x86-64: why not") {
  ExpressionTable table({Bytes{0x06}});
  FakeMemory memory;
  RegSet<X86_64> caller, regs = x86_regs();
  Row row = x86_row(X86_64::rsp, 8);
  CHECK(step(table.table(), row, regs, memory, 0, &caller) == StepStatus::unreadable);
  regs.forget(X86_64::rsp);
  CHECK(step(table.table(), row, regs, memory, 0, &caller) == StepStatus::register_unknown);
  row.cfa_kind = CfaKind::expression, row.cfa_offset = 0;
  CHECK(step(table.table(), row, regs, memory, 0, &caller) == StepStatus::bad_expression);
  row.ra_kind = ValueKind::undefined;
  CHECK(step(table.table(), row, regs, memory, 0, &caller) == StepStatus::outermost);
  row.flags = kRowInexpressible;
  CHECK(step(table.table(), row, regs, memory, 0, &caller) == StepStatus::inexpressible);
}

TEST_CASE("step aarch64: return address in x30, on the stack, signed") {
  ExpressionTable none({});
  FakeMemory memory{{{0x7000, 0x7100}, {0x7008, 0x00ab000000402344}}};
  RegSet<Aarch64> regs, caller;
  for (unsigned r = 0; r < Aarch64::kRegs; r++) regs.set(r, 0x9000 + r);
  regs.set(Aarch64::sp, 0x7000);
  regs.set(Aarch64::x30, 0x00cd000000401238);
  constexpr uint64_t kSignature = 0x00ff000000000000;

  Row leaf;
  leaf.cfa_reg = Aarch64::sp;
  leaf.ra_kind = ValueKind::same;
  REQUIRE(step(none.table(), leaf, regs, memory, kSignature, &caller) == StepStatus::ok);
  CHECK(caller.pc() == Addr(0x00cd000000401238));  // not said to be signed: left alone
  leaf.flags = kRowRaSigned;
  REQUIRE(step(none.table(), leaf, regs, memory, kSignature, &caller) == StepStatus::ok);
  CHECK(caller.pc() == Addr(0x401238));
  CHECK(caller.sp() == Addr(0x7000));
  CHECK(caller.get(Aarch64::x19) == 0x9013);

  Row framed;
  framed.cfa_reg = Aarch64::sp, framed.cfa_offset = 32;
  framed.ra_kind = ValueKind::at_cfa, framed.ra_offset = -24;
  framed.saved[0] = {-32, ValueKind::at_cfa};
  framed.saved[1] = {-24, ValueKind::at_cfa};
  framed.flags = kRowRaSigned;
  REQUIRE(step(none.table(), framed, regs, memory, kSignature, &caller) == StepStatus::ok);
  CHECK(caller.pc() == Addr(0x402344));
  CHECK(caller.sp() == Addr(0x7020));
  CHECK(caller.get(Aarch64::x29) == 0x7100);
  CHECK(!caller.has(0));
  regs.forget(Aarch64::x30);
  CHECK(step(none.table(), leaf, regs, memory, kSignature, &caller) == StepStatus::register_unknown);
}

}  // namespace
}  // namespace sonde
