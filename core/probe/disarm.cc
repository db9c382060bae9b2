#include "core/probe/disarm.h"

#include <cstddef>

#include "core/native/syscall.h"
#include "core/native/thread_pointer.h"
#include "core/probe/alternate_stack.h"
#include "core/probe/safe_read.h"
#include "core/probe/signal_abi.h"
#include "core/probe/thread.h"
#include "core/probe/trap_mask.h"

namespace sonde {
namespace {

constexpr uint64_t kRead = 1, kWrite = 2, kExecute = 4;  // PROT_*
constexpr uint8_t kTrapInstruction = 0xcc;
constexpr int64_t kNotMapped = -12;  // ENOMEM

void count(DisarmCause cause) {
  if (SessionHeader* session = sonde_agent_control.session)
    __atomic_fetch_add(&session->disarmed[static_cast<unsigned>(cause)], 1, __ATOMIC_RELAXED);
}

int64_t protect(uint64_t page, uint64_t protection) { return system_call(__NR_mprotect, page, kPage, protection); }

}  // namespace

void disarm_traps(DisarmCause cause) {
  const TrapTable* table = __atomic_load_n(&sonde_agent_control.traps, __ATOMIC_ACQUIRE);
  uint32_t before = __atomic_fetch_or(&sonde_agent_control.flags, uint32_t{kControlDisarmed}, __ATOMIC_RELAXED);
  if (before & kControlDisarmed || !(before & kControlTraps) || !table) return;
  bool all = true;
  for (uint64_t i = 0; i < table->count;) {
    uint64_t page = table->sites[i].pc & ~(kPage - 1);
    int64_t result = protect(page, kRead | kWrite | kExecute);
    bool writable = result == 0;
    all &= writable || result == kNotMapped;  // its library is gone
    for (; i < table->count && (table->sites[i].pc & ~(kPage - 1)) == page; i++) {
      auto* code = reinterpret_cast<uint8_t*>(table->sites[i].pc);
      if (writable && __atomic_load_n(code, __ATOMIC_RELAXED) == kTrapInstruction)
        __atomic_store_n(code, static_cast<uint8_t>(table->sites[i].original), __ATOMIC_RELEASE);
    }
    if (writable) protect(page, kRead | kExecute);
  }
  if (all) __atomic_fetch_or(&sonde_agent_control.flags, uint32_t{kControlTrapsGone}, __ATOMIC_RELEASE);
  count(cause);
}

uint64_t signal_frame_bytes() {
  uint32_t a = 0xd, b = 0, c = 0, d = 0;
  asm volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
  constexpr uint64_t kWithoutState = 1024;  // context, siginfo, alignment; the kernel's own bound is a little lower
  return kWithoutState + (b > 512 ? b : 512);
}

namespace {
void give_way(SignalContext* context) {
  disarm_traps(DisarmCause::small_stack);
  if (traps_gone()) hand_mask_over(context);  // now that there is stack to do it on
}
}  // namespace

void mind_stack_size(uint64_t address, SignalContext* context) {
  decltype(SignalContext::stack) stack;
  if (!traps_in_use() || safe_read(address, &stack, sizeof stack) != sizeof stack) return;
  constexpr uint64_t kRefused = 2048;  // smaller than MINSIGSTKSZ: the kernel does not take it
  if (stack.flags & kStackDisabled || stack.size < kRefused) return;
  if (stack.size < 2 * signal_frame_bytes() + kDeepPathBytes) give_way(context);
}

void mind_coroutine(uint64_t coroutine, SignalContext* context) {
  decltype(SignalContext::stack) stack;
  uint64_t at = coroutine + offsetof(SignalContext, stack);
  if (safe_read(at, &stack, sizeof stack) != sizeof stack) return;
  remember_coroutine_stack({Addr(stack.begin), Addr(stack.begin + stack.size)});
  if (traps_in_use() && stack.size < signal_frame_bytes() + kDeepPathBytes) give_way(context);
}

void forbid_ticks() {
  if (sonde_agent_control.flags & kControlTraps) disarm_traps(DisarmCause::no_ticks);
  else count(DisarmCause::no_ticks);
  __atomic_fetch_or(&sonde_agent_control.flags, uint32_t{kControlNoTicks}, __ATOMIC_RELAXED);
  if (void* area = sonde_agent_control.thread_area) retire_thread(area, thread_pointer());
}

}  // namespace sonde
