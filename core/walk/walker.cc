// The step loop. Policy stands in place.h (which code may be walked through) and frame.h (is_reliable); here is how to get
// from one frame to the next, and when a next frame cannot be the next.
#include "core/walk/walker.h"

#include "core/isa/code.h"
#include "core/unwind/expression.h"
#include "core/unwind/step.h"
#include "core/walk/place.h"
#include "core/walk/recover.h"
#include "core/walk/usual_steps.h"

namespace sonde {
namespace {

constexpr unsigned kMaxLeftStacks = 4;
constexpr unsigned kNotBehind = ~0u;

// Registers that a caller has if its callee had them.
template <class Isa>
constexpr uint64_t kept_registers() {
  uint64_t mask = uint64_t{1} << Isa::kSp | uint64_t{1} << Isa::kPc;
  for (uint8_t reg : Isa::kSaved) mask |= uint64_t{1} << reg;
  return mask;
}
template <class Isa>
constexpr uint64_t kKept = kept_registers<Isa>();

template <class Isa, WalkMemory Memory>
class Walker {
 public:
  Walker(const TableArena* arena, RowCache* cache, Memory& memory, std::span<Frame> out)
      : places_(arena, cache, memory), arena_(arena), cache_(cache), memory_(memory), out_(out) {}

  WalkResult run(const WalkStart<Isa>& start) {
    regs_ = start.regs;
    code_ = {regs_.pc(), start.pc_is_return};
    next_.source = start.source;
    on_stack_ = memory_.stack_at(sp(), &stack_);
    unsigned limit = start.max_frames < out_.size() ? start.max_frames : static_cast<unsigned>(out_.size());
    for (;;) {
      bool unknown = false;
      if (result_.frames < limit && may_remember()) {
        if (usual(limit, &unknown)) return result_;
        if (!unknown && result_.frames < limit && remembered_step()) continue;
      }
      leave_detour();
      Place place = places_.at(code_, regs_, next_.recovered & kInDetour, unknown);
      if (result_.frames == limit) return cut(limit == out_.size() ? Reason::buffer_full : Reason::depth_limit);
      Frame& frame = show(place);
      if (place.kind == Place::Kind::outermost && is_reliable(frame.reason)) return end(frame);
      catch_up();
      RegSet<Isa> caller;
      Next next;
      Reason reason = advance(place, &caller, &next);
      if (reason != Reason::reliable && is_reliable(frame.reason)) frame.reason = reason;
      if (!is_reliable(frame.reason)) note(frame.reason);
      if (failed_ && start.reliable_only) return result_;
      if (reason != Reason::reliable && !guess(place, &caller, &next)) return result_;
      if (place.kind != Kind::signal_return) was_trap_handler_ = place.trap_handler;
      regs_ = caller;
      code_ = {regs_.pc(), !next.exact};
      frame.cfa = sp();
      next_ = next;
    }
  }

 private:
  using Kind = Place::Kind;

  // How the frame to come was found.
  struct Next {
    Source source = Source::frame;
    uint8_t recovered = 0;
    Reason reason = Reason::reliable;  // if it is known already that it cannot be believed
    bool exact = false;
    bool over_signal = false;
  };

  Addr sp() const { return regs_.sp(); }

  // Whether what the cache knows of a pc is all there is to know.
  bool may_remember() const {
    return cache_ && !failed_ && on_stack_ && next_.reason == Reason::reliable && !was_trap_handler_;
  }

