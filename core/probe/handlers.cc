#include "core/probe/handlers.h"

#include "core/native/thread_pointer.h"
#include "core/native/ticks.h"
#include "core/probe/detour_place.h"
#include "core/probe/trap_mask.h"

namespace sonde {

extern "C" {
uint64_t sonde_handler_table[kHandlers];
}

namespace {

uint64_t* const handlers = sonde_handler_table;

uint64_t entrance(uint32_t index) {
  return reinterpret_cast<uint64_t>(sonde_handlers) + uint64_t{index} * kEntranceStride;
}

// The entrance for the handler; 0: all are taken.
uint64_t find_entrance(uint64_t handler) {
  for (uint32_t i = 0; i < kHandlers; i++) {
    uint64_t there = __atomic_load_n(&handlers[i], __ATOMIC_ACQUIRE);
    if (!there && __atomic_compare_exchange_n(&handlers[i], &there, handler, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
      there = handler;
    if (there == handler) return entrance(i);
  }
  return 0;
}

// What is to be done after a handler, in ActivationNotes::afterwards beside the place's sp_adjust.
constexpr uint32_t kInDetourThen = 1u << 16, kMaskThen = 1u << 17, kWindowThen = 1u << 18;

struct Afterwards {
  DetourPlace place;
  uint32_t flags;
};

bool hook_return(uint64_t* slot, const Afterwards& afterwards) {
  SessionHeader* session = sonde_agent_control.session;
  void* area = sonde_agent_control.thread_area;
  if (!session || !area) return false;
  ThreadState* thread = find_thread(session, area, thread_pointer());
  if (!thread) return false;
  uint32_t index = entry_take(session, thread, false);
  if (index == kNoEntry) return false;
  sonde_entries[index] = {*slot, reinterpret_cast<uint64_t>(slot)};
  sonde_notes[index] = {0, afterwards.flags | static_cast<uint16_t>(afterwards.place.sp_adjust), afterwards.place.pc};
  sonde_calls[index] = {ticks(), kNoSite, 0};
  sonde_owners[index] = {&no_usual_thread, thread->tid | kHandlerOwner, EntryState::in_use};
  __atomic_signal_fence(__ATOMIC_SEQ_CST);  // complete before the slot names it
  __atomic_store_n(slot, trampoline_address(index), __ATOMIC_RELAXED);
  return true;
}

[[gnu::noinline]] void prepare(bool traps, bool blocks_trap, const DetourPlace& place, SignalInfo* info,
                               SignalContext* context, uint64_t* slot) {
  Afterwards afterwards{place, place.pc ? kInDetourThen : 0};
  if (traps) afterwards.flags |= kMaskThen;
  if (traps && in_exec_window()) afterwards.flags |= kWindowThen;
  if (!hook_return(slot, afterwards)) return;
  if (place.pc) show_original(place, context, info);
  if (traps) enter_handler(context, blocks_trap);
}

}  // namespace

void wrap_action(KernelSigaction* action) {
  if (__atomic_load_n(&sonde_agent_control.flags, __ATOMIC_RELAXED) & kControlBareHandlers) return;
  bool blocks = traps_in_use() && !traps_gone() && action->mask & kTrapBit;
  if (blocks) action->mask &= ~kTrapBit;
  if (action->handler <= kIgnoreAction || action->handler & kBlocksTrap) return;
  if (uint64_t at = find_entrance(action->handler | (blocks ? kBlocksTrap : 0))) action->handler = at;
}

void unwrap_action(KernelSigaction* action) {
  uint64_t offset = action->handler - reinterpret_cast<uint64_t>(sonde_handlers);
  if (offset >= uint64_t{kHandlers} * kEntranceStride || offset % kEntranceStride) return;
  uint64_t handler = __atomic_load_n(&handlers[offset / kEntranceStride], __ATOMIC_ACQUIRE);
  if (!handler) return;
  action->handler = handler & ~kBlocksTrap;
  if (handler & kBlocksTrap) action->mask |= kTrapBit;
}

void handler_returned(uint32_t entry) {
  const ActivationNotes& notes = sonde_notes[entry];
  auto* context = reinterpret_cast<SignalContext*>(sonde_entries[entry].slot + 8);
  if (notes.afterwards & kInDetourThen) {
    DetourPlace place = find_detour_place(notes.resume);
    if (place.pc) back_to_detour(place, context);
  }
  if (notes.afterwards & kMaskThen && traps_in_use()) leave_handler(context, notes.afterwards & kWindowThen);
}

extern "C" uint64_t sonde_on_signal(uint64_t handler, SignalInfo* info, SignalContext* context, uint64_t* slot) {
  uint64_t entry = __atomic_load_n(&handlers[handler], __ATOMIC_ACQUIRE);
  DetourPlace place = find_detour_place(context->rip);
  bool blocks_trap = entry & kBlocksTrap, traps = traps_in_use();
  if (traps && traps_gone()) {  // nothing is to be done afterwards
    hand_mask_over(context);
    if (blocks_trap) block_trap();
    traps = false;
  }
  if (__builtin_expect(place.pc || traps, 0)) prepare(traps, blocks_trap, place, info, context, slot);
  return entry & ~kBlocksTrap;
}

}  // namespace sonde
