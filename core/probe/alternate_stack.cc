#include "core/probe/alternate_stack.h"

#include "core/native/syscall.h"
#include "core/probe/safe_read.h"

namespace sonde {

constinit SmallStacks small_stacks{};

namespace {

struct StackDescription {  // stack_t, <asm/signal.h>
  uint64_t begin;
  int32_t flags;
  int32_t padding;
  uint64_t size;
};
constexpr int32_t kDisabled = 2;  // SS_DISABLE

void keep(ThreadScratch* scratch, const StackDescription& stack) {
  if (stack.flags & kDisabled) scratch->alternate = {};
  else scratch->alternate = {Addr(stack.begin), Addr(stack.begin + stack.size)}, small_stacks.any = true;
}

}  // namespace

// Coroutines may be made in several threads at once: then one of two that take the same place is not known.
void remember_coroutine_stack(AddrRange stack) {
  uint32_t known = __atomic_load_n(&small_stacks.known, __ATOMIC_RELAXED);
  for (uint32_t i = 0; i < known && i < kSmallStacks; i++) {
    AddrRange& other = small_stacks.ranges[i];
    if (other.begin < stack.end && stack.begin < other.end) other = {};
  }
  if (stack.size() == 0 || stack.size() > kSmallStackBytes) return;
  small_stacks.any = true;
  small_stacks.ranges[known % kSmallStacks] = stack;
  __atomic_store_n(&small_stacks.known, known + 1 ? known + 1 : kSmallStacks, __ATOMIC_RELEASE);
}

bool has_room_on_small_stack(uint64_t sp, uint64_t bytes) {
  for (const AddrRange& stack : small_stacks.ranges)
    if (stack.contains(Addr(sp))) return sp - stack.begin.value >= bytes;
  return true;
}

void ask_alternate_stack(ThreadScratch* scratch) {
  StackDescription stack{};
  if (sonde_agent_control.flags & kControlNoSystemCalls) return;
  if (system_call(__NR_sigaltstack, 0, reinterpret_cast<uint64_t>(&stack)) == 0) keep(scratch, stack);
}

void alternate_stack_event(ThreadScratch* scratch, uint64_t stack_address) {
  StackDescription stack;
  if (stack_address && safe_read(stack_address, &stack, sizeof stack) == sizeof stack) keep(scratch, stack);
}

}  // namespace sonde