  // Shows the frames up to the first that is not usual and makes regs_ that one's, but for the registers that no usual
  // row needs: catch_up() finds them if they are wanted. True: the walk has ended.
  // *unknown: the cache knows nothing of the frame to come.
  bool usual(unsigned limit, bool* unknown) {
    if (!regs_.has(Isa::kFp)) return false;
    const unsigned before = result_.frames;
    const Addr before_sp = sp();
    UsualState state{code_.pc.value, sp().value, regs_.get(Isa::kFp),
                     packed_kind(next_.source, next_.recovered, code_.is_return), stack_};
    Frame* last;
    if constexpr (requires { Memory::load(Addr()); }) {
      auto load = [](uint64_t at, uint64_t* value) { return *value = Memory::load(Addr(at)), true; };
      last = usual_steps<Isa>(arena_, *cache_, load, memory_.always_has(entries_of(*arena_)), &state, &out_[before],
                              out_.data() + limit);
    } else {
      auto load = [this](uint64_t at, uint64_t* value) { return memory_.read(Addr(at), value); };
      last = usual_steps<Isa>(arena_, *cache_, load, true, &state, &out_[before], out_.data() + limit);
    }
    *unknown = state.unknown;
    if (last == &out_[before]) return false;
    result_.frames = static_cast<unsigned>(last - out_.data());
    if (state.ended) return result_.reason = Reason::end, true;
    if (behind_from_ == kNotBehind) behind_from_ = before, behind_sp_ = before_sp;
    behind_to_ = result_.frames;
    regs_.set(Isa::kPc, state.pc), regs_.set(Isa::kSp, state.sp), regs_.set(Isa::kFp, state.fp);
    const Frame to_come = unpack_frame(state.kind);
    code_ = {Addr(state.pc), to_come.is_return};
    next_ = Next{};
    next_.source = to_come.source, next_.recovered = to_come.recovered;
    next_.exact = next_.over_signal = !to_come.is_return;  // only a signal frame leads to such a pc
    return false;
  }

  // Registers other than sp and fp, through the frames that usual() has shown.
  void catch_up() {
    if (behind_from_ == kNotBehind) return;
    for (; behind_from_ < behind_to_; behind_sp_ = out_[behind_from_++].cfa) {
      const Frame& frame = out_[behind_from_];
      uint32_t reference = cache_->find(frame.code());
      const Row* row = nullptr;
      if (reference > RowCache::kSignalReturn) {
        row = row_at(arena_, reference);
      } else {
        Place place = places_.at(frame.code(), regs_, false);  // if nothing is remembered, a handler took its place
        if (place.kind == Kind::signal_return) {
          interrupted_registers(behind_sp_);
          continue;
        }
        row = place.row;
      }
      regs_.valid &= kKept<Isa>;
      if (!row) {  // the frame is not the one that was shown: a handler has gone on to another stack, and this walk waited
        result_.reason = Reason::no_table_row;
        regs_.valid &= ~saved_bits();
        continue;
      }
      for (unsigned i = 1; i < Isa::kSaved.size(); i++) restore(i, *row, frame.cfa);
    }
    behind_from_ = kNotBehind;
  }

  // All registers that the signal frame at `frame` holds, but for pc, sp and the frame pointer.
  void interrupted_registers(Addr frame) {
    for (unsigned reg = 0; reg < Isa::kRegs; reg++) {
      if (reg == Isa::kPc || reg == Isa::kSp || reg == Isa::kFp) continue;
      uint64_t value;
      if (load(frame + Code<Isa>::signal_register(reg), &value)) regs_.set(reg, value);
      else regs_.valid &= ~(uint64_t{1} << reg);
    }
  }

  static constexpr uint64_t saved_bits() {
    uint64_t bits = 0;
    for (unsigned i = 1; i < Isa::kSaved.size(); i++) bits |= uint64_t{1} << Isa::kSaved[i];
    return bits;
  }

  // The caller's Isa::kSaved[i]. A slot that cannot be read leaves it unknown, on the long way too.
  void restore(unsigned i, const Row& row, Addr cfa) {
    const SavedReg saved = row.saved[i];
    if (saved.kind == ValueKind::same) return;
    const uint64_t bit = uint64_t{1} << Isa::kSaved[i];
    bool known = saved.kind == ValueKind::at_cfa && load(cfa + saved.offset, &regs_.value[Isa::kSaved[i]]);
    regs_.valid = known ? regs_.valid | bit : regs_.valid & ~bit;
  }

