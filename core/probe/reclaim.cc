// Rounds of two passes over the pool: find the suspects and their age, then end those of the older half of that span. One
// round mostly does; where nearly all suspects are young, for the program paused after the first, more follow.
#include "core/probe/reclaim.h"

#include "core/probe/alternate_stack.h"

#include "core/native/syscall.h"
#include "core/native/ticks.h"
#include "core/probe/entries.h"
#include "core/probe/hit.h"
#include "core/probe/safe_read.h"
#include "core/probe/sum_calls.h"

namespace sonde {
namespace {

// A look that frees little is not repeated before many more calls have found the pool empty.
constexpr uint32_t kEnough = kTrampolines / 256;
constexpr unsigned kMaxRounds = 24;  // then a span of minutes is down to microseconds
template <uint32_t kLongest>
class Pause {
 public:
  bool goes_on() {
    uint32_t left = __atomic_load_n(&left_, __ATOMIC_RELAXED);
    if (left) __atomic_store_n(&left_, left - 1, __ATOMIC_RELAXED);
    return left;
  }
  void set(bool helped) {
    constexpr uint32_t kFirst = 4096;
    uint32_t length = helped ? 0 : length_ ? length_ * 2 : kFirst;
    length_ = length > kLongest ? kLongest : length;
    __atomic_store_n(&left_, length_, __ATOMIC_RELAXED);
  }

 private:
  uint32_t left_ = 0, length_ = 0;
};
Pause<1 << 20> reclaiming;
Pause<1 << 16> finding;

// The activation of `index` is one of those that share the slot, where `word` is the trampoline of the newest.
bool is_chained(uint64_t word, uint32_t index) {
  if (!is_trampoline(word)) return false;
  uint32_t at = trampoline_index(word) + 1;
  for (uint32_t i = 0; at && i <= kMaxTailChain; i++) {
    if (at - 1 == index) return true;
    // A free one's link is none to an activation. Its owner may free it after this look: then the link is any number.
    if (sonde_owners[at - 1].state != EntryState::in_use) return false;
    at = __atomic_load_n(&sonde_calls[at - 1].link, __ATOMIC_RELAXED);
    if (at > kTrampolines) return false;
  }
  return false;
}

// Whether a thread's entries may be taken by this one. Threads take entries in turn, so the answers of many threads are
// remembered: each costs a system call, and a pass asks for every entry. An answer holds for one pass: a thread may end
// meanwhile, then its entries are found by the next.
class Owners {
 public:
  explicit Owners(const ThreadState* thread) : thread_(thread) {}
  bool may_take(uint32_t owner) {
    owner &= ~kHandlerOwner;
    if (owner == thread_->tid) return true;
    Answer& answer = answers_[owner % kAnswers];
    if (answer.owner != owner) answer = {owner, is_gone(owner)};
    return answer.gone;
  }

 private:
  static constexpr uint32_t kAnswers = 16;
  struct Answer {
    uint32_t owner = 0;
    bool gone = false;
  };

  // Also a thread of the parent, in a forked child: its slots, if still hijacked, are never suspects.
  bool is_gone(uint32_t owner) const {
    constexpr int64_t kNoSuchProcess = -3;
    return !(sonde_agent_control.flags & kControlNoSystemCalls) &&
           system_call(__NR_tgkill, thread_->pid, owner, 0) == kNoSuchProcess;
  }

  const ThreadState* thread_;
  Answer answers_[kAnswers];
};

// A slot that holds the real address itself is no evidence: it may be on its way out through sonde_return_common. But not if the
// slot lies in `own`, the stack from here up to the slot of this very hit: that call was made, and has not been hooked,
// since the activation was left. Else the pool would never recover from jumps away from one and the same call: once it is
// empty the call is not hooked, and its slot holds what all of them call the real address.
bool is_suspect(uint64_t word, uint32_t index, AddrRange own) {
  uint64_t trampolines = reinterpret_cast<uint64_t>(sonde_trampolines);
  if (is_trampoline_of(trampolines, index, word) || is_chained(word, index)) return false;
  return word != sonde_entries[index].real || own.contains(Addr(sonde_entries[index].slot));
}

// The words in slots, read in batches. Calls that longjmp left again and again had the same few slots, so what was read
// is remembered for the pass; a call that has taken its slot since then is too young to be ended by it.
class Slots {
 public:
  explicit Slots(AddrRange own) : own_(own) {}
  // Whether the word in the slot of `index` is known; tells then whether that makes the activation a suspect.
  bool knows(uint32_t index, bool& suspect) const {
    uint64_t slot = sonde_entries[index].slot;
    const Word& word = words_[place(slot)];
    if (word.slot != slot) return false;
    suspect = is_suspect(word.value, index, own_);
    return true;
  }
  // Takes `index` into the batch; false if it is full.
  bool add(uint32_t index) {
    if (count_ == kMaxSafeWords) return false;
    indices_[count_] = index;
    slots_[count_++] = sonde_entries[index].slot;
    return true;
  }
  template <class Visit>
  void read(Visit visit) {
    uint64_t values[kMaxSafeWords];
    bool found[kMaxSafeWords];
    safe_read_words(slots_, values, found, count_);
    for (unsigned i = 0; i < count_; i++) {
      if (found[i]) words_[place(slots_[i])] = {slots_[i], values[i]};
      if (!found[i] || is_suspect(values[i], indices_[i], own_)) visit(indices_[i]);
    }
    count_ = 0;
  }

