// What is known of the code at a pc: the row to go on by, or why there is none. Every rule that upgrades a kind of code
// that is special by default stands here, one function each (design D9; semantics S20, S24, S29, S35). Signal-safe.
#pragma once

#include "core/isa/code.h"
#include "core/walk/arena_view.h"
#include "core/walk/frame.h"
#include "core/walk/memory.h"
#include "core/walk/recover.h"
#include "core/walk/row_cache.h"

namespace sonde {

struct Place {
  enum class Kind : uint8_t {
    nothing,  // no way on
    row,
    outermost,  // nobody called it
    signal_return,  // sp stands at the kernel's signal frame
    trampoline,  // execution stands in a return trampoline
  };
  Kind kind = Kind::nothing;
  Reason reason = Reason::reliable;
  bool simple = false;  // row: CFA from a register, everything else at offsets from it
  bool engine_entry = false;  // sonde_entry: its caller is the probed function at the patch address
  bool trap_handler = false;  // sonde_trap
  bool cloned = false;  // parent or child, see apply_clone_return
  bool entered_pushed = false;  // Code<Isa>::kResolverPushed bytes lie above the CFA that the row knows
  bool of_this_stack = false;  // found by what stands on the stack: not to be remembered
  CodeAddr code;  // as it turned out: a "return address" may be where code starts
  const Row* row = nullptr;
  const ImageEntry* image = nullptr;  // whose table the row is of; null for rows made here
};

// Rows of code that never changes. All registers but sp and pc are as the caller left them.
template <class Isa>
constexpr Row pushed_row(int words) {
  Row row;
  if (Isa::kReturnInRegister) {
    row.cfa_reg = Isa::kSp, row.cfa_offset = 8 * words, row.ra_kind = ValueKind::same;
    return row;
  }
  row.cfa_reg = Isa::kSp, row.cfa_offset = 8 * (words + 1);
  row.ra_kind = ValueKind::at_cfa, row.ra_offset = -8;
  return row;
}
template <class Isa>
inline constexpr Row kPushedRows[3] = {pushed_row<Isa>(0), pushed_row<Isa>(1), pushed_row<Isa>(2)};

template <class Isa>
constexpr Row frame_pushed_row() {
  Row row = pushed_row<Isa>(1);
  row.saved[0].kind = ValueKind::at_cfa, row.saved[0].offset = -16;
  return row;
}
template <class Isa>
inline constexpr Row kFramePushedRow = frame_pushed_row<Isa>();

constexpr bool is_simple(const Row& row) {
  if (row.flags || row.cfa_kind != CfaKind::reg_offset || row.ra_kind != ValueKind::at_cfa) return false;
  for (const SavedReg& saved : row.saved)
    if (saved.kind != ValueKind::same && saved.kind != ValueKind::at_cfa && saved.kind != ValueKind::undefined)
      return false;
  return true;
}

// What a RowCache's reference means, unless it is kOutermost or kSignalReturn.
inline const Row* row_at(const TableArena* arena, uint32_t reference) {
  return reinterpret_cast<const Row*>(reinterpret_cast<const char*>(arena) + uint64_t{reference} * 4);
}

template <class Isa, WalkMemory Memory>
class Places {
 public:
  // cache: null, or that of this arena.
  Places(const TableArena* arena, RowCache* cache, Memory& memory) : arena_(arena), cache_(cache), memory_(memory) {}

  const ArenaView& arena() const { return arena_; }

  // regs: of the frame, for what an interrupted instruction says about it. in_detour: its bytes are not those in memory.
  // unknown: the cache was asked already. What it is told then is no more than usual steps need.
  Place at(CodeAddr code, const RegSet<Isa>& regs, bool in_detour, bool unknown = false) {
    if (cache_ && !in_detour && !unknown)
      if (uint32_t reference = cache_->find(code)) return from_cache(code, reference);
    if constexpr (requires { Memory::load(Addr()); })
      __builtin_prefetch(reinterpret_cast<const void*>(code.pc.value - 8));  // wanted when the row is found
    Place place = look_up(code);
    if (code.is_return) {
      check_call_before(place);
    } else if (!in_detour) {
      if (place.kind == Place::Kind::row) check_leaving_insn(place, regs.sp());
      if (place.cloned) apply_clone_return(place, regs);
    }
    if (cache_ && !in_detour) to_cache(code, place, !unknown);
    return place;
  }

