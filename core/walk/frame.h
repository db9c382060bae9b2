// One frame of a walk: an address, where it came from, and whether to believe it.
#pragma once

#include <cstdint>

#include "core/base/addr.h"

namespace sonde {

// Where a pc came from. Letters as the kernel's arm64 unwinder prints them (semantics: AF4).
enum class Source : uint8_t {
  frame,    // ' ' the caller, by the callee's row
  caller,   // 'C' given by whoever asked for the walk
  task,     // 'T' saved state of a thread that is not running
  regs_pc,  // 'P' interrupted pc from a signal frame or a stopped thread's registers: exact
};

enum RecoveredFlags : uint8_t {
  kRecoveredReturn = 1,  // 'K' the slot held a return trampoline; the address comes from its entry
  kRecoveredGraph = 2,   // 'F' the same through another tool's return stack
  kInDetour = 4,         // pc lay in a detour and is shown as the probed function's
  kMarked = 8,           // best-effort guess, never part of a reliable walk
};

// Why a frame is what it is. `reliable` and `end` are the only good ones.
enum class Reason : uint8_t {
  reliable = 0,
  end,                 // outermost frame, positively recognised
  unknown_code,        // pc in no known image
  special_code,        // hand-written code without an exemption of its own
  boundary_next,       // beyond the one certain step over a signal frame, and no exact row
  no_table_row,        // image known, but no row covers pc, or the one that does cannot be carried out
  fp_mismatch,         // the row needs the frame pointer, which points to no frame here
  ra_not_after_call,   // no call instruction before the return address
  recovery_failed,     // a trampoline whose entry does not match
  stack_out_of_range,  // memory of the frame cannot be read, or lies on no stack of the thread
  non_progress,        // sp did not grow
  depth_limit,         // cut after the frames asked for
  buffer_full,
  foreign_stack,       // a stack was entered twice
  null_pc,             // called through a null pointer; the caller is assumed at the slot
  row_refuted,         // `sonde check` proved that the row is wrong
};
constexpr unsigned kReasons = 16;  // as many as a packed frame can tell apart

struct Frame {
  Addr pc;  // as it is: a return address is not decremented
  Addr cfa;  // 0 where unknown
  Source source = Source::frame;
  Reason reason = Reason::reliable;
  uint8_t recovered = 0;  // RecoveredFlags
  bool is_return = false;

  CodeAddr code() const { return {pc, is_return}; }
};

// The one predicate of policy: may this frame be believed.
constexpr bool is_reliable(Reason reason) { return reason == Reason::reliable || reason == Reason::end; }
constexpr bool is_reliable(const Frame& f) { return is_reliable(f.reason) && !(f.recovered & kMarked); }

// A frame in a stack record: pc in bits 0..47, source 48..49, is_return 50, reason 52..55, recovered 56..59.
constexpr uint64_t pack_frame(const Frame& f) {
  return (f.pc.value & 0xffffffffffff) | uint64_t(f.source) << 48 | uint64_t(f.is_return) << 50 |
         uint64_t(f.reason) << 52 | uint64_t(f.recovered & 15) << 56;
}
constexpr Frame unpack_frame(uint64_t word) {
  Frame f;
  f.pc = Addr(word & 0xffffffffffff);
  f.source = static_cast<Source>(word >> 48 & 3);
  f.is_return = word >> 50 & 1;
  f.reason = static_cast<Reason>(word >> 52 & 15);
  f.recovered = word >> 56 & 15;
  return f;
}

}  // namespace sonde