 private:
  static constexpr uint32_t kWords = 64;
  struct Word {
    uint64_t slot = 0, value = 0;
  };
  // Slots of a recursion are a multiple of 16 apart.
  static uint32_t place(uint64_t slot) { return static_cast<uint32_t>(slot >> 4 ^ slot >> 10) % kWords; }

  AddrRange own_;
  Word words_[kWords];
  uint64_t slots_[kMaxSafeWords];
  uint32_t indices_[kMaxSafeWords];
  unsigned count_ = 0;
};

// Calls visit(index) for each suspect.
template <class Visit>
void visit_suspects(const ThreadState* thread, AddrRange own, Visit visit) {
  Owners owners(thread);
  Slots slots(own);
  for (uint32_t index = 0; index < kTrampolines; index++) {
    const Ownership& ownership = sonde_owners[index];
    if (ownership.state != EntryState::in_use || !owners.may_take(ownership.owner)) continue;
    if (bool suspect; slots.knows(index, suspect)) {
      if (suspect) visit(index);
      continue;
    }
    if (slots.add(index)) continue;
    slots.read(visit);
    slots.add(index);
  }
  slots.read(visit);
}

void end_abandoned(SessionHeader* session, ThreadState* thread, uint32_t index, uint64_t now) {
  bool own = sonde_owners[index].owner == thread->tid && thread->ring;
  if (own && thread->held_entries) thread->held_entries--;
  if (own && is_summing(session)) sum_call_abandoned(session, thread, index, now);
  else if (own)
    ring_write_call(session, thread->ring, sonde_calls[index].site, ExitKind::abandoned, sonde_entries[index].slot,
                    sonde_calls[index].entry_ticks, now);
  entry_give_common(index);
}

struct Round {
  uint32_t suspects = 0, freed = 0;
};
[[gnu::noinline]] Round free_older_half(SessionHeader* session, ThreadState* thread, AddrRange own) {
  Round round;
  uint64_t oldest = ~uint64_t{0}, newest = 0;
  visit_suspects(thread, own, [&](uint32_t index) {
    uint64_t begun = sonde_calls[index].entry_ticks;
    if (begun < oldest) oldest = begun;
    if (begun > newest) newest = begun;
    round.suspects++;
  });
  if (!round.suspects) return round;
  uint64_t limit = oldest + (newest - oldest) / 2, now = ticks();
  visit_suspects(thread, own, [&](uint32_t index) {
    if (sonde_calls[index].entry_ticks > limit || !entry_claim(index)) return;
    end_abandoned(session, thread, index, now);
    round.freed++;
  });
  return round;
}

}  // namespace

// A handler may come and put entries into the list meanwhile, and these are no lost ones: then the list's word has changed.
uint32_t find_lost_entries(ThreadState* thread) {
  constexpr uint32_t kBatch = 64;
  uint32_t lost[kBatch], count = 0;
  uint64_t empty = __atomic_load_n(&thread->free_entries, __ATOMIC_RELAXED), list = empty;
  if (list_first(empty) || others_wait(thread) || finding.goes_on()) return 0;
  for (uint32_t index = 0; index < kTrampolines && count < kBatch; index++)
    if (sonde_owners[index].state == EntryState::free && sonde_owners[index].owner == thread->tid)
      lost[count++] = index;
  finding.set(count);
  if (!count || __atomic_load_n(&thread->free_entries, __ATOMIC_RELAXED) != empty) return 0;
  // Nobody knows of them but this: their links may be written.
  for (uint32_t i = 0; i < count; i++) {
    uint32_t number = list_number(lost[i]);
    sonde_calls[lost[i]].link = list_first(list) - number;
    list = list_with(list, number);
  }
  return local_compare_exchange(&thread->free_entries, &empty, list) ? count : 0;
}

uint32_t reclaim_entries(SessionHeader* session, ThreadState* thread) {
  if (sonde_agent_control.flags & kControlNoSystemCalls) return 0;
  if (reclaiming.goes_on()) return 0;
  auto here = reinterpret_cast<uint64_t>(__builtin_frame_address(0));
  if (!has_room(thread_scratch(sonde_agent_control.thread_area, thread), here)) return 0;
  // This hit's path is the outermost of its thread, so the first guard is its own.
  AddrRange own{Addr(here), Addr(thread->guards[0] + sizeof(EntryFrame) + 8)};
  uint32_t freed = 0;
  for (unsigned i = 0; i < kMaxRounds && freed < kEnough; i++) {
    Round round = free_older_half(session, thread, own);
    freed += round.freed;
    if (round.freed == round.suspects || round.suspects < kEnough) break;
  }
  reclaiming.set(freed >= kEnough);
  return freed;
}

}  // namespace sonde
