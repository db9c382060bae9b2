// The truth about one thread's stack, kept aside while the thread is single-stepped: what its instructions and its signals
// do to pc and sp, and nothing else. No unwind table, no frame pointer and none of sonde's walker has a part in it.
//
//   call                  pushes: its slot and the address behind it
//   ret, jumps            take away what lies below sp by then: returns, longjmp, frames that an exception left
//   where calls push nothing (AArch64) sp is the same before a call, in a function without a frame, and behind its return. A
//                         jump to where the innermost call returns to, with the sp that it was made with, is its return; one
//                         to where any call of this function has returned before (setjmp) leaves those at that sp. What jumps
//                         behind a switch of stacks ends the call that had left the stack
//   a signal              pushes twice: the interrupted pc, and the restorer that the handler returns to
//   sp set far away       another stack (a coroutine's); what was called on the one left waits until sp is back there
//
// Between an instruction that takes a return address off the stack without returning (longjmp has loaded sp, a pop) and the
// jump that follows nobody can say what the stack is: unknown, and counted as such.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_set>
#include <vector>

namespace sonde::stepping {

enum class Effect : uint8_t { other, call, ret, jump_indirect, system_call, sets_sp };

struct Insn {
  uint8_t length = 0;
  Effect effect = Effect::other;
  bool repeats = false;  // rep: a step is one round of it
};

// Where a call leaves its return address.
enum class Return : uint8_t { on_stack, in_register };

struct Call {
  uint64_t slot;  // of the return address, or sp at the function's entry; interrupted: the kernel's frame
  uint64_t pc;  // where it returns to, or was interrupted
  uint64_t caller_sp;
  bool interrupted = false;
  bool adopted = false;  // was there already when stepping began
};

class Shadow {
 public:
  explicit Shadow(Return where = Return::on_stack) : pushes_(where == Return::on_stack) {}
  bool pushes() const { return pushes_; }

  // Nobody called the code that stands at this sp.
  void begin(uint64_t stack_end);
  // What was there before, outermost first.
  void begin(uint64_t stack_end, std::vector<Call> calls);

  // One instruction that stood at pc with sp; now the thread stands at new_pc with new_sp.
  void stepped(const Insn& insn, uint64_t pc, uint64_t sp, uint64_t new_pc, uint64_t new_sp);
  // The kernel has made a frame for a handler, which stands at its first instruction with sp at `new_sp`.
  void interrupted(uint64_t pc, uint64_t sp, uint64_t new_sp, uint64_t restorer);
  // rt_sigreturn was carried out.
  void signal_returned(uint64_t new_sp);

  bool known() const { return limbo_ == 0 && !lost_; }
  // Whether the outermost of calls() was made by code that nobody called. Not on a stack that the program laid out itself.
  bool bottom_known() const { return current_.bottom_known; }
  std::span<const Call> calls() const { return current_.calls; }  // outermost first

  uint64_t stack_switches = 0, abandoned = 0;
  // Adopted calls that returned to where they were said to, and others that returned elsewhere.
  uint64_t adopted_returned = 0, adopted_false = 0;

 private:
  struct Strand {
    std::vector<Call> calls;
    uint64_t sp = 0;  // where it was left
    uint64_t end = 0;  // above its highest address, as far as is known
    bool bottom_known = false;
  };
  void switches(uint64_t sp, uint64_t new_sp);
  size_t dead(const Insn& insn, uint64_t sp, uint64_t new_sp) const;
  size_t left_at(const Insn& insn, uint64_t new_pc, uint64_t new_sp);

  bool pushes_;
  Strand current_;
  std::vector<Strand> waiting_;
  size_t limbo_ = 0;  // so many of the innermost calls are off the stack without a return
  bool lost_ = false;
  bool switched_ = false;  // stacks, and nothing has been jumped to since
  std::unordered_set<uint64_t> returned_to_;  // pcs; not needed where calls push
};

}  // namespace sonde::stepping
