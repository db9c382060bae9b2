#include "core/probe/program_signals.h"

#include "core/native/syscall.h"
#include "core/probe/detour_place.h"
#include "core/probe/trap.h"
#include "core/probe/trap_mask.h"

namespace sonde {

using SignalHandler = void (*)(int signal, SignalInfo* info, SignalContext* context);
extern "C" void sonde_call_on_stack(SignalHandler handler, int signal, SignalInfo* info, SignalContext* context,
                                    uint64_t top) __attribute__((visibility("hidden")));

namespace {

// The default action ends the program, by the kernel's own hand: the handler is taken away and the signal sent again. It
// arrives before the system call returns.
void die_of(SignalInfo* info) {
  KernelSigaction action{kDefaultAction, kSaRestorer, 0, 0};
  system_call(__NR_rt_sigaction, kSigtrap, reinterpret_cast<uint64_t>(&action), 0, kMaskBytes);
  send_trap(info);
}

// Where the program's handler is to run: the top of its alternate stack if it asked for that and is not on it already.
uint64_t other_stack(const KernelSigaction& action) {
  decltype(SignalContext::stack) stack{};
  if (!(action.flags & kSaOnStack)) return 0;
  if (is_error(system_call(__NR_sigaltstack, 0, reinterpret_cast<uint64_t>(&stack)))) return 0;
  return stack.flags == 0 ? stack.begin + stack.size : 0;  // neither SS_ONSTACK nor SS_DISABLE
}

// True if the signal is not for the program now. A trap instruction kills those who block or ignore SIGTRAP: the kernel
// forces it.
bool keep_or_die(const KernelSigaction& action, SignalInfo* info) {
  bool forced = info->code > 0;
  TrapMask* state = traps_in_use() ? trap_mask() : nullptr;
  bool blocked = state && state->blocked;
  if (blocked && !forced) {
    if (!state->held) state->pending = *info;
    state->held = true;  // another one changes nothing
    return true;
  }
  if (action.handler == kIgnoreAction && !forced) return true;
  if (action.handler > kIgnoreAction && !blocked) return false;
  die_of(info);
  return true;
}

}  // namespace

void forward_trap(SignalInfo* info, SignalContext* context) {
  KernelSigaction action = program_trap();
  bool traps = traps_in_use(), gone = traps_gone();
  if (keep_or_die(action, info)) return gone ? hand_mask_over(context) : void();
  if (action.flags & kSaResetHand) {
    KernelSigaction reset = action;
    reset.handler = kDefaultAction;
    set_program_trap(reset);
  }
  // SIGTRAP itself stays deliverable while there are traps; everything else as the program asked. The context's mask is restored
  // on return.
  bool blocks_trap = !(action.flags & kSaNoDefer) || action.mask & kTrapBit;
  if (gone) hand_mask_over(context), traps = false;
  bool window = traps && in_exec_window();
  DetourPlace place = find_detour_place(context->rip);
  if (place.pc) show_original(place, context, info);
  if (traps) enter_handler(context, blocks_trap);
  uint64_t mask = (action.mask & ~kTrapBit) | (gone && blocks_trap ? kTrapBit : 0);
  if (mask) system_call(__NR_rt_sigprocmask, kBlock, reinterpret_cast<uint64_t>(&mask), 0, kMaskBytes);
  auto handler = reinterpret_cast<SignalHandler>(action.handler);
  if (uint64_t top = other_stack(action)) sonde_call_on_stack(handler, kSigtrap, info, context, top);
  else handler(kSigtrap, info, context);
  if (place.pc) back_to_detour(place, context);
  if (traps) leave_handler(context, window);
}

}  // namespace sonde