  // One step by any other row of the cache. False, with nothing changed, if anything is unusual: the long way finds the
  // reason.
  bool remembered_step() {
    uint32_t reference = cache_->find(code_);
    if (reference <= RowCache::kSignalReturn) return false;
    catch_up();
    const Row& row = *row_at(arena_, reference);
    uint64_t cfa = regs_.get(row.cfa_reg) + static_cast<uint64_t>(int64_t{row.cfa_offset}), value;
    if (!regs_.has(row.cfa_reg) || cfa <= sp().value || cfa > stack_.end.value || cfa % 8) return false;
    if (!load(Addr(cfa) + row.ra_offset, &value)) return false;
    regs_.valid &= kKept<Isa>;
    for (unsigned i = 0; i < Isa::kSaved.size(); i++) restore(i, row, Addr(cfa));
    Frame& frame = out_[result_.frames++];
    frame.pc = code_.pc, frame.cfa = Addr(cfa), frame.source = next_.source, frame.reason = Reason::reliable;
    frame.recovered = next_.recovered, frame.is_return = code_.is_return;
    next_ = Next{};
    Addr pc(value);
    if (in_trampolines(*arena_, pc))
      resolve(Code<Isa>::kKeyIsSlot ? Addr(cfa) + row.ra_offset : Addr(cfa), &pc, &next_);
    regs_.set(Isa::kSp, cfa);
    regs_.set(Isa::kPc, pc.value);
    code_ = {pc, true};
    return true;
  }

  // A word of the stack that the walk is on.
  bool load(Addr at, uint64_t* value) {
    if constexpr (requires { Memory::load(at); }) {
      if (RawMemory::holds_word(stack_, at)) return *value = Memory::load(at), true;
    }
    return memory_.read(at, value);
  }

  Frame& show(const Place& place) {
    Frame& frame = out_[result_.frames++];
    frame.pc = place.code.pc, frame.is_return = place.code.is_return;
    frame.cfa = Addr();
    frame.source = next_.source, frame.recovered = next_.recovered;
    frame.reason = next_.reason != Reason::reliable ? next_.reason : place.reason;
    if (frame.reason == Reason::no_table_row && next_.over_signal) frame.reason = Reason::boundary_next;
    if (!place.code.pc && !place.code.is_return) frame.reason = Reason::null_pc;
    if (failed_) {
      frame.recovered |= kMarked;
      if (frame.reason == Reason::reliable && place.kind != Kind::outermost) frame.reason = result_.reason;
    }
    return frame;
  }

  void note(Reason reason) {
    if (!failed_) result_.reason = reason;
    failed_ = true;
  }

  WalkResult end(Frame& frame) {
    frame.reason = Reason::end;
    if (!failed_) result_.reason = Reason::end;
    return result_;
  }

  WalkResult cut(Reason reason) {
    if (result_.frames && is_reliable(out_[result_.frames - 1].reason)) out_[result_.frames - 1].reason = reason;
    note(reason);
    return result_;
  }

  // Execution in a detour counts as execution at the displaced instruction.
  void leave_detour() {
    if (code_.is_return) return;
    if (next_.over_signal && was_trap_handler_ && places_.arena().detour_of_patch(code_.pc - 1, 0)) {
      code_.pc = code_.pc - 1;  // the trap instruction that led to the handler is one byte long
    } else if (const DetourEntry* detour = places_.arena().detour(code_.pc)) {
      const DetourStepEntry* step = places_.arena().detour_step(*detour, code_.pc.value - detour->begin);
      code_.pc = Addr(detour->patch) + (step && step->original > 0 ? step->original : 0);
      if (step) regs_.set(Isa::kSp, regs_.get(Isa::kSp) + static_cast<uint64_t>(int64_t{step->sp_adjust}));
    } else {
      return;
    }
    regs_.set(Isa::kPc, code_.pc.value);
    next_.recovered |= kInDetour;
  }

