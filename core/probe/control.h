// What the host and the agent agree on beside the session mapping. The host finds these objects by their names in the
// agent file's .symtab (they are hidden, so nothing in the target can bind to them) and writes them while the target
// is stopped, before the first site is armed. No code of the agent runs at load time.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/event/session.h"
#include "core/unwind/arena.h"  // kTrampolines

namespace sonde {

constexpr uint32_t kAgentVersion = 1;
constexpr uint32_t kMaxThreads = 8192;
constexpr unsigned kMaxContextLevels = 8;
constexpr unsigned kMaxUnwinders = 64;
constexpr unsigned kMaxMapped = 1024;

// The functions of one unwinder (libgcc, LLVM), wherever it is linked in. The personality of the return trampolines uses
// those of the image that calls it.
struct UnwinderFunctions {
  uint64_t begin, end;  // of the image that holds them
  uint64_t get_ip, set_ip, set_gr, resume;
};

// Where a trap stands for a patch: `pc` is the address of the one-byte trap instruction.
struct TrapSite {
  uint64_t pc;
  uint32_t site;
  uint32_t original;  // the byte that the trap stands for
};
// Sorted by pc. Written completely before AgentControl::traps points to it; a new table replaces the old one.
struct TrapTable {
  uint64_t count;
  TrapSite sites[];
};

// The kernel's struct sigaction.
struct KernelSigaction {
  uint64_t handler, flags, restorer, mask;
};

enum ControlFlags : uint32_t {
  kControlNoSystemCalls = 1,  // the target is under seccomp: the agent makes only the system calls it cannot do without
  kControlTraps = 2,  // trap sites exist: SIGTRAP is kept deliverable behind the program's back
  // Set by the agent, the last two by the host too.
  kControlNoTicks = 4,  // the time stamp counter is forbidden to a thread: it records nothing, no new thread does
  kControlDisarmed = 8,  // the traps are being taken out or have been; none may be put in again
  kControlTrapsGone = 16,  // no trap is left: what the program blocks, the kernel blocks too (trap_mask.h)
  // Set by the host while not every system call of a program that ran already comes by the agent.
  kControlBareHandlers = 32,  // the program's handlers themselves stand in the kernel's table (handlers.h)
};

// Thread state lives in pages that the host maps MADV_WIPEONFORK; bytes needed: thread_area_bytes() in stack_capture.h.
struct AgentControl {
  uint32_t version;  // kAgentVersion, constant; the host checks it
  uint32_t reserved;
  SessionHeader* session;  // null: nothing recorded
  void* thread_area;
  const struct TableArena* tables;  // core/unwind/arena.h; null: no stacks in the target
  uint64_t main_stack_end;  // end of the main thread's stack mapping
  uint64_t loader_debug;  // address of the loader's struct r_debug; 0: none
  uint32_t flags;  // ControlFlags
  uint32_t unwinder_count;
  UnwinderFunctions unwinders[kMaxUnwinders];
  const TrapTable* traps;  // null: no trap sites
  KernelSigaction program_trap;  // what the program itself wants done with SIGTRAP
  KernelSigaction host_actions[2];  // for system calls that the host has a stopped thread make
  // For a host that takes the agent out although it did not put it in (host/target/recover.cc).
  uint64_t handle;  // of dlopen; 0: the loader itself has loaded the agent
  uint32_t mapped_count;  // memory that was made for the engine; beyond kMaxMapped the place is not known
  uint32_t reserved_too;
  struct {
    uint64_t begin, end;
  } mapped[kMaxMapped];
};

// Names of the agent's objects for the host.
//   sonde_agent_control   AgentControl
//   sonde_entry           code: detours call it (core/native/x86_64/entry.S)
//   sonde_trap            code: SIGTRAP handler
//   sonde_trap_action     KernelSigaction: how to install it, see core/probe/trap.h
//   sonde_trampolines     code: kTrampolines x kTrampolineStride bytes
//   sonde_return_common   code: where return trampolines jump to
//   sonde_landing_pad     code: where unwinding enters hooked frames
//   sonde_entries         ReturnEntry[kTrampolines], same stride; sonde_calls, sonde_owners: what else is known of each (entries.h)
//   sonde_sum_calls       SumCall[kTrampolines] (core/event/sum.h), with FullPolicy::sum
//   sonde_handlers        code: kHandlers entrances in the place of signal handlers; sonde_handler_table: whose (handlers.h)
//   sonde_fresh_entries   uint32_t, entries from there on have never been used
//   sonde_hit_handlers    HitHandlers (core/probe/hit_handler.h)
extern "C" {
extern AgentControl sonde_agent_control __attribute__((visibility("hidden")));
}

}  // namespace sonde
