// Programs that take their own backtrace (glibc's backtrace(), a profiler, a sanitizer) call _Unwind_Backtrace. It walks
// through return trampolines like through any frame, and would show them to the program. A site on its entry sends the
// call through here, where the program's callback is replaced by one that leaves out every frame of the engine.
//
//   site -> sonde_entry -> (return point replaced) -> sonde_backtrace_stub -> sonde_backtrace(callback, argument, resume)
//           -> the function's displaced instructions and its body, called, not jumped to
#pragma once

#include "core/probe/hit.h"
#include "core/probe/signal_abi.h"

namespace sonde {

// Makes the hit return into sonde_backtrace_stub. resume: the displaced instructions' copy.
void divert_backtrace(EntryFrame* frame, uint64_t resume);
// The same for a hit by a trap: where the interrupted thread is to go on.
uint64_t divert_backtrace(SignalContext* interrupted, uint64_t resume);

using TraceFunction = int (*)(void* context, void* argument);
extern "C" __attribute__((visibility("hidden"))) int sonde_backtrace(TraceFunction callback, void* argument,
                                                                     int (*resume)(TraceFunction, void*));

}  // namespace sonde
