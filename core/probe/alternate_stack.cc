#include "core/probe/alternate_stack.h"

#include "core/native/syscall.h"
#include "core/probe/safe_read.h"

namespace sonde {
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
  else scratch->alternate = {Addr(stack.begin), Addr(stack.begin + stack.size)};
}

}  // namespace

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
