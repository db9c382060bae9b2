// What the assembly believes is what the C++ declarations say.
#include "core/native/x86_64/offsets.h"

#include <cstddef>

#include "core/event/ring.h"
#include "core/isa/x86_64_detour.h"
#include "core/probe/entries.h"
#include "core/probe/hit_handler.h"

namespace sonde {

static_assert(offsetof(ReturnEntry, real) == ENTRY_REAL && offsetof(ReturnEntry, slot) == ENTRY_SLOT);
static_assert(offsetof(ActiveCall, entry_ticks) == CALL_TICKS && offsetof(ActiveCall, site) == CALL_SITE);
static_assert(offsetof(ActiveCall, link) == CALL_LINK && CALL_LINK == CALL_SITE + 4);
static_assert(offsetof(Ownership, usual) == OWNER_USUAL && offsetof(Ownership, state) == OWNER_STATE);
static_assert(offsetof(Ownership, owner) == OWNER_TID_STATE && OWNER_STATE == OWNER_TID_STATE + 4);
static_assert(static_cast<int>(EntryState::free) == STATE_FREE && static_cast<int>(EntryState::in_use) == STATE_IN_USE);
static_assert(kTrampolines == TRAMPOLINES && kTrampolineStride == TRAMPOLINE_STRIDE);
static_assert(kTrampolineCall == TRAMPOLINE_CALL);
static_assert(offsetof(AgentControl, session) == CONTROL_SESSION &&
              offsetof(AgentControl, thread_area) == CONTROL_THREADS);
static_assert(offsetof(AgentControl, flags) == CONTROL_FLAGS && kControlNoTicks == NO_TICKS);
static_assert(offsetof(SessionHeader, state) == SESSION_STATE &&
              static_cast<int>(SessionState::recording) == RECORDING);
static_assert(kSitesOffset == SESSION_SITES && sizeof(Site) == 1 << SITE_BYTES_LOG2);
static_assert(offsetof(Site, flags) == SITE_FLAGS && kUsualSite == USUAL);
static_assert(sizeof(ThreadState) == 1 << THREAD_BYTES_LOG2);
static_assert(kThreadHash == THREAD_HASH && kThreadHashShift == THREAD_HASH_SHIFT);
static_assert(offsetof(ThreadState, tid_word) == THREAD_TID_WORD &&
              offsetof(ThreadState, tid_value) == THREAD_TID_VALUE);
static_assert(offsetof(ThreadState, ring) == THREAD_RING && offsetof(ThreadState, free_entries) == THREAD_FREE);
static_assert(offsetof(ThreadState, guards) == THREAD_GUARD && offsetof(ThreadState, usual_key) == THREAD_USUAL);
static_assert(offsetof(ThreadState, usual_owner) == THREAD_TID_IN_USE);
static_assert(offsetof(RingHeader, tail) == RING_TAIL && offsetof(RingHeader, reserve) == RING_RESERVE);
static_assert(kUsualWriter == USUAL_WRITER && offsetof(RingHeader, limit) == RING_LIMIT);
static_assert(offsetof(RingHeader, mask) == RING_MASK && offsetof(RingHeader, calls) == RING_CALLS);
static_assert(kPage == RING_DATA && kCallWords * 8 == CALL_RECORD_BYTES);
static_assert(record_word(RecordType::call, static_cast<uint8_t>(ExitKind::returned), 0, 0) == CALL_RETURNED);
static_assert(record_word(RecordType::none, 0, 1, 0) == 1 << RECORD_SITE_SHIFT);
static_assert(offsetof(HitHandlers, exit) == HANDLERS_EXIT);
static_assert(x86_64_detour::kResumeOffset - x86_64_detour::kReturnOffset == RESUME_BEHIND_RETURN);

}  // namespace sonde
