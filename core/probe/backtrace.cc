#include "core/probe/backtrace.h"

#include "core/probe/entries.h"
#include "core/probe/personality.h"

namespace sonde {

extern "C" {
extern const char __ehdr_start __attribute__((visibility("hidden")));  // the linker's: where this image begins and ends
extern const char _end __attribute__((visibility("hidden")));
extern const char sonde_backtrace_stub __attribute__((visibility("hidden")));
}

namespace {

struct Walk {
  TraceFunction callback;
  void* argument;
};

bool is_engine(uint64_t pc) {
  return pc >= reinterpret_cast<uint64_t>(&__ehdr_start) && pc < reinterpret_cast<uint64_t>(&_end);
}

// _Unwind_Trace_Fn of the Itanium C++ ABI's level I extensions: 0 (_URC_NO_REASON) goes on to the next frame.
int show_frame(void* context, void* walk_pointer) {
  auto* walk = static_cast<Walk*>(walk_pointer);
  const UnwinderFunctions* unwinder = find_unwinder(reinterpret_cast<uint64_t>(__builtin_return_address(0)));
  if (unwinder && is_engine(reinterpret_cast<uint64_t (*)(void*)>(unwinder->get_ip)(context))) return 0;
  return walk->callback(context, walk->argument);
}

}  // namespace

void divert_backtrace(EntryFrame* frame, uint64_t resume) {
  frame->site = resume;
  frame->return_point = reinterpret_cast<uint64_t>(&sonde_backtrace_stub);
}

uint64_t divert_backtrace(SignalContext* interrupted, uint64_t resume) {
  interrupted->rdx = resume;
  return reinterpret_cast<uint64_t>(&sonde_backtrace);
}

extern "C" int sonde_backtrace(TraceFunction callback, void* argument, int (*resume)(TraceFunction, void*)) {
  Walk walk{callback, argument};
  int result = resume(show_frame, &walk);
  asm volatile("" : : "r"(&walk) : "memory");  // a real call, not a jump: walk must outlive it
  return result;
}

}  // namespace sonde
