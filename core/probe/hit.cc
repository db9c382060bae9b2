#include "core/probe/hit.h"

#include <span>

#include "core/native/thread_pointer.h"
#include "core/native/ticks.h"
#include "core/probe/alternate_stack.h"
#include "core/probe/backtrace.h"
#include "core/probe/disarm.h"
#include "core/probe/handlers.h"
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

SONDE_HOT bool is_recording(const SessionHeader* session) {
  return __atomic_load_n(&session->state, __ATOMIC_RELAXED) == static_cast<uint32_t>(SessionState::recording);
}

SONDE_HOT ThreadState* this_thread(SessionHeader* session) {
  void* area = sonde_agent_control.thread_area;
  return __builtin_expect(area != nullptr, 1) ? find_thread(session, area, thread_pointer()) : nullptr;
}

constexpr uint32_t kRingRetryHits = 4096;

// All rings were taken when the thread came; some may have been freed since.
[[gnu::noinline]] bool take_ring_late(SessionHeader* session, ThreadState* thread, uint32_t site) {
  if (++thread->ring_retry % kRingRetryHits == 0)
    thread->ring = ring_take(session, thread->pid, thread->tid, thread->key);
  if (!thread->ring) count_loss(session, nullptr, site, LossCause::no_ring);
  return thread->ring;
}

// Leaves the record of a call that ends; `--sum`: counts it in the thread's tree.
SONDE_HOT void record_end(SessionHeader* session, ThreadState* thread, uint32_t index, ExitKind kind, uint64_t now) {
  const Activation& activation = sonde_activations[index];
  if (__builtin_expect(!thread->ring, 0)) return count_loss(session, nullptr, activation.site, LossCause::no_ring);
  if (__builtin_expect(is_summing(session), 0)) return sum_call_ends(session, thread, index, kind, now);
  ring_write_call(session, thread->ring, activation.site, kind, sonde_entries[index].slot, activation.entry_ticks, now);
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
  else ring_write_entry(session, thread->ring, site, slot, now);
}

// Ends one activation, whoever began it. False if it has ended already (a copied stack returns a second time).
SONDE_HOT bool end_activation(SessionHeader* session, ThreadState* thread, uint32_t index, ExitKind kind,
                              uint64_t now) {
  Activation& activation = sonde_activations[index];
  if (thread && activation.owner == thread->tid) {
    if (activation.state != EntryState::in_use) return false;
    activation.state = EntryState::free;
  } else if (!entry_claim(index)) {
    return false;
  } else if (__builtin_expect(activation.site == kNoSite, 0)) {
    if (kind == ExitKind::returned) handler_returned(index);
    entry_give(thread, index);
    return true;
  }
  if (thread && is_recording(session)) record_end(session, thread, index, kind, now);
  entry_give(thread, index);
  return true;
}

// Ends the activation and those that left the slot to it by tail calls, innermost first.
SONDE_HOT void end_chain(SessionHeader* session, ThreadState* thread, uint32_t index, ExitKind kind, uint64_t now) {
  for (;;) {
    uint32_t link = sonde_activations[index].link, chain = sonde_activations[index].chain;
    uint64_t slot = sonde_entries[index].slot;
    if (!end_activation(session, thread, index, kind, now) || __builtin_expect(!link, 1)) return;
    index = link - 1;
    if (sonde_entries[index].slot != slot || sonde_activations[index].chain + 1 != chain) return;
  }
}

SONDE_HOT void end_guarded(SessionHeader* session, uint32_t index, ExitKind kind, uint64_t now, uint64_t own_sp) {
  ThreadState* thread = this_thread(session);
  if (__builtin_expect(!thread, 0)) return end_chain(session, nullptr, index, kind, now);
  Guard guard(session, thread, own_sp);
  end_chain(session, thread, index, kind, now);
}

