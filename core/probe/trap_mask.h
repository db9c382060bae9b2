// While traps are in use SIGTRAP is blocked in no thread, whatever the program wants; here is what it wants. A thread that
// blocks SIGTRAP has a state: that it does, and the SIGTRAP that would be pending.
//
// Private memory that fork copies. A state belongs to {thread pointer, thread id}: the child of a vfork, or any child that
// shares memory, has its parent's thread pointer but another id, and gets a state of its own that begins as its parent's;
// so does a forked child, which finds its parent's state in its copy. A thread without a state blocks nothing.
//
// When the agent or the host has taken the traps out, nothing of this is needed any more: at its next call about its mask,
// or its next handler, a thread hands what it blocks over to the kernel. From then on such calls and handlers are the
// kernel's alone and take no stack of the agent's, which matters on the small signal stacks that traps are taken out for.
//
// A state is changed by its own thread only, in single stores that a handler of the same thread may interrupt. Signal-safe.
#pragma once

#include "core/probe/control.h"
#include "core/probe/signal_abi.h"

namespace sonde {

struct TrapMask {
  uint64_t thread_pointer;
  uint32_t tid;  // 0: free
  uint32_t pid;
  bool blocked;  // the program blocks SIGTRAP
  bool waiting;  // in a call that has a mask of its own (sigsuspend, ppoll): `blocked` is by that mask,
  bool saved;  // and this the state before
  bool window;  // about to exec: the kernel has the true mask
  bool held;  // `pending` is a SIGTRAP that waits
  bool own_action;  // of a child that shares memory: `action` instead of AgentControl::program_trap
  KernelSigaction action;
  SignalInfo pending;
};

// Traps exist, and the agent may make the system calls that their being unnoticed takes.
inline bool traps_in_use() {
  uint32_t flags = __atomic_load_n(&sonde_agent_control.flags, __ATOMIC_RELAXED);
  return (flags & (kControlTraps | kControlNoSystemCalls)) == kControlTraps;
}

// In use still, but no trap stands anywhere and none ever will.
inline bool traps_gone() {
  constexpr uint32_t kAll = kControlTraps | kControlTrapsGone;
  uint32_t flags = __atomic_load_n(&sonde_agent_control.flags, __ATOMIC_RELAXED);
  return (flags & (kAll | kControlNoSystemCalls)) == kAll;
}

// With the traps gone: the calling thread blocks SIGTRAP by the kernel's mask from now on, if it blocks it, and what was held
// is pending. context: of the handler that has just begun, or of the trap; null: of the running code.
void hand_mask_over(SignalContext* context);
// In the kernel.
void block_trap();

// The calling thread's state; null: it blocks nothing. `make`: null only if there is no room.
TrapMask* trap_mask(bool make = false);
bool trap_blocked();
void set_trap_blocked(bool blocked);
// The state goes with its thread, or with the program that execve replaces.
void forget_trap_mask();
// The SIGTRAP that was held is sent now, if nothing blocks it any more.
void deliver_held();
// Sends the calling thread a SIGTRAP as it came.
void send_trap(const SignalInfo* info);
bool in_exec_window();

// A handler is about to run: its context shows what the program blocked, and while it runs that and the action's mask hold.
void enter_handler(SignalContext* context, bool blocks_trap);
// It has returned: what the context says now is blocked. window: as in_exec_window() was when it was entered.
void leave_handler(SignalContext* context, bool window);

// The process that the agent's private memory belongs to; a child that shares memory is another.
uint32_t owner_pid();
bool is_sharing_child();

// What the program wants done with SIGTRAP.
KernelSigaction program_trap();
void set_program_trap(const KernelSigaction& action);

}  // namespace sonde