 private:
  using Kind = Place::Kind;

  Place from_cache(CodeAddr code, uint32_t reference) const {
    Place place{.code = code};
    place.image = arena_.text(code.lookup());
    if (reference == RowCache::kOutermost) return place.kind = Kind::outermost, place;
    if (reference == RowCache::kSignalReturn)
      return place.kind = Kind::signal_return, place.code.is_return = false, place;
    place.kind = Kind::row, place.simple = true;
    place.row = row_at(&arena_.header(), reference);
    return place;
  }

  void to_cache(CodeAddr asked, const Place& place, bool with_reference) {
    if (place.reason != Reason::reliable || place.engine_entry || place.trap_handler || place.of_this_stack) return;
    if (place.kind == Kind::outermost) return cache_->keep(place.code, RowCache::kOutermost, UsualRow::kEnd);
    if (place.kind == Kind::signal_return) {
      if (asked.is_return) cache_->keep(place.code, RowCache::kSignalReturn, UsualRow::kSignal);
      cache_->keep(asked, RowCache::kSignalReturn, UsualRow::kSignal);
      return;
    }
    if (place.kind != Kind::row || !place.simple || !place.image) return;
    uint64_t distance = reinterpret_cast<uint64_t>(place.row) - reinterpret_cast<uint64_t>(&arena_.header());
    if (distance >= RowCache::kMaxDistance || distance % 4) return;
    uint64_t usual = UsualRow::encode(*place.row, Isa::kSp, Isa::kFp);
    cache_->keep(place.code, with_reference || !usual ? static_cast<uint32_t>(distance / 4) : 0, usual);
  }

  // The eight bytes of code at `at`. Text that stays is read directly by the thread whose code it is.
  bool read_code(const ImageEntry* image, Addr at, uint64_t* value) const {
    if constexpr (requires { Memory::load(at); })
      if (image && image->flags & kImageStays && image->text_begin <= at.value && at.value + 8 <= image->text_end)
        return *value = Memory::load(at), true;
    return memory_.read(at, value);
  }

  Place look_up(CodeAddr code) {
    Place place{.code = code};
    if (in_trampolines(arena_.header(), code.pc)) {  // found in a slot it would have been resolved already
      if (code.is_return) return place.reason = Reason::recovery_failed, place;
      return place.kind = Kind::trampoline, place;
    }
    Addr pc = code.lookup();
    place.image = arena_.text(pc);
    if (!place.image) {
      const SpecialEntry* special = arena_.special(pc);
      if (!special || behind_start(*special, code) || !apply_special(static_cast<SpecialKind>(special->kind), place))
        place.reason = Reason::unknown_code;
      return place;
    }
    if (arena_.has_table(*place.image))
      place.row = arena_.table(*place.image).lookup(ImageAddr(pc.value - place.image->bias));
    if (const SpecialEntry* special = arena_.special(*place.image, pc))
      if (!behind_start(*special, code) && apply_special(static_cast<SpecialKind>(special->kind), place)) return place;
    return apply_row(place);
  }

  // Handlers return to the first instruction of what returns from a signal, and nobody into it or behind it.
  static bool behind_start(const SpecialEntry& special, CodeAddr code) {
    return code.is_return && special.kind == static_cast<uint32_t>(SpecialKind::signal_return);
  }
  bool is_start(const Place& place) const {
    if (place.kind != Kind::signal_return) return true;
    const SpecialEntry* special = arena_.special(place.code.pc);
    return !special || special->begin == place.code.pc.value;
  }