SONDE_HOT uint64_t begin_activation(uint32_t index, uint32_t site, uint64_t real, uint64_t* slot, uint32_t owner,
                                    uint32_t link, uint32_t chain) {
  sonde_entries[index] = {real, reinterpret_cast<uint64_t>(slot)};
  Activation& activation = sonde_activations[index];
  activation.site = site;
  activation.link = link;
  activation.chain = chain;
  activation.owner = owner;
  activation.state = EntryState::in_use;
  uint64_t now = activation.entry_ticks = ticks();
  __atomic_signal_fence(__ATOMIC_SEQ_CST);  // complete before the slot names it
  __atomic_store_n(slot, trampoline_address(index), __ATOMIC_RELAXED);
  return now;
}

// The slot holds a trampoline already: its function was left by a tail call (a jump), and both share the return. The new
// activation knows the real address, so that unwinders need one step; the older ones hang on its link. When the chain has
// grown long or the pool is empty, its newest activation ends here, at the jump, and the new one takes over its entry.
[[gnu::noinline]] uint64_t hijack_shared(SessionHeader* session, ThreadState* thread, uint32_t site, uint64_t* slot,
                                         bool may_reclaim) {
  uint32_t older = trampoline_index(*slot);
  Activation& previous = sonde_activations[older];
  // Round the loop. A function that jumps to its own entry as a tail call cannot be told from one that loops to it.
  bool loop = previous.site == site && session_sites(session)[site].flags & kSiteLoopHead;
  if (loop && previous.state == EntryState::in_use) return 0;
  uint64_t real = sonde_entries[older].real;
  bool shared = previous.state == EntryState::in_use, is_call = previous.site != kNoSite;
  uint32_t index = shared && previous.chain >= kMaxTailChain ? kNoEntry : entry_take(session, thread, may_reclaim);
  uint64_t now = 0;
  if (index != kNoEntry) {
    record_begin(session, thread, index, site, slot, shared);
    now =
        begin_activation(index, site, real, slot, thread->tid, shared ? older + 1 : 0, shared ? previous.chain + 1 : 0);
  } else if (shared && is_call) {
    now = ticks();
    record_end(session, thread, older, ExitKind::returned, now);
    record_begin(session, thread, older, site, slot, true);
    previous.site = site;
    previous.entry_ticks = now;
  } else {
    count_loss(session, thread->ring, site, LossCause::no_return_entry);
    return 0;
  }
  return now;
}

// Ticks of the entry; 0 if the return could not be hooked.
SONDE_HOT uint64_t hijack(SessionHeader* session, ThreadState* thread, uint32_t site, uint64_t* slot,
                          bool may_reclaim) {
  uint64_t real = __atomic_load_n(slot, __ATOMIC_RELAXED);
  if (__builtin_expect(is_trampoline(real), 0)) return hijack_shared(session, thread, site, slot, may_reclaim);
  uint32_t index = entry_take(session, thread, may_reclaim);
  if (__builtin_expect(index == kNoEntry, 0)) {
    count_loss(session, thread->ring, site, LossCause::no_return_entry);
    return 0;
  }
  record_begin(session, thread, index, site, slot, false);
  return begin_activation(index, site, real, slot, thread->tid, 0, 0);
}

