#include "core/probe/stack_capture.h"

#include "core/native/local.h"
#include "core/probe/entries.h"
#include "core/probe/safe_read.h"
#include "core/walk/arena_view.h"
#include "core/walk/usual_steps.h"
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
  unsigned pages = 1;  // sp's own: the program has just used it, or it is asked for
  while (pages < kProbedPages && found[pages]) pages++;
  to_its_end = found[0] && pages < kProbedPages;
  return {Addr(first), Addr(first + pages * kPage)};
}

AddrRange keep_stack(ThreadScratch* scratch, AddrRange fresh, bool to_its_end) {
  for (unsigned i = 0; i < 3; i++) {
    AddrRange& range = scratch->stacks[i];
    if (!range.overlaps({fresh.begin, fresh.end + 1})) continue;
    range = {range.begin < fresh.begin ? range.begin : fresh.begin, fresh.end < range.end ? range.end : fresh.end};
    scratch->to_its_end[i] = to_its_end && range.end == fresh.end;
    return range;
  }
  unsigned oldest = scratch->next_stack++ % 3;
  scratch->stacks[oldest] = fresh;
  scratch->to_its_end[oldest] = to_its_end;
  return fresh;
}

// The scratch's range that holds sp and, if it can be had, a good deal above it.
AddrRange known_stack(ThreadScratch* scratch, uint64_t sp) {
  for (unsigned i = 0; i < 3; i++) {
    const AddrRange& range = scratch->stacks[i];
    if (range.contains(Addr(sp)) && (range.end.value - sp >= 2 * kPage || scratch->to_its_end[i])) return range;
  }
  bool to_its_end;
  AddrRange fresh = mapped_above(sp, to_its_end);
  return keep_stack(scratch, fresh, to_its_end);
}

// A stack on which the thread was interrupted, and where it may never have been hit. False where sp is in no mapped page, as
// after an overflow.
bool learn_stack(ThreadScratch* scratch, uint64_t sp) {
  uint64_t word;
  if (!sp || safe_read(sp & kPageMask, &word, sizeof word) != sizeof word) return false;
  known_stack(scratch, sp);
  return true;
}

RowCache* rows_of(const TableArena* arena) { return reinterpret_cast<RowCache*>(arena->row_cache); }

// All that a hit keeps of a stack, if its frames are usual ones that are remembered; 0 otherwise.
unsigned walk_usual(const TableArena* arena, const RowCache& rows, AddrRange stack, const SiteRegs& regs,
                    uint64_t* out) {
  auto load = [](uint64_t address, uint64_t* value) { return *value = RawMemory::load(Addr(address)), true; };
  bool own_entries = arena->entries == reinterpret_cast<uint64_t>(sonde_entries);
  UsualState state{regs.pc, regs.sp, regs.rbp, packed_kind(Source::regs_pc, 0, false), stack};
  uint64_t* end = usual_steps<X86_64>(arena, rows, load, own_entries, &state, out, out + kHitFrames);
  bool full = end == out + kHitFrames && !state.ended;
  if (!(state.ended || full)) return 0;
  if (full) end[-1] |= pack_frame({.pc = Addr(), .cfa = Addr(), .reason = Reason::buffer_full});  // it was reliable
  return static_cast<unsigned>(end - out);
}

RawMemory own_memory(const ThreadScratch* scratch, AddrRange stack) {
  RawMemory memory;
  memory.stacks[memory.stack_count++] = stack;
  for (const AddrRange& range : scratch->stacks)
    if (range.begin && range != stack && memory.stack_count < RawMemory::kMaxStacks)  // a handler may have added one
      memory.stacks[memory.stack_count++] = range;
  memory.entries = {Addr(reinterpret_cast<uint64_t>(sonde_entries)),
                    Addr(reinterpret_cast<uint64_t>(sonde_entries + kTrampolines))};
  memory.other = read_elsewhere;
  return memory;
}