  // True if the special kind alone decides. Test: "walk: special code".
  bool apply_special(SpecialKind kind, Place& place) {
    switch (kind) {
      case SpecialKind::outermost: return place.kind = Kind::outermost, true;
      case SpecialKind::unreliable: return place.reason = Reason::special_code, true;
      case SpecialKind::signal_return: return place.kind = Kind::signal_return, place.code.is_return = false, true;
      case SpecialKind::plt: return !place.row && apply_plt(place);
      case SpecialKind::entry_trampoline: return place.engine_entry = true, false;
      case SpecialKind::clone_return: return place.cloned = true, place.reason = Reason::special_code, true;
      case SpecialKind::trap_handler: return place.trap_handler = true, false;
      case SpecialKind::bare: return !place.row && apply_bare(kPushedRows<Isa>[0], place);
      case SpecialKind::bare_word: return !place.row && apply_bare(kPushedRows<Isa>[1], place);
      case SpecialKind::bare_frame: return !place.row && apply_bare(kFramePushedRow<Isa>, place);
      case SpecialKind::lazy_resolver: place.entered_pushed = Code<Isa>::kResolverPushed != 0; break;
      case SpecialKind::vdso:
      case SpecialKind::return_trampoline:
      case SpecialKind::return_common:
      case SpecialKind::detour: break;  // their rows are believed, there is nothing else to know
    }
    return false;
  }

  // Behind clone's system call both go the same way: the child on an empty stack, the parent as the row says, or without one
  // to the return instruction that ends this code (host/tables/specials.cc). The call's result, which nothing changes until
  // they part, tells which of them stands here.
  // Test: "walk: behind clone's system call the result tells parent and child apart", step_programs.
  static void apply_clone_return(Place& place, const RegSet<Isa>& regs) {
    if (!regs.has(Code<Isa>::kSystemResult)) return;
    const bool child = !regs.get(Code<Isa>::kSystemResult), described = place.row && !place.row->flags;
    if (!child && !described && !Code<Isa>::kKeyIsSlot) return;
    place.reason = Reason::reliable, place.of_this_stack = true;
    place.kind = child ? Kind::outermost : Kind::row;
    if (child) return;
    if (!described) place.row = &kPushedRows<Isa>[0], place.image = nullptr;
    place.simple = is_simple(*place.row);
  }

  // Linkers that describe no PLT (lld): a stub's own instructions say what it has pushed. Execution stands in one or it
  // is not in a PLT at all: nothing returns into a stub.
  // Test: "walk: linkage stubs without rows", case_059, step_programs,
  // "walk: AArch64 linkage stubs without rows, at each of their instructions (S20)".
  bool apply_plt(Place& place) {
    uint64_t further, before, at;
    if (place.code.is_return || !read_code(place.image, place.code.pc - 8, &before) ||
        !read_code(place.image, place.code.pc, &at))
      return false;
    if (!read_code(place.image, place.code.pc - 16, &further)) further = 0;
    int words = Code<Isa>::plt_words(before, at, further);
    if (words < 0) return false;
    place.kind = Kind::row;
    place.row = &kPushedRows<Isa>[words];
    place.simple = is_simple(*place.row), place.image = nullptr;
    return true;
  }

  // Code of the start files, which has no rows and was recognised by all of its bytes (host/tables/start_files.h): where it
  // stands says what it has pushed.
  // Test: "specials: start files of every kind of link are recognised to the last byte", "walk: special code".
  bool apply_bare(const Row& row, Place& place) {
    uint64_t before;
    if (place.code.is_return && read_code(place.image, place.code.pc - 8, &before) && !Code<Isa>::may_end_call(before))
      place.reason = Reason::ra_not_after_call;
    place.kind = Kind::row, place.simple = true, place.image = nullptr;
    place.row = &row;
    return true;
  }

  // A row is what proves ordinary code, unless it is refuted or describes another context.
  // Test: "walk: a gap in the tables stops a reliable walk; another goes on by the frame pointer, marked",
  // "walk: rows that describe the context to come are not believed".
  Place& apply_row(Place& place) {
    bool says_signal = place.row && (place.row->flags & kRowSignalFrame);
    if ((says_signal || !place.row) && is_signal_return(place.image, place.code.pc)) {
      place.kind = Kind::signal_return, place.code.is_return = false;
      return place;
    }
    if (!place.row || (place.row->flags & kRowInexpressible)) return place.reason = Reason::no_table_row, place;
    if (place.row->flags & kRowRefuted) place.reason = Reason::row_refuted;
    if (describes_another(*place.row)) place.reason = Reason::special_code;
    place.kind = place.row->ra_kind == ValueKind::undefined ? Kind::outermost : Kind::row;
    place.simple = is_simple(*place.row) && !place.entered_pushed;
    return place;
  }