  // From the frame shown last to its caller; why not, otherwise.
  Reason advance(const Place& place, RegSet<Isa>* caller, Next* next) {
    switch (place.kind) {
      case Kind::nothing: return Reason::no_table_row;
      case Kind::outermost: return Reason::end;  // of a walk that has failed before
      case Kind::signal_return: return over_signal_frame(caller, next);
      case Kind::trampoline: return out_of_trampoline(caller, next);
      case Kind::row: break;
    }
    if (!on_stack_) return Reason::stack_out_of_range;
    Reason reason = place.simple ? simple_step(*place.row, caller) : general_step(place, caller);
    if (reason != Reason::reliable) return reason;
    Addr pc = caller->pc();
    if (place.engine_entry) {
      pc = pc - 1;  // the rule of sonde_entry: patch address + 1
      next->exact = true, next->recovered |= kInDetour;
    } else if (place.row->flags & kRowSignalFrame) {
      next->exact = next->over_signal = true, next->source = Source::regs_pc;
    } else {
      Addr slot = place.row->ra_kind == ValueKind::at_cfa ? caller->sp() + place.row->ra_offset : caller->sp() - 8;
      resolve(Code<Isa>::kKeyIsSlot ? slot : caller->sp(), &pc, next);
    }
    caller->set(Isa::kPc, pc.value);
    return Reason::reliable;
  }

  void resolve(Addr key, Addr* pc, Next* next) {
    switch (recover(places_.arena().header(), memory_, key, false, pc)) {
      case Recovery::not_hooked: break;
      case Recovery::recovered: next->recovered |= kRecoveredReturn; break;
      case Recovery::failed: next->reason = Reason::recovery_failed; break;
    }
  }

  // Most rows: two loads and the saved registers. The checks come before the loads.
  Reason simple_step(const Row& row, RegSet<Isa>* caller) {
    if (!regs_.has(row.cfa_reg)) return Reason::no_table_row;
    Addr cfa = Addr(regs_.get(row.cfa_reg)) + row.cfa_offset;
    if (Reason reason = check_growth(row, cfa); reason != Reason::reliable) return reason;
    uint64_t value;
    if (!memory_.read(cfa + row.ra_offset, &value)) return Reason::stack_out_of_range;
    caller->valid = 0;
    caller->set(Isa::kPc, value);
    caller->set(Isa::kSp, cfa.value);
    for (unsigned i = 0; i < Isa::kSaved.size(); i++) {
      const SavedReg& saved = row.saved[i];
      const unsigned reg = Isa::kSaved[i];
      if (saved.kind == ValueKind::same) {
        if (regs_.has(reg)) caller->set(reg, regs_.get(reg));
      } else if (saved.kind == ValueKind::at_cfa && memory_.read(cfa + saved.offset, &value)) {
        caller->set(reg, value);
      }
    }
    return Reason::reliable;
  }

  Reason general_step(const Place& place, RegSet<Isa>* caller) {
    // A row made here has no table, and nothing that stands in one.
    const Table table = place.image ? places_.arena().table(*place.image) : Table::at(nullptr);
    Row changed;
    const Row& row = place.entered_pushed ? (changed = with_pushed(*place.row)) : *place.row;
    // The call that this frame waits in has overwritten the register: what stands there is this frame's own pc.
    if (Isa::kReturnInRegister && place.code.is_return && row.ra_kind == ValueKind::same) return Reason::no_table_row;
    switch (step(table, row, regs_, memory_, Code<Isa>::kSignatureBits, caller)) {
      case StepStatus::ok: break;
      case StepStatus::outermost: return Reason::end;
      case StepStatus::unreadable: return Reason::stack_out_of_range;
      case StepStatus::inexpressible:
      case StepStatus::register_unknown:
      case StepStatus::bad_expression: return Reason::no_table_row;
    }
    if (!place.code.is_return) repair_frame_pointer(table, row, caller);
    return check_growth(row, caller->sp());
  }

  // A row that forgets what was pushed before its function was entered. What it finds below sp was taken off again.
  Row with_pushed(Row row) const {
    constexpr int kPushed = Code<Isa>::kResolverPushed;
    if (row.cfa_kind != CfaKind::reg_offset || !regs_.has(row.cfa_reg)) return row;
    row.cfa_offset += kPushed;
    Addr cfa = Addr(regs_.get(row.cfa_reg)) + row.cfa_offset;
    auto move = [&](auto& value, ValueKind& kind) {
      if (kind != ValueKind::at_cfa) return;
      value -= kPushed;
      if (cfa + value < sp()) kind = ValueKind::same;
    };
    move(row.ra_offset, row.ra_kind);
    for (SavedReg& saved : row.saved) move(saved.offset, saved.kind);
    return row;
  }

