#include "core/probe/system_call.h"

#include "core/native/thread_pointer.h"
#include "core/probe/alternate_stack.h"
#include "core/probe/disarm.h"
#include "core/probe/handlers.h"
#include "core/probe/sandbox.h"
#include "core/probe/sum_calls.h"
#include "core/probe/trap.h"
#include "core/probe/user_memory.h"

namespace sonde {
namespace {

// What carries a call out has a frame of its own (noinline): the stack of each is what that call needs, not what the largest does.

uint64_t address_of(const void* object) { return reinterpret_cast<uint64_t>(object); }
int32_t as_int(uint64_t argument) { return static_cast<int32_t>(argument); }

int64_t unchanged(const ProgramCall& call) {
  const uint64_t* a = call.arguments;
  return system_call(static_cast<int64_t>(call.number), a[0], a[1], a[2], a[3], a[4], a[5]);
}

// ---- rt_sigaction(signal, action, old, bytes)

// The kernel's own SIGTRAP action says what a held SIGTRAP does to slow system calls: what the program's would.
void install_trap_action(const KernelSigaction& program) {
  KernelSigaction action = sonde_trap_action;
  if (program.handler > kIgnoreAction && !(program.flags & kSaRestart)) action.flags &= ~kSaRestart;
  system_call(__NR_rt_sigaction, kSigtrap, address_of(&action), 0, kMaskBytes);
}

[[gnu::noinline]] int64_t change_trap_action(const ProgramCall& call) {
  KernelSigaction before = program_trap(), wanted;
  uint64_t action = call.arguments[1], old = call.arguments[2];
  if (action) {
    if (!read_user_action(action, &wanted)) return kEfault;
    wanted.mask &= ~kUnblockable;
    wanted.flags &= kSaKnown;
    set_program_trap(wanted);
    install_trap_action(wanted);
    if (wanted.handler == kIgnoreAction && traps_in_use())
      if (TrapMask* state = trap_mask()) state->held = false;
  }
  if (!old) return 0;
  int64_t result = system_call(__NR_rt_sigaction, kSigtrap, 0, old, kMaskBytes);  // finds out whether it can be written
  if (result == 0) *reinterpret_cast<KernelSigaction*>(old) = before;
  return result;
}

[[gnu::noinline]] int64_t change_action(const ProgramCall& call) {
  uint64_t action = call.arguments[1], old = call.arguments[2];
  if (call.arguments[3] != kMaskBytes) return unchanged(call);
  if (as_int(call.arguments[0]) == kSigtrap && sonde_agent_control.flags & kControlTraps)
    return change_trap_action(call);
  KernelSigaction wanted;
  if (action) {
    if (!read_user_action(action, &wanted)) return kEfault;
    wrap_action(&wanted);
    action = address_of(&wanted);
  }
  int64_t result = system_call(__NR_rt_sigaction, call.arguments[0], action, old, kMaskBytes);
  if (result == 0 && old) unwrap_action(reinterpret_cast<KernelSigaction*>(old));
  return result;
}

// ---- masks

// Returns what it was.
uint64_t set_kernel_mask(uint64_t mask) {
  uint64_t before = 0;
  system_call(__NR_rt_sigprocmask, kSetMask, address_of(&mask), address_of(&before), kMaskBytes);
  return before;
}

// rt_sigprocmask(how, set, old, bytes) by a trap: the kernel restores the context's mask, so that is the one to change.
int64_t change_context_mask(SignalContext* context, bool blocked, uint64_t how, const uint64_t* set, uint64_t old) {
  uint64_t before = context->mask | (blocked ? kTrapBit : 0);
  if (set) {
    uint64_t wanted = *set & ~kUnblockable & ~kTrapBit;
    context->mask = how == kBlock ? context->mask | wanted : how == kUnblock ? context->mask & ~wanted : wanted;
  }
  if (!old) return 0;
  int64_t result = system_call(__NR_rt_sigprocmask, kBlock, 0, old, kMaskBytes);
  if (result == 0) *reinterpret_cast<uint64_t*>(old) = before;
  return result;
}

[[gnu::noinline]] int64_t change_mask(const ProgramCall& call) {
  uint64_t how = static_cast<uint32_t>(call.arguments[0]), set = call.arguments[1], old = call.arguments[2];
  uint64_t wanted = 0;
  if (call.arguments[3] != kMaskBytes || (set && how > kSetMask)) return unchanged(call);
  if (set && !read_user_word(set, &wanted)) return kEfault;
  TrapMask* state = trap_mask();
  bool blocked = state && state->blocked, then = blocked;
  if (set && (how == kSetMask || wanted & kTrapBit)) then = how != kUnblock && wanted & kTrapBit;
  if (then && !blocked) set_trap_blocked(true);
  uint64_t clean = wanted & ~kTrapBit;
  int64_t result;
  if (call.context) {
    result = change_context_mask(call.context, blocked, how, set ? &clean : nullptr, old);
  } else {
    result = system_call(__NR_rt_sigprocmask, how, set ? address_of(&clean) : 0, old, kMaskBytes);
    if (result == 0 && old && blocked) *reinterpret_cast<uint64_t*>(old) |= kTrapBit;
  }
  if (blocked && !then) set_trap_blocked(false), deliver_held();
  return result;
}

[[gnu::noinline]] int64_t ask_pending(const ProgramCall& call) {
  int64_t result = unchanged(call);
  TrapMask* state = trap_mask();
  if (result == 0 && call.arguments[1] && state && state->held)
    *reinterpret_cast<uint8_t*>(call.arguments[0]) |= uint8_t{kTrapBit};
  return result;
}

// rt_sigtimedwait(set, info, timeout, bytes): the kernel unblocks what is waited for itself, and takes it before any handler.
[[gnu::noinline]] int64_t wait_for_signal(const ProgramCall& call) {
  uint64_t set;
  TrapMask* state = trap_mask();
  if (!state || !state->held || call.arguments[3] != kMaskBytes || !read_user_word(call.arguments[0], &set) ||
      !(set & kTrapBit))
    return unchanged(call);
  // What is held becomes pending, so that the kernel hands it over. Nothing can come in between.
  uint64_t before = set_kernel_mask(~uint64_t{0});
  SignalInfo info = state->pending;
  state->held = false;
  send_trap(&info);
  int64_t result = unchanged(call);
  set_kernel_mask(before);
  return result;
}

// A call that waits with a mask of its own: `mask` is what stands there, `make` the call with a mask without SIGTRAP.
template <class Make>
int64_t wait_with_mask(uint64_t mask, Make make) {
  bool blocks = mask & kTrapBit;
  TrapMask* state = trap_mask(blocks);
  if (!state) return make(mask & ~kTrapBit);
  if (state->held && !blocks) {  // it ends the wait at once, unless it is ignored
    bool ignored = program_trap().handler == kIgnoreAction, before = state->blocked;
    state->blocked = false;
    deliver_held();
    state->blocked = before;
    if (!ignored) return kEintr;
  }
  state->saved = state->blocked;
  state->blocked = blocks;
  state->waiting = true;
  int64_t result;
  for (;;) {
    bool held = state->held;
    result = make(mask & ~kTrapBit);
    // Woken only to hold a SIGTRAP that the program blocks: it notices nothing.
    if (result != kEintr || !state->waiting || held || !state->held) break;
  }
  if (state->waiting) state->blocked = state->saved, state->waiting = false;
  deliver_held();
  return result;
}

// The mask's address and length stand in two arguments, the first being `at`.
[[gnu::noinline]] int64_t wait_by_arguments(const ProgramCall& call, unsigned at) {
  uint64_t mask;
  if (!call.arguments[at] || call.arguments[at + 1] != kMaskBytes || !read_user_word(call.arguments[at], &mask))
    return unchanged(call);
  return wait_with_mask(mask, [&](uint64_t clean) {
    ProgramCall own = call;
    own.arguments[at] = address_of(&clean);
    return unchanged(own);
  });
}

// The last argument points to both.
[[gnu::noinline]] int64_t wait_by_pair(const ProgramCall& call) {
  uint64_t pair[2], mask, at = call.arguments[5];
  if (!at || !read_user_word(at, &pair[0]) || !read_user_word(at + 8, &pair[1]) || !pair[0] || pair[1] != kMaskBytes ||
      !read_user_word(pair[0], &mask))
    return unchanged(call);
  return wait_with_mask(mask, [&](uint64_t clean) {
    uint64_t own_pair[2] = {address_of(&clean), kMaskBytes};
    ProgramCall own = call;
    own.arguments[5] = address_of(own_pair);
    return unchanged(own);
  });
}

// io_uring_enter(ring, to_submit, least, flags, mask, length), or with a structure that names both: it submits, then waits. In a
// registered region, which only offsets name, the mask is left alone.
[[gnu::noinline]] int64_t wait_in_ring(const ProgramCall& call) {
  constexpr uint64_t kWaits = 1, kStructure = 8, kRegion = 64;  // IORING_ENTER_GETEVENTS, _EXT_ARG, _EXT_ARG_REG
  struct {
    uint64_t mask, length_and_more, timeout;
  } structure;  // io_uring_getevents_arg
  uint64_t flags = call.arguments[3], at = call.arguments[4], mask_at = at, length = call.arguments[5], mask;
  if (!(flags & kWaits) || flags & kRegion || !at) return unchanged(call);
  if (flags & kStructure) {
    if (length != sizeof structure || !read_user_word(at, &structure.mask) ||
        !read_user_word(at + 8, &structure.length_and_more) || !read_user_word(at + 16, &structure.timeout))
      return unchanged(call);
    mask_at = structure.mask;
    length = static_cast<uint32_t>(structure.length_and_more);
  }
  if (!mask_at || length != kMaskBytes || !read_user_word(mask_at, &mask)) return unchanged(call);
  ProgramCall own = call;
  auto make = [&](uint64_t clean) {
    if (flags & kStructure) structure.mask = address_of(&clean);
    own.arguments[4] = flags & kStructure ? address_of(&structure) : address_of(&clean);
    return unchanged(own);
  };
  // What is held ends the wait at once, but not before the submission.
  if (TrapMask* state = trap_mask(); state && state->held && !(mask & kTrapBit) && call.arguments[1]) {
    own.arguments[3] &= ~kWaits;
    int64_t submitted = make(mask & ~kTrapBit);
    if (submitted) return wait_with_mask(mask, [&](uint64_t) { return submitted; }), submitted;
    own = call;
  }
  return wait_with_mask(mask, make);
}

// ---- execve: the new program inherits what the old one thought it had.

// From here until execve fails the kernel has the true mask. A handler that comes in between lifts it for itself.
void open_exec_window(TrapMask* state) {
  uint64_t trap = kTrapBit;
  state->window = true;
  system_call(__NR_rt_sigprocmask, kBlock, address_of(&trap), 0, kMaskBytes);
  if (!state->held) return;
  SignalInfo info = state->pending;
  state->held = false;
  send_trap(&info);
}
void close_exec_window(TrapMask* state) {
  uint64_t mask = set_kernel_mask(~uint64_t{0});  // no handler sees half of it
  state->window = false;
  set_kernel_mask(mask & ~kTrapBit);  // what was pending comes now and is held again
}

[[gnu::noinline]] int64_t replace_program(const ProgramCall& call) {
  if (traps_gone()) hand_mask_over(call.context);
  KernelSigaction program = program_trap();
  bool ignored = program.handler == kIgnoreAction, sharing = is_sharing_child();
  TrapMask* state = trap_mask();
  TrapMask before{};
  if (state) before = *state;
  if (before.blocked) open_exec_window(state);
  if (ignored) {
    KernelSigaction ignore{kIgnoreAction, kSaRestorer, sonde_trap_action.restorer, 0};
    system_call(__NR_rt_sigaction, kSigtrap, address_of(&ignore), 0, kMaskBytes);
  }
  if (sharing) forget_trap_mask();  // on success the memory stays with the parent
  int64_t result = unchanged(call);
  if (ignored) install_trap_action(program);
  if (sharing && before.tid && (state = trap_mask(true))) {
    state->blocked = before.blocked;
    state->own_action = before.own_action;
    state->action = before.action;
  }
  if (before.blocked && state && (sharing || state->window)) close_exec_window(state);
  return result;
}

// ---- what the agent must refrain from

constexpr uint64_t kSetSeccomp = 22, kSetTsc = 26;  // PR_SET_SECCOMP, PR_SET_TSC
constexpr uint64_t kTraceMe = 0;  // PTRACE_TRACEME
constexpr uint64_t kStrict = 1, kTscFaults = 2;  // SECCOMP_MODE_STRICT, PR_TSC_SIGSEGV
constexpr uint64_t kOperationStrict = 0, kOperationFilter = 1;  // SECCOMP_SET_MODE_*

[[gnu::noinline]] void refrain(const ProgramCall& call) {
  uint64_t first = static_cast<uint32_t>(call.arguments[0]), second = call.arguments[1];
  if (call.number == __NR_seccomp) {
    if (first == kOperationStrict || first == kOperationFilter) lock_in(first == kOperationStrict, call.context);
  } else if (first == kSetSeccomp) {
    lock_in(second == kStrict, call.context);
  } else if (first == kSetTsc && second == kTscFaults) {
    forbid_ticks();
  }
}

[[gnu::noinline]] int64_t change_alternate_stack(const ProgramCall& call) {
  mind_stack_size(call.arguments[0], call.context);
  SignalContext* context = call.context;
  if (context && context->stack.flags & kStackAutoDisarm)  // taken away for this very handler
    system_call(__NR_sigaltstack, address_of(&context->stack), 0);
  int64_t result = unchanged(call);
  if (result == 0 && context && call.arguments[0])  // else the kernel would put the old one back
    system_call(__NR_sigaltstack, 0, address_of(&context->stack));
  void* area = sonde_agent_control.thread_area;
  SessionHeader* session = sonde_agent_control.session;
  if (result == 0 && call.arguments[0] && area && session && !is_sharing_child())
    if (ThreadState* thread = find_thread(session, area, thread_pointer())) {
      ask_alternate_stack(thread_scratch(area, thread));
      sum_signal_stack(session, thread);
    }
  return result;
}

}  // namespace

// Each case ends in a jump to what does it: there may be little stack.
int64_t mind_system_call(const ProgramCall& call) {
  if (is_mask_call(call.number) && traps_gone()) return hand_mask_over(call.context), kNotCarriedOut;
  switch (call.number) {
    case __NR_rt_sigaction: return change_action(call);
    case __NR_rt_sigprocmask: return change_mask(call);
    case __NR_rt_sigpending: return ask_pending(call);
    case __NR_rt_sigtimedwait: return wait_for_signal(call);
    case __NR_rt_sigsuspend: return wait_by_arguments(call, 0);
    case __NR_ppoll: return wait_by_arguments(call, 3);
    case __NR_epoll_pwait:
    case __NR_epoll_pwait2: return wait_by_arguments(call, 4);
    case __NR_pselect6:
    case __NR_io_pgetevents: return wait_by_pair(call);
    case __NR_io_uring_enter: return wait_in_ring(call);
    case __NR_execve:
    case __NR_execveat: return replace_program(call);
    case __NR_sigaltstack:
      if (!call.arguments[0] && !(call.context && call.context->stack.flags & kStackAutoDisarm)) return kNotCarriedOut;
      return change_alternate_stack(call);
    case __NR_prctl:
    case __NR_seccomp: return refrain(call), kNotCarriedOut;
    case __NR_ptrace:
      if (call.arguments[0] == kTraceMe) disarm_traps(DisarmCause::traced);
      return kNotCarriedOut;
    case __NR_exit: return forget_trap_mask(), kNotCarriedOut;
    case __NR_exit_group:
      if (is_sharing_child()) forget_trap_mask();
      return kNotCarriedOut;
    default:
      return owner_pid(), trap_mask(), kNotCarriedOut;  // a child is about to be made, and will look for its parent's
  }
}

}  // namespace sonde
