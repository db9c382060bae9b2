#include "core/probe/hit.h"

#include <span>

#include "core/native/alignment.h"
#include "core/native/thread_pointer.h"
#include "core/native/ticks.h"
#include "core/probe/alternate_stack.h"
#include "core/probe/backtrace.h"
#include "core/probe/disarm.h"
#include "core/probe/handlers.h"
#include "core/probe/hit_handler.h"
#include "core/probe/host_event.h"
#include "core/probe/personality.h"
#include "core/probe/sandbox.h"
#include "core/probe/sum_calls.h"
#include "core/probe/system_call.h"

namespace sonde {

// The way out of a system call site, core/native/x86_64/signal.S.
extern "C" [[noreturn]] void sonde_leave_system_call(EntryFrame* frame, uint64_t rbp, uint64_t rbx, uint64_t r12,
                                                     uint64_t r13, uint64_t r14, uint64_t r15)
    __attribute__((visibility("hidden")));

namespace {

// The path of nearly every hit is one function without calls; everything else is apart from it.
#define SONDE_HOT [[gnu::always_inline]] inline

SONDE_HOT ThreadState* this_thread(SessionHeader* session) {
  void* area = sonde_agent_control.thread_area;
  return __builtin_expect(area != nullptr, 1) ? find_thread(session, area, thread_pointer()) : nullptr;
}

constexpr uint32_t kRingRetryHits = 4096;

// All rings were taken when the thread came: its first hit waits for one, later ones look whether one has been freed. A handler
// that interrupts the waiting does the same, and may be sooner.
[[gnu::noinline]] bool take_ring_late(SessionHeader* session, ThreadState* thread, uint32_t site) {
  RingHeader *ring = nullptr, *none = nullptr;
  if (thread->ring_retry == 0) ring = ring_await(session, thread->pid, thread->tid, thread->key);
  else if (thread->ring_retry % kRingRetryHits == 0) ring = ring_take(session, thread->pid, thread->tid, thread->key);
  thread->ring_retry++;
  bool superfluous =
      ring && !__atomic_compare_exchange_n(&thread->ring, &none, ring, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  if (superfluous) ring_end(ring, thread->tid);
  if (thread->ring) allow_usual_path(session, thread);
  else count_loss(session, nullptr, site, LossCause::no_ring);
  return thread->ring;
}

// What is in flight in the thread's ring may hinder its being published for too long.
[[gnu::noinline, gnu::cold]] RingHeader* ring_in_use(SessionHeader* session, ThreadState* thread) {
  RingHeader* ring = thread->ring;
  if (ring_comes_to_rest(ring)) return ring;
  uint64_t in_flight =
      __atomic_load_n(&ring->reserve, __ATOMIC_RELAXED) - __atomic_load_n(&ring->tail, __ATOMIC_RELAXED);
  if (in_flight > session->ring_bytes / 2) park_ring(session, thread);
  return thread->ring;
}

SONDE_HOT RingHeader* ring_to_write(SessionHeader* session, ThreadState* thread) {
  RingHeader* ring = thread->ring;
  return __builtin_expect(ring_idle(ring), 1) ? ring : ring_in_use(session, thread);
}

// Leaves the record of a call that ends; `--sum`: counts it in the thread's tree.
SONDE_HOT void record_end(SessionHeader* session, ThreadState* thread, uint32_t index, ExitKind kind, uint64_t now) {
  const ActiveCall& call = sonde_calls[index];
  if (__builtin_expect(!thread->ring, 0)) return count_loss(session, nullptr, call.site, LossCause::no_ring);
  if (__builtin_expect(is_summing(session), 0)) return sum_call_ends(session, thread, index, kind, now);
  ring_write_call(session, ring_to_write(session, thread), call.site, kind, sonde_entries[index].slot, call.entry_ticks,
                  now);
}

// The hit will have a return entry: counts it, before its slot is hijacked.
SONDE_HOT void record_begin(SessionHeader* session, ThreadState* thread, uint32_t index, uint32_t site,
                            const uint64_t* slot, bool tail) {
  if (__builtin_expect(is_summing(session), 0))
    return sum_call_begins(session, thread, index, site, reinterpret_cast<uint64_t>(slot), tail);
  local_add(&thread->ring->calls, 1);
}

void record_entry(SessionHeader* session, ThreadState* thread, uint32_t site, uint64_t slot, uint64_t now) {
  if (is_summing(session)) sum_entry_only(session, thread, site, slot);
  else ring_write_entry(session, ring_to_write(session, thread), site, slot, now);
}

struct Exit {
  ExitKind kind;
  uint64_t ticks;
  const CalleeSaved* saved;  // null: no handler will want them
  unsigned level;
};

[[gnu::noinline]] void call_exit_handler(const ThreadState* thread, uint32_t index, const Exit& exit) {
  const ReturnEntry& entry = sonde_entries[index];
  const CalleeSaved& saved = *exit.saved;
  call_handler(thread, {HitPoint::exit,
                        sonde_calls[index].site,
                        exit.kind,
                        exit.level,
                        {entry.real, entry.slot + 8, saved.rbp, saved.rbx, saved.r12, saved.r13, saved.r14, saved.r15},
                        entry.real});
}

SONDE_HOT bool has_handler(const SessionHeader* session, uint32_t site) {
  return session_sites(const_cast<SessionHeader*>(session))[site].flags & kSiteHandler;
}

// fork copies the entries of calls that run.
[[gnu::noinline]] bool is_inherited(uint32_t index) {
  return sonde_calls[index].entry_ticks < process_mark(sonde_agent_control.thread_area)->begun_ticks;
}

// Ends one activation, whoever began it. False if it has ended already (a copied stack returns a second time).
SONDE_HOT bool end_activation(SessionHeader* session, ThreadState* thread, uint32_t index, const Exit& exit) {
  Ownership& ownership = sonde_owners[index];
  uint32_t site = sonde_calls[index].site;
  ExitKind kind = exit.kind;
  if (exit.saved && thread && ownership.state == EntryState::in_use && site != kNoSite && is_recording(session) &&
      has_handler(session, site))
    call_exit_handler(thread, index, exit);
  if (thread && ownership.owner == thread->tid) {
    if (ownership.state != EntryState::in_use) return false;
    ownership.state = EntryState::free;
  } else if (!entry_claim(index)) {
    return false;
  } else if (__builtin_expect(sonde_calls[index].site == kNoSite, 0)) {
    if (exit.kind == ExitKind::returned) handler_returned(index);
    entry_give(thread, index);
    return true;
  } else if (thread && is_inherited(index)) {
    kind = ExitKind::inherited;
  }
  if (thread && is_recording(session)) record_end(session, thread, index, kind, exit.ticks);
  entry_give(thread, index);
  return true;
}

// Ends the activation and those that left the slot to it by tail calls, innermost first.
SONDE_HOT void end_chain(SessionHeader* session, ThreadState* thread, uint32_t index, const Exit& exit) {
  for (;;) {
    uint32_t link = sonde_calls[index].link, chain = entry_chain(index);
    uint64_t slot = sonde_entries[index].slot;
    if (!end_activation(session, thread, index, exit) || __builtin_expect(!link, 1)) return;
    index = link - 1;
    if (sonde_entries[index].slot != slot || entry_chain(index) + 1 != chain) return;
  }
}

SONDE_HOT void end_guarded(SessionHeader* session, uint32_t index, Exit exit, uint64_t own_sp) {
  ThreadState* thread = this_thread(session);
  if (__builtin_expect(!thread, 0)) return end_chain(session, nullptr, index, exit);
  Guard guard(session, thread, own_sp);
  exit.level = guard.level();
  end_chain(session, thread, index, exit);
}

// link: index + 1 of the older activation on the slot, or 0.
SONDE_HOT uint64_t begin_activation(uint32_t index, uint32_t site, uint64_t real, uint64_t* slot, ThreadState* thread,
                                    uint32_t link) {
  sonde_entries[index] = {real, reinterpret_cast<uint64_t>(slot)};
  if (link) sonde_notes[index].chain = entry_chain(link - 1) + 1;
  bool usual = !link && !holds_many(thread) && !has_handler(sonde_agent_control.session, site);
  sonde_owners[index] = {usual ? thread : &no_usual_thread, thread->tid, EntryState::in_use};
  uint64_t now = ticks();
  sonde_calls[index] = {now, site, link};
  __atomic_signal_fence(__ATOMIC_SEQ_CST);  // complete before the slot names it
  __atomic_store_n(slot, trampoline_address(index), __ATOMIC_RELAXED);
  return now;
}

// A loop may jump to the patch while words below sp are in use, which entering through the trampoline would overwrite.
bool enters_by_jump(SessionHeader* session, uint32_t site) { return session_sites(session)[site].loop_head; }

// The activation ends, and its entry is the new one's.
[[gnu::noinline]] uint64_t take_over(SessionHeader* session, ThreadState* thread, uint32_t index, uint32_t site,
                                     const uint64_t* slot) {
  uint64_t now = ticks();
  record_end(session, thread, index, is_inherited(index) ? ExitKind::inherited : ExitKind::returned, now);
  record_begin(session, thread, index, site, slot, true);
  sonde_calls[index].site = site;
  sonde_calls[index].entry_ticks = now;
  return now;
}

// The slot holds a trampoline already: its function was left by a tail call (a jump), and both share the return. The new
// activation knows the real address, so that unwinders need one step; the older ones hang on its link. When the chain has
// grown long or the pool is empty, its newest activation ends here, at the jump, and the new one takes over its entry.
[[gnu::noinline]] uint64_t hijack_shared(SessionHeader* session, ThreadState* thread, uint32_t site, uint64_t* slot,
                                         bool may_reclaim) {
  uint32_t older = trampoline_index(*slot);
  ActiveCall& previous = sonde_calls[older];
  // Round the loop. A function that jumps to its own entry as a tail call cannot be told from one that loops to it.
  bool loop = previous.site == site && session_sites(session)[site].loop_head;
  bool shared = sonde_owners[older].state == EntryState::in_use, is_call = previous.site != kNoSite;
  if (loop && shared) return 0;
  uint64_t real = sonde_entries[older].real;
  uint32_t index = shared && entry_chain(older) >= kMaxTailChain ? kNoEntry : entry_take(session, thread, may_reclaim);
  uint64_t now = 0;
  if (index != kNoEntry) {
    record_begin(session, thread, index, site, slot, shared);
    now = begin_activation(index, site, real, slot, thread, shared ? older + 1 : 0);
  } else if (shared && is_call) {
    now = take_over(session, thread, older, site, slot);
  } else {
    count_loss(session, thread->ring, site, LossCause::no_return_entry);
    return 0;
  }
  return now;
}

struct Hijack {
  uint64_t ticks = 0;  // of the entry; 0 if the return could not be hooked
  uint64_t trampoline = 0;  // that the function is to be entered through; 0: by a jump
};

SONDE_HOT Hijack hijack(SessionHeader* session, ThreadState* thread, uint32_t site, uint64_t* slot, bool may_reclaim) {
  uint64_t real = __atomic_load_n(slot, __ATOMIC_RELAXED);
  if (__builtin_expect(is_trampoline(real), 0)) return {hijack_shared(session, thread, site, slot, may_reclaim), 0};
  uint32_t index = entry_take(session, thread, may_reclaim);
  if (__builtin_expect(index == kNoEntry, 0)) {
    count_loss(session, thread->ring, site, LossCause::no_return_entry);
    return {};
  }
  record_begin(session, thread, index, site, slot, false);
  uint64_t now = begin_activation(index, site, real, slot, thread, 0);
  return {now, enters_by_jump(session, site) ? 0 : trampoline_address(index)};
}

[[gnu::noinline]] void write_stack(SessionHeader* session, ThreadState* thread, uint32_t site, uint64_t entry_ticks,
                                   std::span<const uint64_t> frames, const WalkHold& hold) {
  uint32_t count = static_cast<uint32_t>(frames.size());
  RingHeader* ring = ring_to_write(session, thread);
  Reservation record = ring_reserve(session, ring, site, kStackHeaderWords + count);
  if (!record.words) return;
  record.words[1] = entry_ticks;
  for (uint32_t i = 0; i < count; i++) record.words[kStackHeaderWords + i] = frames[i];
  if (hold.is_lost())
    return ring_abandon(session, ring, record, kStackHeaderWords + count, site, LossCause::stack_left_out);
  Reason last = unpack_frame(record.words[kStackHeaderWords + count - 1]).reason;
  bool cut = last == Reason::depth_limit || last == Reason::buffer_full;
  record.words[0] = record_word(RecordType::stack, cut, site, count);
  ring_commit(ring, record);
}

// What is rare: the engine's own events. False: the hit leaves no record.
[[gnu::noinline]] bool engine_event(SessionHeader* session, ThreadState* thread, uint32_t flags) {
  if (flags & kSiteLoader) loader_event(session);
  if (flags & kSiteExit && thread) exit_event(session, thread->pid);
  return !(flags & kSiteSilent);
}

constexpr uint64_t kLahfFlags = 0xd5, kOverflow = 0x800;  // SF ZF AF PF CF; OF

// The status flags at the site, as the flags register has them.
uint64_t status_flags(const EntryFrame& frame) {
  return (frame.flags >> 8 & kLahfFlags) | (frame.flags & 1 ? kOverflow : 0);
}

const Site& site_of(const EntryFrame& frame) {
  return session_sites(sonde_agent_control.session)[static_cast<uint32_t>(frame.site)];
}

// If the call is carried out here, the program goes on behind it. Else 0, as sonde_on_entry: jumped to, it costs no frame.
[[gnu::noinline]] uint64_t carry_out(EntryFrame* frame, uint64_t rbp, uint64_t rbx, uint64_t r12, uint64_t r13,
                                     uint64_t r14, uint64_t r15) {
  ProgramCall call{frame->rax, {frame->rdi, frame->rsi, frame->rdx, frame->r10, frame->r8, frame->r9}, nullptr};
  int64_t result = mind_system_call(call);
  if (result == kNotCarriedOut) return 0;
  const Site& site = site_of(*frame);
  frame->rax = static_cast<uint64_t>(result);
  frame->rcx = site.patch + kSystemCallBytes;
  frame->r11 = status_flags(*frame);  // the others are added on the way out
  frame->site = site.resume + kSystemCallBytes;
  sonde_leave_system_call(frame, rbp, rbx, r12, r13, r14, r15);
}

// The hits' functions return Hijack::trampoline.
[[gnu::noinline]] uint64_t hit_with_stack(SessionHeader* session, ThreadState* thread, uint32_t site, uint32_t flags,
                                          const SiteRegs& regs, unsigned level) {
  UnalignedAllowed unaligned;  // tables are packed
  auto* slot = reinterpret_cast<uint64_t*>(regs.sp);
  // Walked before the slot is changed and the clock is read: the walk is not part of the call's time.
  ThreadScratch* scratch = thread_scratch(sonde_agent_control.thread_area, thread);
  bool room = has_room(scratch, reinterpret_cast<uint64_t>(__builtin_frame_address(0)));
  WalkHold hold(scratch, level);
  std::span<const uint64_t> frames;
  if (hold.place()) frames = room ? capture_stack(scratch, hold.place(), regs) : site_alone(hold.place(), regs);
  Hijack hooked;
  if (flags & kSiteHijack) hooked = hijack(session, thread, site, slot, level == 0);
  else record_entry(session, thread, site, regs.sp, hooked.ticks = ticks());
  if (!hold.place()) count_loss(session, thread->ring, site, LossCause::stack_left_out);
  else if (hooked.ticks && !frames.empty()) write_stack(session, thread, site, hooked.ticks, frames, hold);
  return hooked.trampoline;
}

// What every hit needs before it may record: a thread state with a ring.
SONDE_HOT ThreadState* recording_thread(SessionHeader* session, uint32_t site) {
  ThreadState* thread = this_thread(session);
  if (__builtin_expect(!thread, 0)) {
    __atomic_fetch_add(&session->lost_no_thread_state, 1, __ATOMIC_RELAXED);
    return nullptr;
  }
  if (__builtin_expect(!thread->ring, 0) && !take_ring_late(session, thread, site)) return nullptr;
  return thread;
}

SONDE_HOT bool may_sum(ThreadState* thread, uint64_t own_sp) {
  return has_room(thread_scratch(sonde_agent_control.thread_area, thread), own_sp, kSumPathBytes);
}

// False: the hit is lost, and counted.
SONDE_HOT bool may_record(SessionHeader* session, ThreadState* thread, uint32_t site, const Guard& guard,
                          uint64_t own_sp) {
  LossCause cause = LossCause::nesting;
  if (__builtin_expect(guard.level() != kMaxContextLevels, 1)) {
    if (__builtin_expect(!is_summing(session), 1)) return true;
    if (may_sum(thread, own_sp)) return true;
    cause = LossCause::no_stack;
  }
  count_loss(session, thread->ring, site, cause);
  return false;
}

[[gnu::noinline]] void call_entry_handler(const ThreadState* thread, uint32_t site, unsigned level,
                                          const SiteRegs& regs) {
  uint64_t real = sonde_return_address(reinterpret_cast<const uint64_t*>(regs.sp));
  call_handler(thread, {HitPoint::entry, site, ExitKind::returned, level, regs, real});
}

// Below here a hit with a stack needs this much even if it does not walk. Where there is less, its stack is lost.
constexpr uint64_t kStacklessPathBytes = 448;

bool stack_is_left_out(SessionHeader* session, ThreadState* thread, uint32_t site, uint64_t sp, uint64_t bytes) {
  if (has_room(thread_scratch(sonde_agent_control.thread_area, thread), sp, bytes)) return false;
  count_loss(session, thread->ring, site, LossCause::stack_left_out);
  return true;
}

[[gnu::noinline]] uint64_t hit_otherwise(SessionHeader* session, uint32_t number, uint32_t flags, const SiteRegs& regs,
                                         uint64_t own_sp) {
  if (!(flags & kSiteEnabled)) return 0;
  if (flags & (kSiteLoader | kSiteExit | kSiteSilent) && !engine_event(session, this_thread(session), flags)) return 0;
  ThreadState* thread = recording_thread(session, number);
  if (!thread) return 0;
  Guard guard(session, thread, own_sp);
  if (!may_record(session, thread, number, guard, own_sp)) return 0;
  auto* slot = reinterpret_cast<uint64_t*>(regs.sp);
  if (flags & kSiteHandler) call_entry_handler(thread, number, guard.level(), regs);
  auto sp = reinterpret_cast<uint64_t>(__builtin_frame_address(0));
  if (flags & kSiteStack && !stack_is_left_out(session, thread, number, sp, kStacklessPathBytes))
    return hit_with_stack(session, thread, number, flags, regs, guard.level());
  if (flags & kSiteHijack) return hijack(session, thread, number, slot, guard.level() == 0).trampoline;
  record_entry(session, thread, number, regs.sp, ticks());
  return 0;
}

SONDE_HOT uint64_t hit_usual(SessionHeader* session, uint32_t number, uint64_t* slot, uint64_t own_sp) {
  ThreadState* thread = recording_thread(session, number);
  if (__builtin_expect(!thread, 0)) return 0;
  Guard guard(session, thread, own_sp);
  if (__builtin_expect(!may_record(session, thread, number, guard, own_sp), 0)) return 0;
  return hijack(session, thread, number, slot, guard.level() == 0).trampoline;
}

}  // namespace

void argument_event(uint32_t flags, uint64_t first, uint64_t second, SignalContext* context) {
  if (flags & (kSitePrctl | kSiteSyscall)) sandbox_event(flags & kSiteSyscall, first, second);
  if (flags & kSiteMakecontext) mind_coroutine(first, context);
  if (!(flags & kSiteSigaltstack)) return;
  SessionHeader* session = sonde_agent_control.session;
  ThreadState* thread = this_thread(session);
  if (!thread) return;
  alternate_stack_event(thread_scratch(sonde_agent_control.thread_area, thread), first);
  sum_signal_stack(session, thread);
}

void hit_site(SessionHeader* session, uint32_t number, const SiteRegs& regs) {
  // As if it had come by a detour: levels are ordered by where the hit is, and its slot is the same distance above (reclaim.cc).
  uint64_t own_sp = regs.sp - sizeof(EntryFrame);
  if (is_summing(session)) {
    ThreadState* thread = this_thread(session);
    bool room = !thread || may_sum(thread, reinterpret_cast<uint64_t>(&regs));  // below the trap's signal frame
    if (!room) return count_loss(session, thread->ring, number, LossCause::no_stack);
  }
  uint32_t flags = __atomic_load_n(&session_sites(session)[number].flags, __ATOMIC_RELAXED);
  if (flags == kUsualSite) hit_usual(session, number, reinterpret_cast<uint64_t*>(regs.sp), own_sp);
  else hit_otherwise(session, number, flags, regs, own_sp);
}

namespace {

// A system call instruction is about to run.
[[gnu::noinline]] uint64_t enter_system_call(EntryFrame* frame, uint64_t rbp, uint64_t rbx, uint64_t r12, uint64_t r13,
                                             uint64_t r14, uint64_t r15) {
  if (!is_minded(frame->rax)) return 0;
  if (is_mask_call(frame->rax) && traps_gone()) return hand_mask_over(nullptr), 0;
  return carry_out(frame, rbp, rbx, r12, r13, r14, r15);
}

[[gnu::noinline]] uint64_t enter_rarely(EntryFrame* frame, uint64_t rbp, uint64_t rbx, uint64_t r12, uint64_t r13,
                                        uint64_t r14, uint64_t r15) {
  uint64_t trampoline = 0;
  SiteRegs regs{site_of(*frame).patch, reinterpret_cast<uint64_t>(frame->slot), rbp, rbx, r12, r13, r14, r15};
  SessionHeader* session = sonde_agent_control.session;
  uint32_t flags = __atomic_load_n(&site_of(*frame).flags, __ATOMIC_RELAXED);
  if (is_recording(session)) {
    if (flags & kSitesByArguments) argument_event(flags, frame->rdi, frame->rsi, nullptr);
    trampoline =
        hit_otherwise(session, static_cast<uint32_t>(frame->site), flags, regs, reinterpret_cast<uint64_t>(frame));
  }
  if (!(flags & kSiteBacktrace)) return trampoline;
  divert_backtrace(frame, site_of(*frame).resume);
  return 0;
}

// Where there is not even room for the way there, a hit with a stack is made a usual one.
[[gnu::noinline]] bool stack_must_be_left_out(SessionHeader* session, EntryFrame* frame) {
  constexpr uint64_t kBytes = kStacklessPathBytes + 256;
  const Site& site = site_of(*frame);
  if (__atomic_load_n(&site.flags, __ATOMIC_RELAXED) != (kUsualSite | kSiteStack) || !is_recording(session))
    return false;
  ThreadState* thread = this_thread(session);
  return thread && thread->ring &&
         stack_is_left_out(session, thread, static_cast<uint32_t>(frame->site), reinterpret_cast<uint64_t>(frame),
                           kBytes);
}

// What is not usual. Like the two above it has sonde_on_entry's arguments and is jumped to: the hit path's frame is no part of
// what they need, and at a system call in a signal handler there may be little stack.
[[gnu::noinline]] uint64_t enter_otherwise(EntryFrame* frame, uint64_t rbp, uint64_t rbx, uint64_t r12, uint64_t r13,
                                           uint64_t r14, uint64_t r15) {
  bool is_call = __atomic_load_n(&site_of(*frame).flags, __ATOMIC_RELAXED) & kSiteSystemCall;
  return (is_call ? enter_system_call : enter_rarely)(frame, rbp, rbx, r12, r13, r14, r15);
}

}  // namespace

extern "C" {

uint64_t sonde_on_entry(EntryFrame* frame, uint64_t rbp, uint64_t rbx, uint64_t r12, uint64_t r13, uint64_t r14,
                        uint64_t r15) {
  SessionHeader* session = sonde_agent_control.session;
  if (__builtin_expect(!session, 0)) return 0;
  uint32_t number = static_cast<uint32_t>(frame->site);
  uint32_t flags = __atomic_load_n(&session_sites(session)[number].flags, __ATOMIC_RELAXED);
  if (__builtin_expect(flags != kUsualSite, 0) && !(small_stacks.any && stack_must_be_left_out(session, frame)))
    return enter_otherwise(frame, rbp, rbx, r12, r13, r14, r15);
  if (__builtin_expect(!is_recording(session), 0)) return 0;
  return hit_usual(session, number, frame->slot, reinterpret_cast<uint64_t>(frame));
}

uint64_t sonde_on_return(uint64_t trampoline, uint64_t now, uint64_t own_sp, const CalleeSaved* saved) {
  SessionHeader* session = sonde_agent_control.session;
  uint32_t index = trampoline_index(trampoline);
  const ActiveCall& call = sonde_calls[index];
  bool by_jump = call.link || call.site == kNoSite || enters_by_jump(session, call.site);
  end_guarded(session, index, {ExitKind::returned, now, saved, 0}, own_sp);
  return by_jump;
}

uint64_t sonde_on_unwind(ReturnEntry* entry, uint64_t own_sp, const CalleeSaved* saved) {
  uint64_t now = sonde_agent_control.flags & kControlNoTicks ? 0 : ticks();
  uint32_t index = static_cast<uint32_t>(entry - sonde_entries);
  uint64_t resume = sonde_notes[index].resume;
  end_guarded(sonde_agent_control.session, index, {ExitKind::unwound, now, saved, 0}, own_sp);
  return resume;
}

}  // extern "C"
}  // namespace sonde
