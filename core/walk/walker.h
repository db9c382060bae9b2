// The step loop: registers + memory + tables -> frames with verdicts. Signal-safe: no heap, no locks, no state of its own.
//
// What makes a frame reliable (semantics A9, A10, D):
//   - its pc was found by a row in force at its callee, by the kernel's signal frame, or given by the caller of walk();
//   - it lies in the text of a known image, and a call may end before it if it is a return address;
//   - sp grew, the frame lies on the stack of its callee or on another one never left before (a signal frame's);
//   - where the slot held a return trampoline, the trampoline's entry names that very slot.
// The stack is whole when the last frame is positively the outermost: its row says nobody called it, or it is known as
// such. The first frame that is not reliable says why. A reliable walk stops there. Any other goes on by whatever seems
// best, and every later frame is marked (kMarked).
//
// Return trampolines in slots are resolved, not shown. Code that was interrupted in a trampoline or behind it, and frames
// of the engine, are shown: a walk begins with the pc it was given. A pc in a detour is shown as the pc of the displaced
// instruction, and the frame above sonde_entry as the probed function at its patch address (kInDetour).
#pragma once

#include <span>

#include "core/isa/regset.h"
#include "core/unwind/arena.h"
#include "core/walk/frame.h"
#include "core/walk/memory.h"
#include "core/walk/row_cache.h"

namespace sonde {

template <class Isa>
struct WalkStart {
  RegSet<Isa> regs;
  Source source = Source::regs_pc;
  bool pc_is_return = false;  // regs.pc is where a call returns to, not where execution stands
  bool reliable_only = false;
  unsigned max_frames = ~0u;
};

struct WalkResult {
  unsigned frames = 0;
  Reason reason =
      Reason::unknown_code;  // end: the whole stack, every frame reliable; otherwise of the first that is not
  // Not 0: a signal interrupted the thread with its sp there, on a stack that `memory` does not know. It is mapped as long as
  // the handler runs, so whoever can find out may walk again.
  Addr unknown_stack = Addr();
  bool whole() const { return reason == Reason::end; }
};

// `arena` describes the target, in whatever memory this code reads directly; `cache` may be null;
// one of another arena is not used.
template <class Isa, WalkMemory Memory>
WalkResult walk(const TableArena* arena, RowCache* cache, Memory& memory, const WalkStart<Isa>& start,
                std::span<Frame> out);

extern template WalkResult walk(const TableArena*, RowCache*, RawMemory&, const WalkStart<X86_64>&, std::span<Frame>);
extern template WalkResult walk(const TableArena*, RowCache*, RawMemory&, const WalkStart<Aarch64>&, std::span<Frame>);
extern template WalkResult walk(const TableArena*, RowCache*, AnyMemory&, const WalkStart<X86_64>&, std::span<Frame>);
extern template WalkResult walk(const TableArena*, RowCache*, AnyMemory&, const WalkStart<Aarch64>&, std::span<Frame>);

}  // namespace sonde