  // While longjmp and setcontext load registers, their rows describe the context to come, not who called them. On x86-64
  // such rows are told by this: the return address is not just below the CFA, and the CFA is not found by sp or fp. On
  // AArch64: the CFA is found by an argument.
  static bool describes_another(const Row& row) {
    if (row.ra_kind == ValueKind::undefined || (row.flags & kRowSignalFrame)) return false;
    if constexpr (Isa::kReturnInRegister)
      return row.cfa_kind != CfaKind::expression && row.cfa_reg <= Isa::kLastArgument;
    bool pushed = row.ra_kind == ValueKind::at_cfa && row.ra_offset == -8;
    bool by_frame = row.cfa_kind == CfaKind::reg_offset && (row.cfa_reg == Isa::kSp || row.cfa_reg == Isa::kFp);
    return !pushed && !by_frame;
  }

  bool is_signal_return(const ImageEntry* image, Addr pc) {
    uint64_t at, next;
    return read_code(image, pc, &at) && read_code(image, pc + 8, &next) && Code<Isa>::is_signal_return(at, next);
  }

  // Negative evidence: a return address that no call put there. What looks like one but is none: the restorer of a signal
  // handler and the start of a context (both are pushed by hand and entered by `ret`), and a call that a patch displaced.
  void check_call_before(Place& place) {
    uint64_t before;
    if (place.kind == Kind::signal_return || place.reason == Reason::recovery_failed) return;
    if (place.image && (!read_code(place.image, place.code.pc - 8, &before) || Code<Isa>::may_end_call(before))) return;
    Place exact = look_up({place.code.pc, false});
    bool starts_here = (exact.kind == Kind::signal_return || exact.kind == Kind::outermost) && is_start(exact);
    if (starts_here && exact.reason == Reason::reliable) {
      place = exact;
    } else if (place.image && place.kind != Kind::outermost && !lies_in_patch(place.code.lookup())) {
      place.reason = Reason::ra_not_after_call;
    }
  }

  bool lies_in_patch(Addr pc) {
    constexpr uint64_t kLongestPatch = 5 + 15 - 1;
    return arena_.detour_of_patch(pc, kLongestPatch) != nullptr;
  }

  // x86-64: an instruction that is about to return proves where the return address is and that every saved register is
  // restored. It repairs rows that lag behind (compilers leave rules of rbp in force after `leave`); a row that puts the
  // return address elsewhere is refuted, unless the word at sp is no return address (a jump made by push and ret).
  void check_leaving_insn(Place& place, Addr sp) {
    if constexpr (Code<Isa>::kKeyIsSlot) {
      const Row& row = *place.row;
      uint64_t at, top, before;
      bool plain = row.cfa_kind == CfaKind::reg_offset && row.cfa_reg == Isa::kSp && row.cfa_offset == 8;
      if (plain && place.simple && row.saved[0].kind == ValueKind::same) return;
      if (row.flags & kRowSignalFrame || !read_code(place.image, place.code.pc, &at)) return;
      if (read_code(place.image, place.code.pc - 8, &before) && Code<Isa>::is_eh_return(before, at))
        place.reason = Reason::special_code;
      if (!Code<Isa>::is_return(at)) return;
      if (plain && row.ra_kind == ValueKind::at_cfa && row.ra_offset == -8) {
        place.row = &kPushedRows<Isa>[0], place.image = nullptr, place.simple = true;
        if (place.reason == Reason::row_refuted) place.reason = Reason::reliable;
        return;
      }
      place.of_this_stack = true;
      if (!memory_.read(sp, &top)) return;
      const ImageEntry* image = arena_.text(Addr(top) - 1);
      if (!image || !read_code(image, Addr(top) - 8, &before)) return;
      if (Code<Isa>::may_end_call(before)) place.reason = Reason::no_table_row;
    }
  }

  ArenaView arena_;
  RowCache* cache_;
  Memory& memory_;
};

}  // namespace sonde
