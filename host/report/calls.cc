#include "host/report/calls.h"

#include <algorithm>
#include <map>
#include <optional>
#include <unordered_map>

namespace sonde::host {

namespace {

// In units of slots (8 bytes). How far below its caller's slot a callee's may lie: the frames in between.
constexpr int64_t kFrameOfRunning = (4 << 20) / 8;     // on the stack that ran last: alloca and large arrays
constexpr int64_t kFrameOfSuspended = (16 << 10) / 8;  // fibers' stacks may lie side by side, from 16 KiB each
constexpr int64_t kFrameOfFirst = (1 << 20) / 8;       // the thread's first stack, suspended
constexpr int64_t kStack = (8 << 20) / 8;              // how far a longjmp may take a stack back

// Ends that were not seen when they happened; the true end may be earlier.
bool end_is_late(ExitKind kind) {
  return kind == ExitKind::abandoned || kind == ExitKind::unfinished || kind == ExitKind::thread_ended ||
         kind == ExitKind::inherited;
}

int64_t slots_above(const OpenCall& open, const Event& event) {
  return static_cast<int32_t>(open.event.slot - event.slot);
}

struct Stack {
  std::vector<OpenCall> open;  // outermost first; ends do not increase
  std::unordered_map<uint32_t, uint32_t> running;  // site -> open calls
  bool first = false;
  bool signal = false;  // its calls are on the thread's alternate signal stack
  uint64_t replaced = 0;  // entry ticks of its outermost call, if that was just found to be left; 0: none was
};

// How a call would continue a stack: after `dead` of its innermost calls, at this distance below the one then innermost.
struct Fit {
  size_t dead = 0;
  int64_t distance = 0;
  bool empties = false;  // nothing would remain: the call becomes the root of this stack
};

std::optional<Fit> fit(const Stack& stack, const Event& event, int64_t limit) {
  bool late = end_is_late(event.kind);
  for (size_t dead = 0; dead < stack.open.size(); ++dead) {
    const OpenCall& inner = stack.open[stack.open.size() - 1 - dead];
    int64_t distance = slots_above(inner, event);
    bool contained = event.exit <= inner.end || late;
    bool inner_late = end_is_late(inner.kind);
    if (distance > 0) {
      if (distance > limit) return std::nullopt;
      if (contained) return Fit{dead, distance};
      if (!inner_late) return std::nullopt;
    } else if (distance == 0) {
      bool taken_over = contained && inner.kind != ExitKind::abandoned;
      if (taken_over) return Fit{dead, 0};
      if (!inner_late) return std::nullopt;
    } else if (!inner_late || -distance > kStack) {
      return std::nullopt;
    }
  }
  return Fit{stack.open.size(), kStack, true};
}

}  // namespace

struct CallNester::Thread {
  std::vector<std::unique_ptr<Stack>> stacks;
  Stack* current = nullptr;
  std::multimap<uint32_t, Stack*> suspended;  // by the slot of their innermost call
  std::vector<Stack*> spare;  // without open calls
  std::vector<Stack*> signal_stacks;  // with calls on the signal stack; never among `suspended`
  uint64_t entered = 0;
  Stack* last_stack = nullptr;  // of the call entered last, for its stack record

  Stack* add_stack() {
    if (!spare.empty()) {
      Stack* stack = spare.back();
      stack->replaced = 0;
      spare.pop_back();
      return stack;
    }
    stacks.push_back(std::make_unique<Stack>());
    stacks.back()->first = stacks.size() == 1;
    return stacks.back().get();
  }
};

namespace {

class Placer {
 public:
  Placer(CallVisitor& visitor, uint32_t thread) : visitor_(visitor), thread_(thread) {}

  void leave_innermost(Stack& stack, uint64_t end) {
    OpenCall& call = stack.open.back();
    OpenCall* parent = stack.open.size() > 1 ? &stack.open[stack.open.size() - 2] : nullptr;
    if (end < call.end) cut(call, end);
    if (parent) parent->children += call.duration();
    visitor_.leave(thread_, call, parent);
    auto running = stack.running.find(call.event.site);
    if (--running->second == 0) stack.running.erase(running);
    if (!parent) stack.signal = false, stack.replaced = end == ~0ull ? 0 : call.event.entry;
    stack.open.pop_back();
  }