  // gcc realigns the stack with a rule "rbp is saved where rbp points" and leaves it in force behind `leave`, when rbp is
  // the caller's again. A register is saved within its frame or not at all.
  void repair_frame_pointer(const Table& table, const Row& row, RegSet<Isa>* caller) {
    if (row.saved[0].kind != ValueKind::at_expression || !regs_.has(Isa::kFp)) return;
    static_assert(Isa::kSaved[0] == Isa::kFp);
    uint64_t cfa = caller->sp().value;
    ExpressionFrame frame{regs_.value, regs_.valid, Isa::kRegs, nullptr, [](void*, Addr, uint64_t*) { return false; }};
    auto address = evaluate(table.expression(static_cast<uint32_t>(row.saved[0].offset)), frame, &cfa);
    if (!address) return;
    bool inside = *address >= sp().value - Isa::kRedZone && *address < cfa;
    if (!inside) caller->set(Isa::kFp, regs_.get(Isa::kFp));
  }

  // sp grows while a walk stays on one stack; each stack is entered once. Only where execution stands may a frame have no
  // size: its return address is in a register, or was popped and is about to be jumped to.
  Reason check_growth(const Row& row, Addr cfa) {
    bool by_frame_pointer = row.cfa_kind == CfaKind::reg_offset && row.cfa_reg == Isa::kFp;
    if (cfa.value % 8) return by_frame_pointer ? Reason::fp_mismatch : Reason::stack_out_of_range;
    if (cfa > sp() || (cfa == sp() && !code_.is_return)) {
      if (cfa <= stack_.end) return Reason::reliable;
      if (by_frame_pointer) return Reason::fp_mismatch;
      return switch_stack(stack_, cfa);
    }
    if (by_frame_pointer) return Reason::fp_mismatch;
    return stack_.begin <= cfa ? Reason::non_progress : switch_stack(stack_, cfa);
  }

  Reason switch_stack(AddrRange left, Addr to) {
    AddrRange found;
    if (!memory_.stack_at(to, &found)) return Reason::stack_out_of_range;
    for (unsigned i = 0; i < left_count_; i++)
      if (left_[i].contains(to)) return Reason::foreign_stack;
    if (left_count_ == kMaxLeftStacks) return Reason::foreign_stack;
    left_[left_count_++] = left;
    stack_ = found;
    return Reason::reliable;
  }

  // The registers that the kernel saved when it delivered the signal: all of them, the pc exact. The handler may have run
  // on an alternate stack, which may lie anywhere, also within the interrupted one.
  Reason over_signal_frame(RegSet<Isa>* caller, Next* next) {
    if (!on_stack_) return Reason::stack_out_of_range;
    caller->valid = 0;
    for (unsigned reg = 0; reg < Isa::kRegs; reg++) {
      uint64_t value;
      if (!memory_.read(sp() + Code<Isa>::signal_register(reg), &value)) return Reason::stack_out_of_range;
      caller->set(reg, value);
    }
    uint64_t base, size;
    if (!memory_.read(sp() + Code<Isa>::kSignalStackBase, &base) ||
        !memory_.read(sp() + Code<Isa>::kSignalStackSize, &size))
      return Reason::stack_out_of_range;
    AddrRange alternate{Addr(base), Addr(base + size)};
    Addr interrupted = caller->sp();
    next->exact = next->over_signal = true, next->source = Source::regs_pc;
    if (size && alternate.contains(sp()) && !alternate.contains(interrupted)) {
      if (Reason reason = switch_stack(alternate, interrupted); reason == Reason::foreign_stack) return reason;
      else stand_on(interrupted, reason);
      return Reason::reliable;
    }
    if (interrupted > sp() && interrupted <= stack_.end) return Reason::reliable;
    if (stack_.contains(interrupted)) return Reason::non_progress;
    Reason reason = switch_stack(stack_, interrupted);
    if (reason == Reason::foreign_stack) return reason;
    stand_on(interrupted, reason);
    return Reason::reliable;
  }

  // Where a signal interrupted the thread: the pc is certain even if its stack is not known.
  void stand_on(Addr interrupted, Reason reason) {
    on_stack_ = reason == Reason::reliable;
    if (!on_stack_ && !failed_) result_.unknown_stack = interrupted;
  }

