// From events in order of entry to nested calls. A call's parent is the innermost call of the same stack that was
// running when it was entered; a return slot lies deeper (at a lower address) than its caller's.
//
//  - One thread may run on several stacks (fibers, signal stacks). The next higher slot among the running calls tells
//    whose stack a call is on, if it is near enough to be a caller's frame; otherwise the call begins a stack of its own
//    and stands at the root. Slots are compared modulo 2^32 and only within such distances.
//  - A tail call takes over its caller's slot, and one return ends both: it is shown within its caller, marked.
//  - An abandoned call (longjmp) is noticed late. It ended at the latest when its caller did, when the next call was
//    entered at its slot or above on its stack, or when it was noticed; the earliest of these is taken as its end.
//  - A handler on the alternate signal stack that is left by siglongjmp, and what it called, never end: nothing comes to
//    their slots. They have ended when the thread is seen to go on where it was interrupted, on a stack that had calls
//    before. Without knowledge of that stack (it is known of threads that run at the end) such calls look like those of a
//    fiber that is suspended for ever, and are unfinished as these.
//  - A fiber that another thread goes on with: its calls are shown in the thread that they ended in.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "host/report/order.h"

namespace sonde::host {

// A call that runs at the current point of the replay.
struct OpenCall {
  Event event;
  uint64_t end = 0;  // event.exit, or earlier where that cannot be true; final when the call is left
  uint64_t children = 0;  // ticks of direct children that were left
  ExitKind kind = ExitKind::returned;
  bool entry_only = false;  // its return was not hooked: no duration
  bool point = false;  // not even a call: an instruction was reached
  bool tail = false;  // entered by a jump from its parent
  bool outermost = true;  // no other call of the same function runs on this stack
  uint32_t depth = 0;  // 0: root
  uint64_t number = 0;  // how many calls of its thread were entered before
  uint32_t context = 0;  // for the visitor

  // Counts in the process that this one was forked from, and is here only because calls came from it.
  bool inherited() const { return event.kind == ExitKind::inherited; }
  // When it ended nobody knows: its thread was gone when that was noticed. Or it began elsewhere.
  bool endless() const { return event.kind == ExitKind::thread_ended || inherited(); }
  bool timed() const { return !entry_only && !endless(); }

  uint64_t duration() const { return endless() ? children : end - event.entry; }  // at least that of its callees
  uint64_t self() const { return duration() - children; }
};

class CallVisitor {
 public:
  virtual ~CallVisitor() = default;
  // In order of time; parent is null for a root. References are valid during the callback.
  virtual void enter(uint32_t thread, OpenCall& call, OpenCall* parent) = 0;
  virtual void leave(uint32_t thread, OpenCall& call, OpenCall* parent) = 0;
  // The stack recorded when `call` was entered; null if its call record is missing.
  virtual void stack(uint32_t, OpenCall* call, const Event&) {}
};

// Nests the events of all threads; feed in order of entry per thread, then finish.
class CallNester {
 public:
  CallNester(const Recording& recording, CallVisitor& visitor);
  ~CallNester();
  void add(uint32_t thread, const Event& event);
  void finish(uint32_t thread);  // all its calls are left
  void finish();

 private:
  struct Thread;
  std::vector<std::unique_ptr<Thread>> threads_;
  const Recording& recording_;
  CallVisitor& visitor_;
};

}  // namespace sonde::host
