// The hit path for whatever is not usual. Entered from assembly only: core/native/*/entry.S, trampolines.S and trap.S, where
// the usual hit and the usual return are done by hand.
//
//   detour -> sonde_entry -> sonde_on_entry(frame)           takes an entry, hijacks the return slot
//   return -> trampoline, which corrects the slot -> sonde_on_return(T, ticks, sp)     writes the call record, frees the entry
//   unwinding -> sonde_personality -> sonde_landing_pad -> sonde_on_unwind(entry)     the same for exits by unwinding
//
// No system call, no lock, no allocation; no libc; nothing of the program's state is touched but the return slot.
#pragma once

#include <cstdint>

#include "core/event/session.h"
#include "core/probe/entries.h"
#include "core/probe/signal_abi.h"
#include "core/probe/stack_capture.h"

namespace sonde {

// What sonde_entry saved: the picture in entry.S, from sp upwards.
struct EntryFrame {
  uint64_t r11, r10, r9, r8, rdi, rsi, rdx, rcx, flags, rax;
  uint64_t return_point, site;
  uint64_t red_zone[16];
  uint64_t slot[];  // S

  uint64_t* site_sp() { return slot; }
};
static_assert(sizeof(EntryFrame) == 224);

// Registers that functions preserve, as trampolines.S pushes them: on a return's full path they are still the caller's.
struct CalleeSaved {
  uint64_t r15, r14, r13, r12, rbx, rbp;
};

// Calls that tell the engine by their arguments what it must mind. context: of the trap that brought the call here, or null.
constexpr uint32_t kSitesByArguments = kSitePrctl | kSiteSyscall | kSiteSigaltstack | kSiteMakecontext;
__attribute__((noinline)) void argument_event(uint32_t flags, uint64_t first, uint64_t second, SignalContext* context);

// One hit of a site at a function's entry by a trap, where regs.sp is the address of the return slot.
void hit_site(SessionHeader* session, uint32_t site_number, const SiteRegs& regs);

extern "C" {
// Returns the trampoline through which the function is to be entered, or 0: by a jump.
__attribute__((visibility("hidden"), hot)) uint64_t sonde_on_entry(EntryFrame* frame, uint64_t rbp, uint64_t rbx,
                                                                   uint64_t r12, uint64_t r13, uint64_t r14,
                                                                   uint64_t r15);
__attribute__((visibility("hidden"), hot)) uint64_t sonde_on_return(uint64_t trampoline, uint64_t now, uint64_t own_sp,
                                                                    const CalleeSaved* saved);
// sonde_on_return: whether it was entered by a jump. sonde_on_unwind: the _Unwind_Resume of the unwinder that is at work.
__attribute__((visibility("hidden"))) uint64_t sonde_on_unwind(ReturnEntry* entry, uint64_t own_sp,
                                                               const CalleeSaved* saved);
}

}  // namespace sonde
