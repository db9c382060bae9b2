// The agent takes the traps out of its process by itself, without the host, where a trap could no longer be survived. Removing
// a trap byte is safe while other threads run: who has just met it still finds its site. Signal-safe.
#pragma once

#include <cstdint>

#include "core/event/session.h"
#include "core/probe/signal_abi.h"

namespace sonde {

void disarm_traps(DisarmCause cause);
// A stack_t that the program wants as its alternate stack, wherever the pointer may lead: too small for a trap in a handler?
// context: of the trap that brought the call here, or null.
void mind_stack_size(uint64_t stack, SignalContext* context);
// The same for the stack of a ucontext_t, which makecontext() is to make a coroutine of: it must have room for one trap.
void mind_coroutine(uint64_t coroutine, SignalContext* context);
// Bytes that the kernel needs at most for a signal frame on this processor: somewhat above AT_MINSIGSTKSZ.
uint64_t signal_frame_bytes();
// The calling thread is about to lose the time stamp counter.
void forbid_ticks();

}  // namespace sonde
