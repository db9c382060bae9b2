// The agent's own unwind tables, against its own code. What stands in trampolines, entrances and the hit path is written by hand,
// and so are its tables.
#include <cstring>
#include <filesystem>

#include "core/unwind/arena.h"  // kTrampolines
#include "host/check/op.h"
#include "host/check/testing.h"

namespace sonde::host::check {
namespace {

const char* const kByHand[] = {"sonde_entry",          "sonde_entry_full",     "sonde_through",
                               "sonde_return_common",  "sonde_return_handled", "sonde_landing_pad",
                               "sonde_backtrace_stub", "sonde_handlers",       "sonde_leave_system_call",
                               "sonde_call_on_stack",  "sonde_call_handler",   "sonde_stack_here"};

const Checked* the_agent() {
  std::string path = std::filesystem::path(SONDE_BINARY_DIR) / "libsonde-agent.so";
  if (!std::filesystem::exists(path)) return nullptr;
  static Checked agent(path);
  return &agent;
}

#define AGENT_OR_SKIP(agent) \
  const Checked* agent = the_agent(); \
  if (!agent) { \
    MESSAGE("SKIPPED: the agent is not built in this preset"); \
    return; \
  }

TEST_CASE("agent: every byte of its code has a row (S9, S14)") {
  AGENT_OR_SKIP(agent);
  Table table = agent->table();
  size_t bytes = 0, bare = 0;
  for (const Section& section : agent->image->sections()) {
    if (!(section.flags & 4)) continue;  // SHF_EXECINSTR
    std::span<const uint8_t> code = agent->image->bytes(section);
    REQUIRE(code.size() == section.size);
    for (uint64_t at = 0; at < section.size; at++, bytes++) {
      if (table.lookup(section.addr + at)) continue;
      auto insn = decode(code.subspan(at), (section.addr + at).value);
      INFO(section.name, " at ", (section.addr + at).value);
      bool filler = insn && is_padding(*insn);  // between functions
      CHECK(filler);
      bare += !filler;
      if (filler) at += insn->length - 1u, bytes += insn->length - 1u;
      if (bare > 10) return;
    }
  }
  CHECK(bytes > kTrampolines * kTrampolineStride);
}

// What is entered by jumps, from detours and signal frames, the checker does not follow: see the last case for that.
TEST_CASE("agent: no row contradicts its code (S9, S14)") {
  AGENT_OR_SKIP(agent);
  const Counts& all = agent->report.counts;
  CHECK(all[static_cast<unsigned>(Verdict::wrong)] == 0);
  CHECK(all[static_cast<unsigned>(Verdict::missing)] == 0);
  for (const char* name : {"sonde_return_common", "sonde_call_handler", "sonde_stack_here", "sonde_on_return"}) {
    CAPTURE(std::string(name));
    CHECK(agent->count(name, Verdict::unreached) == 0);
    CHECK(agent->count(name, Verdict::right) + agent->count(name, Verdict::unknown) > 10);
  }
}

TEST_CASE("agent: its trampolines are all alike, under one row (S9)") {
  AGENT_OR_SKIP(agent);
  auto address = [&](const char* name) { return *agent->image->symbol(name); };
  const ImageAddr first = address("sonde_trampolines"), common = address("sonde_return_common");
  const ImageRange range{first - kTrampolineCall, first + uint64_t{kTrampolines} * kTrampolineStride};
  std::span<const uint8_t> code = agent->image->bytes(range);
  REQUIRE(code.size() == range.end - range.begin);
  const Row* row = agent->table().lookup(range.begin);
  REQUIRE(row);
  CHECK(row->ra_kind == ValueKind::is_expression);
  size_t wrong = 0, other_row = 0;
  const uint64_t targets = address("sonde_targets") - (first - kTrampolineCall);
  for (uint64_t i = 0; i < kTrampolines; i++) {
    uint64_t at = i * kTrampolineStride, begin = range.begin.value + at;
    int32_t to_target, to_common;
    std::memcpy(&to_target, &code[at + 2], 4), std::memcpy(&to_common, &code[at + kTrampolineCall + 1], 4);
    wrong += code[at] != 0xff || code[at + 1] != 0x15 ||
             begin + 6 + static_cast<uint64_t>(int64_t{to_target}) != begin + targets;
    wrong += code[at + kTrampolineCall] != 0xe9 ||
             begin + kTrampolineCall + 5 + static_cast<uint64_t>(int64_t{to_common}) != common.value;
    for (uint64_t byte = 0; byte < kTrampolineStride; byte++)
      other_row += agent->table().lookup(ImageAddr(begin + byte)) != row;
  }
  CHECK(wrong == 0);
  CHECK(other_row == 0);
}

// Frames are simple: the CFA is found by sp, and its rule changes with sp, by as much, and not otherwise; nor does it depend on
// the way by which control came.
TEST_CASE("agent: in code written by hand the frame rule follows the stack pointer (S9, S11)") {
  AGENT_OR_SKIP(agent);
  Table table = agent->table();
  size_t followed = 0, elsewhere = 0;
  for (const char* name : kByHand) {
    CAPTURE(std::string(name));
    const ImageRange range = agent->image->functions()[agent->function(name).function].range;
    std::span<const uint8_t> code = agent->image->bytes(range);
    for (uint64_t at = 0; at < code.size();) {
      auto op = decode_op(code.subspan(at), (range.begin + at).value);
      REQUIRE(op);
      CAPTURE(at);
      at += op->length;
      const Row* row = table.lookup(ImageAddr(op->pc));
      REQUIRE(row);
      CHECK(row->cfa_kind == CfaKind::reg_offset);
      if (row->cfa_reg != X86_64::rsp) {
        elsewhere++;
        continue;
      }
      State state = State::at_entry();
      state.reg[rsp] = exactly(kCfa, -row->cfa_offset);
      if (op->flow != Flow::call && op->flow != Flow::call_indirect) state.apply(*op);
      auto expect = [&](uint64_t pc) {
        const Row* next = table.lookup(ImageAddr(pc));
        if (!next || pc >= range.end.value || next->cfa_reg != X86_64::rsp) return;
        CHECK((state.reg[rsp] == exactly(kCfa, -next->cfa_offset)));
        followed++;
      };
      if (!ends_flow(op->flow)) expect(op->next());
      if ((op->flow == Flow::jump || op->flow == Flow::branch) && range.contains(ImageAddr(op->target)))
        expect(op->target);
    }
  }
  CHECK(followed > 300);
  CHECK(elsewhere < 60);  // by rbp in sonde_call_handler, by the frame it was given in sonde_leave_system_call
}

}  // namespace
}  // namespace sonde::host::check