void write_stack(SessionHeader* session, ThreadState* thread, uint32_t site, uint64_t entry_ticks,
                 std::span<const uint64_t> frames) {
  uint32_t count = static_cast<uint32_t>(frames.size());
  Reservation record = ring_reserve(session, thread->ring, site, kStackHeaderWords + count);
  if (!record.words) return;
  Reason last = unpack_frame(frames.back()).reason;
  bool cut = last == Reason::depth_limit || last == Reason::buffer_full;
  record.words[0] = record_word(RecordType::stack, cut, site, count);
  record.words[1] = entry_ticks;
  for (uint32_t i = 0; i < count; i++) record.words[kStackHeaderWords + i] = frames[i];
  ring_commit(thread->ring, record);
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

// If the call is carried out here, the program goes on behind it.
[[gnu::noinline]] void carry_out(EntryFrame* frame, uint64_t rbp, uint64_t rbx, uint64_t r12, uint64_t r13,
                                 uint64_t r14, uint64_t r15) {
  ProgramCall call{frame->rax, {frame->rdi, frame->rsi, frame->rdx, frame->r10, frame->r8, frame->r9}, nullptr};
  int64_t result = mind_system_call(call);
  if (result == kNotCarriedOut) return;
  const Site& site = site_of(*frame);
  frame->rax = static_cast<uint64_t>(result);
  frame->rcx = site.patch + kSystemCallBytes;
  frame->r11 = status_flags(*frame);  // the others are added on the way out
  frame->site = site.resume + kSystemCallBytes;
  sonde_leave_system_call(frame, rbp, rbx, r12, r13, r14, r15);
}

[[gnu::noinline]] void hit_with_stack(SessionHeader* session, ThreadState* thread, uint32_t site, uint32_t flags,
                                      const SiteRegs& regs, unsigned level) {
  auto* slot = reinterpret_cast<uint64_t*>(regs.sp);
  // Walked before the slot is changed and the clock is read: the walk is not part of the call's time.
  ThreadScratch* scratch = thread_scratch(sonde_agent_control.thread_area, thread);
  bool room = has_room(scratch, reinterpret_cast<uint64_t>(__builtin_frame_address(0)));
  auto frames = room ? capture_stack(scratch, level, regs) : site_alone(scratch, level, regs);
  uint64_t now = 0;
  if (flags & kSiteHijack) now = hijack(session, thread, site, slot, level == 0);
  else record_entry(session, thread, site, regs.sp, now = ticks());
  if (now && !frames.empty()) write_stack(session, thread, site, now, frames);
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

[[gnu::noinline]] void hit_otherwise(SessionHeader* session, uint32_t number, uint32_t flags, const SiteRegs& regs,
                                     uint64_t own_sp) {
  if (!(flags & kSiteEnabled)) return;
  if (flags & (kSiteLoader | kSiteExit | kSiteSilent) && !engine_event(session, this_thread(session), flags)) return;
  ThreadState* thread = recording_thread(session, number);
  if (!thread) return;
  Guard guard(session, thread, own_sp);
  if (guard.level() == kMaxContextLevels) return count_loss(session, thread->ring, number, LossCause::nesting);
  if (__builtin_expect(is_summing(session), 0) && !may_sum(thread, own_sp))
    return count_loss(session, thread->ring, number, LossCause::no_stack);
  auto* slot = reinterpret_cast<uint64_t*>(regs.sp);
  if (flags & kSiteStack) hit_with_stack(session, thread, number, flags, regs, guard.level());
  else if (flags & kSiteHijack) hijack(session, thread, number, slot, guard.level() == 0);
  else record_entry(session, thread, number, regs.sp, ticks());
}

constexpr uint32_t kUsual = kSiteEnabled | kSiteHijack, kUsualLoop = kUsual | kSiteLoopHead;

SONDE_HOT void hit_usual(SessionHeader* session, uint32_t number, uint64_t* slot, uint64_t own_sp) {
  ThreadState* thread = recording_thread(session, number);
  if (__builtin_expect(!thread, 0)) return;
  Guard guard(session, thread, own_sp);
  if (__builtin_expect(guard.level() == kMaxContextLevels, 0))
    return count_loss(session, thread->ring, number, LossCause::nesting);
  if (__builtin_expect(is_summing(session), 0) && !may_sum(thread, own_sp))
    return count_loss(session, thread->ring, number, LossCause::no_stack);
  hijack(session, thread, number, slot, guard.level() == 0);
}

}  // namespace

void argument_event(uint32_t flags, uint64_t first, uint64_t second, SignalContext* context) {
  if (flags & (kSitePrctl | kSiteSyscall)) sandbox_event(flags & kSiteSyscall, first, second);
  if (flags & kSiteMakecontext) mind_coroutine(first, context);
  if (!(flags & kSiteSigaltstack)) return;
  if (ThreadState* thread = this_thread(sonde_agent_control.session))
    alternate_stack_event(thread_scratch(sonde_agent_control.thread_area, thread), first);
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
  if ((flags | kSiteLoopHead) == kUsualLoop) hit_usual(session, number, reinterpret_cast<uint64_t*>(regs.sp), own_sp);
  else hit_otherwise(session, number, flags, regs, own_sp);
}

namespace {

// A system call instruction is about to run.
[[gnu::noinline]] void enter_system_call(EntryFrame* frame, uint64_t rbp, uint64_t rbx, uint64_t r12, uint64_t r13,
                                         uint64_t r14, uint64_t r15) {
  if (!is_minded(frame->rax)) return;
  if (is_mask_call(frame->rax) && traps_gone()) return hand_mask_over(nullptr);
  carry_out(frame, rbp, rbx, r12, r13, r14, r15);
}

[[gnu::noinline]] void enter_rarely(EntryFrame* frame, uint64_t rbp, uint64_t rbx, uint64_t r12, uint64_t r13,
                                    uint64_t r14, uint64_t r15) {
  SiteRegs regs{site_of(*frame).patch, reinterpret_cast<uint64_t>(frame->slot), rbp, rbx, r12, r13, r14, r15};
  SessionHeader* session = sonde_agent_control.session;
  uint32_t flags = __atomic_load_n(&site_of(*frame).flags, __ATOMIC_RELAXED);
  if (is_recording(session)) {
    if (flags & kSitesByArguments) argument_event(flags, frame->rdi, frame->rsi, nullptr);
    hit_otherwise(session, static_cast<uint32_t>(frame->site), flags, regs, reinterpret_cast<uint64_t>(frame));
  }
  if (flags & kSiteBacktrace) divert_backtrace(frame, site_of(*frame).resume);
}

// What is not usual. Like the two above it has sonde_on_entry's arguments and is jumped to: the hit path's frame is no part of
// what they need, and at a system call in a signal handler there may be little stack.
[[gnu::noinline]] void enter_otherwise(EntryFrame* frame, uint64_t rbp, uint64_t rbx, uint64_t r12, uint64_t r13,
                                       uint64_t r14, uint64_t r15) {
  bool is_call = __atomic_load_n(&site_of(*frame).flags, __ATOMIC_RELAXED) & kSiteSystemCall;
  return (is_call ? enter_system_call : enter_rarely)(frame, rbp, rbx, r12, r13, r14, r15);
}

}  // namespace

extern "C" {

void sonde_on_entry(EntryFrame* frame, uint64_t rbp, uint64_t rbx, uint64_t r12, uint64_t r13, uint64_t r14,
                    uint64_t r15) {
  SessionHeader* session = sonde_agent_control.session;
  if (__builtin_expect(!session, 0)) return;
  uint32_t number = static_cast<uint32_t>(frame->site);
  uint32_t flags = __atomic_load_n(&session_sites(session)[number].flags, __ATOMIC_RELAXED);
  if (__builtin_expect((flags | kSiteLoopHead) != kUsualLoop, 0))
    return enter_otherwise(frame, rbp, rbx, r12, r13, r14, r15);
  if (__builtin_expect(is_recording(session), 1))
    hit_usual(session, number, frame->slot, reinterpret_cast<uint64_t>(frame));
}

void sonde_on_return(uint64_t trampoline, uint64_t now, uint64_t own_sp) {
  SessionHeader* session = sonde_agent_control.session;
  end_guarded(session, trampoline_index(trampoline), ExitKind::returned, now, own_sp);
}

uint64_t sonde_on_unwind(ReturnEntry* entry, uint64_t own_sp) {
  uint64_t now = sonde_agent_control.flags & kControlNoTicks ? 0 : ticks();
  uint32_t index = static_cast<uint32_t>(entry - sonde_entries);
  uint64_t resume = sonde_activations[index].resume;
  end_guarded(sonde_agent_control.session, index, ExitKind::unwound, now, own_sp);
  return resume;
}

}  // extern "C"
}  // namespace sonde
