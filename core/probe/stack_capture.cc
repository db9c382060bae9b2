#include "core/probe/stack_capture.h"

#include "core/probe/entries.h"
#include "core/probe/safe_read.h"
#include "core/walk/walker.h"

namespace sonde {
namespace {

constexpr uint64_t kPageMask = ~(kPage - 1);
constexpr unsigned kProbedPages = kMaxSafeWords;  // a walk further up looks again

bool read_elsewhere(Addr address, uint64_t* value) {
  return safe_read(address.value, value, sizeof *value) == sizeof *value;
}

// [page of sp, first page above that is not mapped), as far as one look goes.
AddrRange mapped_above(uint64_t sp, bool& to_its_end) {
  uint64_t first = sp & kPageMask, addresses[kProbedPages], words[kProbedPages];
  bool found[kProbedPages];
  for (unsigned i = 0; i < kProbedPages; i++) addresses[i] = first + i * kPage;
  safe_read_words(addresses, words, found, kProbedPages);
  unsigned pages = 1;  // sp's own: the program has just used it
  while (pages < kProbedPages && found[pages]) pages++;
  to_its_end = found[0] && pages < kProbedPages;
  return {Addr(first), Addr(first + pages * kPage)};
}

// The scratch's ranges, with one that holds sp and, if it can be had, a good deal above it.
void know_stack(ThreadScratch* scratch, uint64_t sp) {
  for (unsigned i = 0; i < 3; i++) {
    const AddrRange& range = scratch->stacks[i];
    if (range.contains(Addr(sp)) && (range.end.value - sp >= 2 * kPage || scratch->to_its_end[i])) return;
  }
  bool to_its_end;
  AddrRange fresh = mapped_above(sp, to_its_end);
  for (unsigned i = 0; i < 3; i++) {
    AddrRange& range = scratch->stacks[i];
    if (!range.overlaps({fresh.begin, fresh.end + 1})) continue;
    range = {range.begin < fresh.begin ? range.begin : fresh.begin, fresh.end < range.end ? range.end : fresh.end};
    scratch->to_its_end[i] = to_its_end && range.end == fresh.end;
    return;
  }
  unsigned oldest = scratch->next_stack++ % 3;
  scratch->stacks[oldest] = fresh;
  scratch->to_its_end[oldest] = to_its_end;
}

}  // namespace

std::span<const Frame> site_alone(ThreadScratch* scratch, unsigned level, const SiteRegs& regs) {
  Frame& frame = scratch->frames[level][0];
  frame = {};
  frame.pc = Addr(regs.pc);
  frame.source = Source::regs_pc;
  frame.reason = Reason::stack_out_of_range;
  return {&frame, 1};
}

std::span<const Frame> capture_stack(ThreadScratch* scratch, unsigned level, const SiteRegs& regs) {
  const TableArena* arena = __atomic_load_n(&sonde_agent_control.tables, __ATOMIC_ACQUIRE);
  if (!arena) return {};
  know_stack(scratch, regs.sp);
  RawMemory memory;
  for (const AddrRange& range : scratch->stacks)
    if (range.begin) memory.stacks[memory.stack_count++] = range;
  memory.entries = {Addr(reinterpret_cast<uint64_t>(sonde_entries)),
                    Addr(reinterpret_cast<uint64_t>(sonde_entries + kTrampolines))};
  memory.other = read_elsewhere;
  WalkStart<X86_64> start;
  start.regs.set(X86_64::rip, regs.pc);
  start.regs.set(X86_64::rsp, regs.sp);
  start.regs.set(X86_64::rbp, regs.rbp);
  start.regs.set(X86_64::rbx, regs.rbx);
  start.regs.set(X86_64::r12, regs.r12);
  start.regs.set(X86_64::r13, regs.r13);
  start.regs.set(X86_64::r14, regs.r14);
  start.regs.set(X86_64::r15, regs.r15);
  WalkResult result = walk(arena, &scratch->rows, memory, start, std::span(scratch->frames[level]));
  return std::span(scratch->frames[level]).first(result.frames);
}

}  // namespace sonde