  // Execution stands in a return trampoline: the function has returned, nothing of it is left but the consumed slot.
  Reason out_of_trampoline(RegSet<Isa>* caller, Next* next) {
    Addr pc = code_.pc;
    Addr key = Code<Isa>::kKeyIsSlot ? sp() - 8 : sp();
    if (recover(places_.arena().header(), memory_, key, true, &pc) != Recovery::recovered)
      return Reason::recovery_failed;
    *caller = regs_;
    caller->set(Isa::kPc, pc.value);
    next->recovered |= kRecoveredReturn;
    return Reason::reliable;
  }

  // Best effort, never part of a reliable walk: the frame record that the frame pointer leads to; the word on top of the
  // stack after a jump into nowhere. Each must give a return address in known code.
  bool guess(const Place& place, RegSet<Isa>* caller, Next* next) {
    if (place.kind == Kind::outermost || !on_stack_) return false;
    *next = Next{};
    uint64_t pc, fp;
    bool wild = !place.code.is_return && !place.image;
    if (wild && Code<Isa>::kKeyIsSlot && memory_.read(sp(), &pc) && plausible(Addr(pc))) {
      *caller = regs_;
      caller->set(Isa::kSp, sp().value + 8);
    } else if (regs_.has(Isa::kFp) && holds_record(Addr(regs_.get(Isa::kFp))) &&
               memory_.read(Addr(regs_.get(Isa::kFp)), &fp) && memory_.read(Addr(regs_.get(Isa::kFp)) + 8, &pc)) {
      caller->valid = 0;
      caller->set(Isa::kSp, regs_.get(Isa::kFp) + 16);
      caller->set(Isa::kFp, fp);
    } else {
      return false;
    }
    Addr resolved = Addr(pc & ~Code<Isa>::kSignatureBits);
    resolve(Code<Isa>::kKeyIsSlot ? caller->sp() - 8 : caller->sp(), &resolved, next);
    caller->set(Isa::kPc, resolved.value);
    return next->reason == Reason::reliable && places_.arena().text(resolved - 1);
  }

  bool holds_record(Addr fp) const {
    return fp.value % 8 == 0 && fp >= sp() && stack_.contains(fp) && stack_.end - fp >= 16;
  }
  bool plausible(Addr pc) {
    uint64_t before;
    if (in_trampolines(places_.arena().header(), pc)) return true;
    return places_.arena().text(pc - 1) && (!memory_.read(pc - 8, &before) || Code<Isa>::may_end_call(before));
  }

  Places<Isa, Memory> places_;
  const TableArena* arena_;
  RowCache* cache_;
  Memory& memory_;
  std::span<Frame> out_;
  WalkResult result_;
  RegSet<Isa> regs_;
  CodeAddr code_;
  Next next_;
  AddrRange stack_;
  AddrRange left_[kMaxLeftStacks];
  unsigned left_count_ = 0;
  unsigned behind_from_ = kNotBehind, behind_to_ = 0;  // frames that catch_up() has still to go through
  Addr behind_sp_;  // where the first of them was entered
  bool on_stack_ = false;
  bool failed_ = false;
  bool was_trap_handler_ = false;
};

}  // namespace

template <class Isa, WalkMemory Memory>
WalkResult walk(const TableArena* arena, RowCache* cache, Memory& memory, const WalkStart<Isa>& start,
                std::span<Frame> out) {
  if (cache && !cache->is_of(arena->generation)) cache = nullptr;
  return Walker<Isa, Memory>(arena, cache, memory, out).run(start);
}

template WalkResult walk(const TableArena*, RowCache*, RawMemory&, const WalkStart<X86_64>&, std::span<Frame>);
template WalkResult walk(const TableArena*, RowCache*, RawMemory&, const WalkStart<Aarch64>&, std::span<Frame>);
template WalkResult walk(const TableArena*, RowCache*, AnyMemory&, const WalkStart<X86_64>&, std::span<Frame>);
template WalkResult walk(const TableArena*, RowCache*, AnyMemory&, const WalkStart<Aarch64>&, std::span<Frame>);

}  // namespace sonde
