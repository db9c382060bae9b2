#include "core/probe/program_signals.h"

#include "core/native/syscall.h"
#include "core/probe/trap.h"

namespace sonde {

using SignalHandler = void (*)(int signal, void* info, void* context);
extern "C" void sonde_call_on_stack(SignalHandler handler, int signal, void* info, void* context, uint64_t top)
    __attribute__((visibility("hidden")));

namespace {

constexpr uint64_t kDefault = 0, kIgnore = 1;  // SIG_DFL, SIG_IGN
constexpr uint64_t kOnStack = 0x08000000, kResetHand = 0x80000000, kRestorer = 0x04000000;
constexpr uint64_t kMaskBytes = 8, kBlock = 0;  // SIG_BLOCK
constexpr uint64_t kTrapBit = uint64_t{1} << (kSigtrap - 1);

struct StackInUse {  // stack_t
  uint64_t base;
  int32_t flags;
  int32_t padding;
  uint64_t size;
};

// The default action ends the program, by the kernel's own hand: the handler is taken away and the signal sent again. It
// arrives before the system call returns.
void die_of(int signal, void* info) {
  KernelSigaction action{kDefault, kRestorer, 0, 0};
  system_call(__NR_rt_sigaction, static_cast<uint64_t>(signal), reinterpret_cast<uint64_t>(&action), 0, kMaskBytes);
  auto pid = static_cast<uint64_t>(system_call(__NR_getpid)), tid = static_cast<uint64_t>(system_call(__NR_gettid));
  system_call(__NR_rt_tgsigqueueinfo, pid, tid, static_cast<uint64_t>(signal), reinterpret_cast<uint64_t>(info));
}

// Where the program's handler is to run: the top of its alternate stack if it asked for that and is not on it already.
uint64_t other_stack(const KernelSigaction& action) {
  StackInUse stack{};
  if (!(action.flags & kOnStack)) return 0;
  if (is_error(system_call(__NR_sigaltstack, 0, reinterpret_cast<uint64_t>(&stack)))) return 0;
  return stack.flags == 0 ? stack.base + stack.size : 0;  // neither SS_ONSTACK nor SS_DISABLE
}

}  // namespace

void forward_trap(int signal, void* info, void* context) {
  KernelSigaction action = sonde_agent_control.program_trap;
  // A trap instruction kills also those who ignore SIGTRAP: the kernel forces it.
  bool forced = static_cast<const int32_t*>(info)[2] > 0;
  if (action.handler == kIgnore && !forced) return;
  if (action.handler <= kIgnore) return die_of(signal, info);
  if (action.flags & kResetHand) sonde_agent_control.program_trap.handler = kDefault;
  // SIGTRAP itself stays deliverable; everything else as the program asked. The context's mask is restored on return.
  uint64_t mask = action.mask & ~kTrapBit;
  if (mask) system_call(__NR_rt_sigprocmask, kBlock, reinterpret_cast<uint64_t>(&mask), 0, kMaskBytes);
  auto handler = reinterpret_cast<SignalHandler>(action.handler);
  if (uint64_t top = other_stack(action)) return sonde_call_on_stack(handler, signal, info, context, top);
  handler(signal, info, context);
}

}  // namespace sonde