  void leave_ended(Stack& stack, uint64_t now) {
    while (!stack.open.empty() && stack.open.back().end <= now) leave_innermost(stack, ~0ull);
  }

  void enter(Stack& stack, const Event& event, uint64_t number, bool point) {
    stack.replaced = 0;
    OpenCall* parent = stack.open.empty() ? nullptr : &stack.open.back();
    OpenCall call{event, event.exit};
    call.event.frames = {};
    call.number = number;
    call.kind = event.kind;
    call.entry_only = event.type == RecordType::entry;
    call.point = point;
    if (parent) {
      if (call.end > parent->end) cut(call, parent->end);
      call.tail = !point && parent->event.slot == event.slot;
      call.depth = parent->depth + 1;
    }
    call.outermost = ++stack.running[event.site] == 1;
    stack.open.push_back(call);
    parent = call.depth ? &stack.open[stack.open.size() - 2] : nullptr;
    visitor_.enter(thread_, stack.open.back(), parent);
  }

 private:
  static void cut(OpenCall& call, uint64_t end) {
    call.end = end;
    if (!call.inherited()) call.kind = ExitKind::abandoned;
  }

  CallVisitor& visitor_;
  uint32_t thread_;
};

// Leaves the calls of a suspended stack that have ended; true if there were any.
bool refresh(std::multimap<uint32_t, Stack*>& suspended, std::multimap<uint32_t, Stack*>::iterator at,
             std::vector<Stack*>& spare, Placer& placer, uint64_t now) {
  Stack* stack = at->second;
  size_t before = stack->open.size();
  placer.leave_ended(*stack, now);
  if (stack->open.size() == before) return false;
  suspended.erase(at);
  if (stack->open.empty()) spare.push_back(stack);
  else suspended.emplace(stack->open.back().event.slot, stack);
  return true;
}

// All calls of the suspended stack were abandoned, and the event is a new outermost call there.
bool replaces(const Stack& stack, const Event& event) {
  for (const OpenCall& call : stack.open)
    if (call.kind != ExitKind::abandoned) return false;
  return std::abs(slots_above(stack.open.front(), event)) <= kFrameOfSuspended;
}

// The suspended stack that the event continues, if one is nearer than `distance`; taken out of `suspended`. That is the
// one whose innermost call lies next above, or next below if that call was left by a longjmp meanwhile.
Stack* resume(std::multimap<uint32_t, Stack*>& suspended, std::vector<Stack*>& spare, Placer& placer,
              const Event& event, int64_t distance) {
  auto best = suspended.end();
  size_t dead = 0;
  auto consider = [&](std::multimap<uint32_t, Stack*>::iterator at) {
    auto match = fit(*at->second, event, at->second->first ? kFrameOfFirst : kFrameOfSuspended);
    if (!match || match->distance >= distance || (match->empties && !replaces(*at->second, event))) return;
    best = at;
    dead = match->dead;
    distance = match->distance;
  };
  while (!suspended.empty()) {
    auto above = suspended.lower_bound(event.slot);
    auto below = above == suspended.begin() ? std::prev(suspended.end()) : std::prev(above);
    if (above == suspended.end()) above = suspended.begin();  // slots wrap around
    if (refresh(suspended, above, spare, placer, event.entry)) continue;
    if (below != above && refresh(suspended, below, spare, placer, event.entry)) continue;
    consider(above);
    if (below != above) consider(below);
    break;
  }
  if (best == suspended.end()) return nullptr;
  Stack* stack = best->second;
  suspended.erase(best);
  for (; dead > 0; --dead) placer.leave_innermost(*stack, event.entry);
  return stack;
}

bool on_signal_stack(const RecordedThread& thread, const Event& event) {
  const AddrRange& range = thread.signal_stack;
  return range.size() != 0 && event.slot - slot_key(range.begin.value) < range.size() / 8;
}

// The calls on a signal stack that a handler continues, if there are any.
Stack* resume_signal(std::vector<Stack*>& signal_stacks, Placer& placer, const Event& event) {
  for (Stack* stack : signal_stacks) {
    placer.leave_ended(*stack, event.entry);
    auto match = fit(*stack, event, kFrameOfRunning);
    if (stack->open.empty() || !match) continue;
    for (; match->dead > 0; --match->dead) placer.leave_innermost(*stack, event.entry);
    return stack;
  }
  return nullptr;
}

// The thread goes on with a stack that had calls before those of a signal stack: none of these returns, so a jump has left
// them.
bool is_left(const Stack& signal, const Stack& now) {
  uint64_t since = now.open.empty() ? now.replaced : now.open.front().event.entry;
  return !signal.open.empty() && since != 0 && since < signal.open.front().event.entry &&
         std::ranges::all_of(signal.open, [](const OpenCall& call) { return end_is_late(call.kind); });
}

}  // namespace

CallNester::CallNester(const Recording& recording, CallVisitor& visitor)
    : threads_(recording.threads.size()), recording_(recording), visitor_(visitor) {}
CallNester::~CallNester() = default;

void CallNester::add(uint32_t index, const Event& event) {
  if (!threads_[index]) threads_[index] = std::make_unique<Thread>();
  Thread& thread = *threads_[index];
  Placer placer(visitor_, index);
  if (event.type == RecordType::stack) {
    OpenCall* call = nullptr;
    if (thread.last_stack)
      for (auto at = thread.last_stack->open.rbegin(); at != thread.last_stack->open.rend() && !call; ++at) {
        if (at->event.entry != event.entry) break;
        if (at->event.site == event.site) call = &*at;
      }
    return visitor_.stack(index, call, event);
  }
  if (!thread.current) thread.current = thread.add_stack();
  Stack* stack = thread.current;
  bool signal = on_signal_stack(recording_.threads[index], event);
  placer.leave_ended(*stack, event.entry);
  std::optional<Fit> here;
  if (stack->open.empty() || stack->signal == signal) here = fit(*stack, event, kFrameOfRunning);
  bool fits_here = here && !stack->open.empty();
  Stack* other = nullptr;
  if (!signal) other = resume(thread.suspended, thread.spare, placer, event, fits_here ? here->distance : kStack + 1);
  else if (!fits_here) other = resume_signal(thread.signal_stacks, placer, event);
  if (here && !other) {
    for (size_t i = 0; i < here->dead; ++i) placer.leave_innermost(*stack, event.entry);
  } else {
    if (stack->open.empty()) thread.spare.push_back(stack), std::erase(thread.signal_stacks, stack);
    else if (!stack->signal) thread.suspended.emplace(stack->open.back().event.slot, stack);
    thread.current = stack = other ? other : thread.add_stack();
  }
  std::erase_if(thread.signal_stacks, [&](Stack* of) {
    if (of == stack) return of->open.empty();
    if (!signal && is_left(*of, *stack))
      while (!of->open.empty()) placer.leave_innermost(*of, event.entry);
    if (of->open.empty()) thread.spare.push_back(of);
    return of->open.empty();
  });
  if (signal && stack->open.empty()) {
    stack->signal = true;
    thread.signal_stacks.push_back(stack);
  }
  bool point = event.site < recording_.sites.size() && recording_.sites[event.site].point;
  placer.enter(*stack, event, thread.entered++, point);
  thread.last_stack = stack;
}

void CallNester::finish(uint32_t index) {
  if (!threads_[index]) return;
  Placer placer(visitor_, index);
  for (auto& stack : threads_[index]->stacks)
    while (!stack->open.empty()) placer.leave_innermost(*stack, ~0ull);
  threads_[index].reset();
}

void CallNester::finish() {
  for (uint32_t i = 0; i < threads_.size(); ++i) finish(i);
}

}  // namespace sonde::host
