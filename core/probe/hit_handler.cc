#include "core/probe/hit_handler.h"

#include "core/native/thread_pointer.h"
#include "core/probe/alternate_stack.h"
#include "core/probe/entries.h"

namespace sonde {

extern "C" {

HitHandlers sonde_hit_handlers;

uint32_t sonde_stack_of(const SiteRegs* regs, bool pc_is_return, Frame* frames, uint32_t room) {
  SessionHeader* session = sonde_agent_control.session;
  void* area = sonde_agent_control.thread_area;
  ThreadState* thread = session && area ? find_thread(session, area, thread_pointer()) : nullptr;
  return thread ? stack_from(thread_scratch(area, thread), *regs, pc_is_return, {frames, room}) : 0;
}

uint64_t sonde_return_address(const uint64_t* slot) {
  uint64_t address = __atomic_load_n(slot, __ATOMIC_RELAXED), T = address;
  if (is_trampoline(address + kTrampolineCall)) T += kTrampolineCall;  // the function's entry is on its way
  if (!is_trampoline(T)) return address;
  const ReturnEntry& entry = sonde_entries[trampoline_index(T)];
  return entry.slot == reinterpret_cast<uint64_t>(slot) ? entry.real : 0;
}

}  // extern "C"

void call_handler(const ThreadState* thread, const Hit& hit) {
  HitHandler handler = hit.point == HitPoint::entry ? sonde_hit_handlers.entry : sonde_hit_handlers.exit;
  if (!handler) return;
  const ThreadScratch* scratch = thread_scratch(sonde_agent_control.thread_area, thread);
  bool room = has_room(scratch, reinterpret_cast<uint64_t>(__builtin_frame_address(0)), kHandlerBytes);
  if (hit.level < kMaxContextLevels && room) return sonde_call_handler(&hit, handler);
  __atomic_fetch_add(&sonde_hit_handlers.missed, 1, __ATOMIC_RELAXED);
}

}  // namespace sonde