WalkStart<X86_64> start_of(const SiteRegs& regs) {
  WalkStart<X86_64> start;
  start.regs.set(X86_64::rip, regs.pc);
  start.regs.set(X86_64::rsp, regs.sp);
  start.regs.set(X86_64::rbp, regs.rbp);
  start.regs.set(X86_64::rbx, regs.rbx);
  start.regs.set(X86_64::r12, regs.r12);
  start.regs.set(X86_64::r13, regs.r13);
  start.regs.set(X86_64::r14, regs.r14);
  start.regs.set(X86_64::r15, regs.r15);
  return start;
}

[[gnu::noinline]] WalkResult walk_once(const TableArena* arena, ThreadScratch* scratch, AddrRange stack,
                                       const WalkStart<X86_64>& start, std::span<Frame> out) {
  RawMemory memory = own_memory(scratch, stack);
  return walk(arena, rows_of(arena), memory, start, out);
}

// Again for each stack that a signal was delivered on and that was not known; the alternate one and those of handlers on it.
[[gnu::noinline]] unsigned walk_any(const TableArena* arena, ThreadScratch* scratch, AddrRange stack,
                                    const WalkStart<X86_64>& start, std::span<Frame> out) {
  WalkResult result = walk_once(arena, scratch, stack, start, out);
  for (unsigned i = 1; i < RawMemory::kMaxStacks && result.unknown_stack.value; i++) {
    if (!learn_stack(scratch, result.unknown_stack.value)) break;
    result = walk_once(arena, scratch, stack, start, out);
  }
  return result.frames;
}

}  // namespace

unsigned stack_from(ThreadScratch* scratch, const SiteRegs& regs, bool pc_is_return, std::span<Frame> out) {
  const TableArena* arena = current_arena(sonde_agent_control.tables);
  if (!arena) return 0;
  WalkStart<X86_64> start = start_of(regs);
  start.source = Source::caller, start.pc_is_return = pc_is_return;
  return walk_any(arena, scratch, known_stack(scratch, regs.sp), start, out);
}

namespace {

constexpr uint64_t kLevelMask = 0xff, kNoLevel = 0xff;

}  // namespace

WalkHold::WalkHold(ThreadScratch* scratch, unsigned level) {
  for (unsigned i = 0; i < kWalkPlaces && !place_; i++) {
    WalkPlace* place = &scratch->walks[(level + i) % kWalkPlaces];
    uint64_t free = 0;
    if (local_compare_exchange(&place->holder, &free, ticket() | (level + 1))) place_ = place;
  }
}

void give_up_walk(ThreadScratch* scratch, unsigned level, bool gone) {
  for (WalkPlace& place : scratch->walks) {
    uint64_t holder = __atomic_load_n(&place.holder, __ATOMIC_RELAXED);
    if ((holder & kLevelMask) == level + 1)
      local_compare_exchange(&place.holder, &holder, gone ? 0 : holder | kNoLevel);
  }
}

std::span<const uint64_t> site_alone(WalkPlace* place, const SiteRegs& regs) {
  place->packed[0] =
      pack_frame({.pc = Addr(regs.pc), .cfa = Addr(), .source = Source::regs_pc, .reason = Reason::stack_out_of_range});
  return {place->packed, 1};
}

std::span<const uint64_t> capture_stack(ThreadScratch* scratch, WalkPlace* place, const SiteRegs& regs) {
  const TableArena* arena = current_arena(sonde_agent_control.tables);
  if (!arena) return {};
  AddrRange stack = known_stack(scratch, regs.sp);
  const RowCache* rows = rows_of(arena);
  unsigned count = rows ? walk_usual(arena, *rows, stack, regs, place->packed) : 0;
  if (!count) {
    count = walk_any(arena, scratch, stack, start_of(regs), place->frames);
    for (unsigned i = 0; i < count; i++) {
      uint64_t word = pack_frame(place->frames[i]);  // which no later frame's place begins in front of
      place->packed[i] = word;
    }
  }
  return {place->packed, count};
}

}  // namespace sonde
