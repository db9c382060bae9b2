// A thread's first call. In a process that was forked while it was recorded, calls are running that began in the parent:
// the nearest of them above the first call's slot is its caller. Their numbers are those of the parent's tree, which
// lies in the same mapping.
#include "core/probe/sum_calls.h"

#include "core/probe/safe_read.h"
#include "core/probe/stack_capture.h"

namespace sonde {

extern "C" {
__attribute__((used)) SumCall sonde_sum_calls[kTrampolines];
}

namespace {

uint32_t first_process;  // private memory: a forked child finds its parent's number

// The inherited call that made the one at `slot`; kNoEntry if there is none.
uint32_t find_inherited(uint64_t slot) {
  if (sonde_agent_control.flags & kControlNoSystemCalls) return kNoEntry;
  uint32_t count = __atomic_load_n(&sonde_fresh_entries, __ATOMIC_RELAXED), best = kNoEntry;
  uint64_t nearest = kSumFrames;
  for (uint32_t index = 0; index < count && index < kTrampolines; index++) {
    const SumCall& call = sonde_sum_calls[index];
    uint64_t distance = call.slot - slot;
    if (!call.slot || sonde_owners[index].state != EntryState::in_use || distance - 8 >= nearest) continue;
    uint64_t word;
    if (safe_read(call.slot, &word, sizeof word) != sizeof word || word != trampoline_address(index)) continue;
    best = index;
    nearest = distance;
  }
  return best;
}

// slot: of the call that comes first.
[[gnu::noinline]] void prepare_area(SessionHeader* session, ThreadState* thread, uint64_t slot) {
  auto* area = reinterpret_cast<SumArea*>(ring_data(thread->ring));
  uint64_t stride = kPage + session->ring_bytes;
  uint64_t offset = reinterpret_cast<uint64_t>(thread->ring) - reinterpret_cast<uint64_t>(ring_header(session, 0));
  sum_prepare(area, session->ring_bytes, static_cast<uint32_t>(offset / stride), stride, thread->pid);
  // A first stack that is a signal stack may go away.
  const AddrRange& alternate = thread_scratch(sonde_agent_control.thread_area, thread)->alternate;
  area->signal_begin = alternate.begin.value;
  area->signal_end = alternate.end.value;
  if (!alternate.contains(Addr(slot))) area->trampolines = reinterpret_cast<uint64_t>(sonde_trampolines);
  if (!first_process) first_process = thread->pid;
  if (first_process == thread->pid) return;
  uint32_t index = find_inherited(slot);
  if (index == kNoEntry) return;
  const SumCall& call = sonde_sum_calls[index];
  uint32_t parent = sum_translate(area, call.area, call.parent), site = sonde_calls[index].site;
  uint32_t node = sum_child(area, parent, site);
  if (!call.base) area->outermost = call.slot + 8;
  area->top = {call.slot, index + 1, node ? node : parent, call.base, 0};
}

inline SumArea* area_of(SessionHeader* session, ThreadState* thread, uint64_t slot) {
  auto* area = reinterpret_cast<SumArea*>(ring_data(thread->ring));
  if (__builtin_expect(!area->process, 0)) prepare_area(session, thread, slot);
  return area;
}

}  // namespace

void sum_call_begins(SessionHeader* session, ThreadState* thread, uint32_t index, uint32_t site, uint64_t slot,
                     bool tail) {
  sum_begin(area_of(session, thread, slot), sonde_sum_calls, index, site, slot, tail);
}

void sum_signal_stack(SessionHeader* session, ThreadState* thread) {
  if (!is_summing(session) || !thread->ring) return;
  auto* area = reinterpret_cast<SumArea*>(ring_data(thread->ring));
  if (!area->process) return;  // the first call will look
  const AddrRange& alternate = thread_scratch(sonde_agent_control.thread_area, thread)->alternate;
  area->signal_begin = alternate.begin.value;
  area->signal_end = alternate.end.value;
}

void sum_call_ends(SessionHeader* session, ThreadState* thread, uint32_t index, ExitKind kind, uint64_t now) {
  const ActiveCall& call = sonde_calls[index];
  SumArea* area = area_of(session, thread, sonde_entries[index].slot);
  sum_end(area, sonde_sum_calls, index, call.site, kind, now - call.entry_ticks);
}

void sum_call_abandoned(SessionHeader* session, ThreadState* thread, uint32_t index, uint64_t now) {
  const ActiveCall& call = sonde_calls[index];
  SumArea* area = area_of(session, thread, sonde_entries[index].slot);
  sum_end_abandoned(area, sonde_sum_calls, index, call.site, call.entry_ticks, now);
}

void sum_entry_only(SessionHeader* session, ThreadState* thread, uint32_t site, uint64_t slot) {
  sum_entry(area_of(session, thread, slot), sonde_sum_calls, site, slot);
}

}  // namespace sonde
