// Two passes over the pool: find the suspects and their age, then end those of the older half of that span.
#include "core/probe/reclaim.h"

#include "core/native/syscall.h"
#include "core/native/ticks.h"
#include "core/probe/entries.h"
#include "core/probe/safe_read.h"

namespace sonde {
namespace {

// A look that frees little is not repeated before many more calls have found the pool empty.
constexpr uint32_t kEnough = kTrampolines / 256, kMaxPause = 1 << 20;
uint32_t pause_left, pause_length;

bool is_pausing() {
  uint32_t left = __atomic_load_n(&pause_left, __ATOMIC_RELAXED);
  if (!left) return false;
  __atomic_store_n(&pause_left, left - 1, __ATOMIC_RELAXED);
  return true;
}
void set_pause(uint32_t freed) {
  uint32_t length = freed >= kEnough ? 0 : pause_length ? pause_length * 2 : 4096;
  pause_length = length > kMaxPause ? kMaxPause : length;
  __atomic_store_n(&pause_left, pause_length, __ATOMIC_RELAXED);
}

// The activation of `index` is one of those that share the slot, where `word` is the trampoline of the newest.
bool is_chained(uint64_t word, uint32_t index) {
  if (!is_trampoline(word)) return false;
  uint32_t at = trampoline_index(word) + 1;
  for (uint32_t i = 0; at && i <= kMaxTailChain; i++) {
    if (at - 1 == index) return true;
    at = sonde_activations[at - 1].link;
  }
  return false;
}

class Owners {  // whether a thread's entries may be taken by this one; remembers the last answer
 public:
  explicit Owners(const ThreadState* thread) : thread_(thread), last_(thread->tid) {}
  bool may_take(uint32_t owner) {
    if (owner == thread_->tid) return true;
    if (owner == last_) return last_gone_;
    last_ = owner;
    // Also a thread of the parent, in a forked child: its slots, if still hijacked, are never suspects.
    constexpr int64_t kNoSuchProcess = -3;
    last_gone_ = !(sonde_agent_control.flags & kControlNoSystemCalls) &&
                 system_call(__NR_tgkill, thread_->pid, owner, 0) == kNoSuchProcess;
    return last_gone_;
  }

 private:
  const ThreadState* thread_;
  uint32_t last_;
  bool last_gone_ = false;
};

// A slot that holds the real address itself is no evidence: it may be on its way out through sonde_return_common.
bool is_suspect(uint64_t word, uint32_t index) {
  return word != trampoline_address(index) && word != sonde_entries[index].real && !is_chained(word, index);
}

// Calls visit(index) for each suspect.
template <class Visit>
void visit_suspects(const ThreadState* thread, Visit visit) {
  Owners owners(thread);
  uint64_t slots[kMaxSafeWords], words[kMaxSafeWords];
  uint32_t indices[kMaxSafeWords];
  bool found[kMaxSafeWords];
  unsigned count = 0;
  for (uint32_t index = 0; index <= kTrampolines; index++) {
    if (count == kMaxSafeWords || (index == kTrampolines && count)) {
      safe_read_words(slots, words, found, count);
      for (unsigned i = 0; i < count; i++)
        if (!found[i] || is_suspect(words[i], indices[i])) visit(indices[i]);
      count = 0;
    }
    if (index == kTrampolines) break;
    const Activation& activation = sonde_activations[index];
    if (activation.state != EntryState::in_use || !owners.may_take(activation.owner)) continue;
    indices[count] = index;
    slots[count++] = sonde_entries[index].slot;
  }
}

void end_abandoned(SessionHeader* session, ThreadState* thread, uint32_t index, uint64_t now) {
  const Activation& activation = sonde_activations[index];
  if (activation.owner == thread->tid && thread->ring)
    ring_write_call(session, thread->ring, activation.site, ExitKind::abandoned, sonde_entries[index].slot,
                    activation.entry_ticks, now);
  entry_give_common(index);
}

}  // namespace

uint32_t reclaim_entries(SessionHeader* session, ThreadState* thread) {
  if (sonde_agent_control.flags & kControlNoSystemCalls) return 0;
  if (is_pausing()) return 0;
  uint64_t oldest = ~uint64_t{0}, newest = 0;
  visit_suspects(thread, [&](uint32_t index) {
    uint64_t begun = sonde_activations[index].entry_ticks;
    if (begun < oldest) oldest = begun;
    if (begun > newest) newest = begun;
  });
  uint32_t freed = 0;
  if (oldest <= newest) {
    uint64_t limit = oldest + (newest - oldest) / 2, now = ticks();
    visit_suspects(thread, [&](uint32_t index) {
      if (sonde_activations[index].entry_ticks > limit || !entry_claim(index)) return;
      end_abandoned(session, thread, index, now);
      freed++;
    });
  }
  set_pause(freed);
  return freed;
}

}  // namespace sonde
