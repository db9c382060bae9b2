// The steps that nearly every walk consists of: pcs that the cache knows, with usual rows (row_cache.h). No verdicts are
// found here. In front of the first frame that is anything else the loop ends, and the long way of walker.cc goes on from
// there; so every check that it makes is made here as well, and none needs a reason. Signal-safe.
//
// What one step waits for is pc -> word of the cache -> CFA -> return address; all else is beside that chain.
#pragma once

#include "core/isa/code.h"
#include "core/walk/frame.h"
#include "core/walk/recover.h"
#include "core/walk/row_cache.h"

namespace sonde {

// Where a walk stands: at a frame that is not shown yet.
struct UsualState {
  uint64_t pc, sp, fp;
  uint64_t kind;  // of that frame: packed, without its pc
  AddrRange stack;  // holds sp
  bool unknown = false;  // the cache knows nothing of pc
  bool ended = false;  // the frame shown last is the outermost; nothing else means anything then
};

constexpr uint64_t packed_kind(Source source, uint8_t recovered, bool is_return) {
  return pack_frame({.pc = Addr(), .cfa = Addr(), .source = source, .recovered = recovered, .is_return = is_return});
}

// A frame as a walk shows it to whom wants all of it, or packed.
inline void show_usual(Frame* out, uint64_t pc, uint64_t cfa, uint64_t kind) {
  *out = unpack_frame(kind | pc);
  out->cfa = Addr(cfa);
}
inline void show_usual(uint64_t* out, uint64_t pc, uint64_t, uint64_t kind) { *out = kind | pc; }

// Whether the walk before left this pc at this place. If so *pc is that one from now on, which nobody has to wait for: the
// processor compares later and goes on meanwhile. So a stack like the last one is walked as fast as its words can be tested.
inline bool foreseen(const Frame*, uint64_t*) { return false; }
inline bool foreseen(const uint64_t* out, uint64_t* pc) {
  uint64_t before = *out << 16 >> 16, same = before;
  asm("" : "+r"(same));  // the compiler is not to know it
  if (*pc != before) return false;
  asm volatile("");  // a branch, no conditional move
  *pc = same;
  return true;
}

// The step over a signal frame at sp, if it leads on upwards on the same stack: the interrupted pc, sp and frame pointer.
// What the long way would read must be readable here as well.
template <class Isa, class Load>
inline bool over_signal_frame(Load load, uint64_t end, uint64_t* pc, uint64_t* sp, uint64_t* fp) {
  uint64_t base, size, interrupted, its_pc, its_fp, other;
  const uint64_t frame = *sp;
  auto saved = [&](unsigned reg) { return frame + static_cast<uint64_t>(Code<Isa>::signal_register(reg)); };
  if (end - frame < Code<Isa>::kSignalFrameBytes) return false;
  for (unsigned reg = 0; reg < Isa::kRegs; reg++)
    if (!load(saved(reg), &other)) return false;
  if (!load(saved(Isa::kPc), &its_pc) || !load(saved(Isa::kSp), &interrupted) || !load(saved(Isa::kFp), &its_fp))
    return false;
  if (!load(frame + Code<Isa>::kSignalStackBase, &base) || !load(frame + Code<Isa>::kSignalStackSize, &size))
    return false;
  if (interrupted <= frame || interrupted > end || interrupted % 8) return false;
  if (frame - base < size && interrupted - base >= size) return false;  // off an alternate stack
  *pc = its_pc, *sp = interrupted, *fp = its_fp;
  return true;
}

// Shows frames from `out` on, to `last` at most. Returns behind the last one shown. `cache` is that of the arena.
// load(address, *value): words of the stack, and of the return entries if `recover`; false if they cannot be read.
template <class Isa, class Out, class Load>
[[gnu::always_inline]] inline Out* usual_steps(const TableArena* arena, const RowCache& cache, Load load, bool recover,
                                               UsualState* state, Out* out, const Out* last) {
  constexpr uint64_t kHookBytes = uint64_t{kTrampolines} * kTrampolineStride;
  constexpr uint64_t kCaller = packed_kind(Source::frame, 0, true);
  constexpr uint64_t kHookedCaller = packed_kind(Source::frame, kRecoveredReturn, true);
  constexpr uint64_t kInterrupted = packed_kind(Source::regs_pc, 0, false);
  constexpr uint64_t kReturnBit = packed_kind(Source::frame, 0, true);
  constexpr uint64_t kEnded = pack_frame({.pc = Addr(), .cfa = Addr(), .reason = Reason::end});
  uint64_t pc = state->pc, sp = state->sp, fp = state->fp, kind = state->kind;
  uint64_t exact = unpack_frame(kind).is_return ? 0 : UsualRow::kExact;
  const uint64_t end = state->stack.end.value, entries = arena->entries;
  const uint64_t hook_bytes = arena->trampolines ? kHookBytes : 0;
  const uint64_t hooks = arena->trampolines - kTrampolineCall;  // their first one's beginning
  bool alike = true;  // a stack that differs is rarely the same again further out, at the same place
  if (sp % 8) return out;
  for (; out != last; out++) {
    alike = alike && foreseen(out, &pc);
    const uint64_t place = RowCache::place(pc), tag = RowCache::tag(pc);
    auto is_other = [&](uint64_t word) {
      return (word >> RowCache::kTagShift ^ tag) | ((word ^ exact) & UsualRow::kExact);
    };
    uint64_t word = RowCache::load(cache.usual[place]);
    if (__builtin_expect(is_other(word) != 0, 0)) {
      uint64_t i = 0;
      do {
        if (++i == RowCache::kLine) break;
        word = RowCache::load(cache.usual[RowCache::beside(place, i)]);
      } while (is_other(word));
      if (i == RowCache::kLine) {
        state->unknown = true;
        break;
      }
    }
    if (__builtin_expect((word & UsualRow::kEnd) != 0, 0)) {
      if (word & UsualRow::kSignal & UsualRow::kOffset) {
        uint64_t its_pc, its_sp = sp, its_fp;  // not pc, sp and fp themselves: those stay in registers
        if (!over_signal_frame<Isa>(load, end, &its_pc, &its_sp, &its_fp)) break;
        show_usual(out, pc, its_sp, kind & ~kReturnBit);
        pc = its_pc, sp = its_sp, fp = its_fp;
        kind = kInterrupted, exact = UsualRow::kExact;
        continue;
      }
      show_usual(out, pc, 0, kind | kEnded);
      state->ended = true;
      return out + 1;
    }
    const uint64_t offset = UsualRow::offset(word), below = UsualRow::saved_below(word);
    uint64_t cfa = sp + offset, next, next_fp = fp, next_kind = kCaller;
    if (word & UsualRow::kByFp) {
      if (fp % 8 || fp < sp || fp >= end) break;
      cfa = fp + offset;
    }
    if (!offset || cfa > end || !load(cfa - 8, &next) || (below && !load(cfa - below, &next_fp))) break;
    if (next - hooks < hook_bytes) {
      const uint64_t entry = entries + (next - hooks - kTrampolineCall), key = Code<Isa>::kKeyIsSlot ? cfa - 8 : cfa;
      uint64_t owner;
      if (!recover || (next - hooks) % kTrampolineStride != kTrampolineCall || !load(entry, &next) ||
          !load(entry + 8, &owner))
        break;
      if (owner != key || next - hooks < hook_bytes) break;  // another's, or hooked in layers
      next_kind = kHookedCaller;
    }
    show_usual(out, pc, cfa, kind);
    pc = next, sp = cfa, fp = next_fp, kind = next_kind, exact = 0;
  }
  state->pc = pc, state->sp = sp, state->fp = fp, state->kind = kind;
  return out;
}

}  // namespace sonde
