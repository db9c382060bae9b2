// What the agent knows of a thread. Found by the thread pointer in a table that lies in the area of the host
// (AgentControl::thread_area, zero at first): no TLS, no allocation, no lock, and available before libc is.
//
// - The area is mapped MADV_WIPEONFORK: a forked child finds no state, registers again and takes a ring of its own.
//   A vfork child has its parent's thread pointer while the parent waits: it uses the parent's state, as its stack.
// - A thread pointer may be used again by a new thread. libc keeps the thread's id near it; when that word changes, the
//   id is asked from the kernel once, and if it is another thread, the state starts anew (`ended` ring, new ring). The
//   free entries stay.
// - Guards: one per context level. A set guard holds the sp of a probe path that has not finished: a signal handler
//   interrupted it, so the handler's hits use the next level. A path left for ever (the handler ended in longjmp) is
//   suspected by its sp, which is then not far enough above the current one; but it may also be on another stack, and go on later
//   (swapcontext). Its level is taken only when what it has saved on its stack is overwritten; settle_guards.
// Signal-safe.
#pragma once

#include <cstdint>

#include "core/event/ring.h"
#include "core/probe/control.h"

namespace sonde {

struct alignas(128) ThreadState {
  uint64_t key;  // thread pointer; with bit 0 set while its thread registers; kEarlyKey for none; 0: unused
  uint32_t* tid_word;  // libc's copy of the thread's id, or &no_tid_word
  uint32_t tid_value;  // what *tid_word was when last checked against the kernel
  uint32_t tid;
  RingHeader* ring;  // null: none was to be had
  uint64_t free_entries;  // entries.h
  uint64_t guards[kMaxContextLevels];  // bit 0: of a suspect, see ThreadScratch::saved
  uint64_t usual_key;  // = key if the usual path may serve the thread (core/native/x86_64/entry.S), else 0
  uint32_t usual_owner[2];  // the words that it writes into Ownership: tid, EntryState::in_use
  uint32_t held_entries;  // about: those it has taken and not given away, in use or in its list
  uint32_t pid;
  uint32_t no_tid_word;
  uint32_t ring_retry;  // hits without a ring; see take_ring_late in hit.cc
  uint32_t takes;  // from others, while it held too many
  uint32_t scratch;  // number + 1 of its ThreadScratch; 0: the state was never used
};
static_assert(sizeof(ThreadState) == 256);

constexpr uint64_t kEarlyKey = 2;  // the thread pointer is still 0
constexpr uint32_t kThreadSlots = 2 * kMaxThreads;

constexpr uint64_t kThreadHash = 0x9e3779b97f4a7c15;
constexpr unsigned kThreadHashShift = 50;

inline uint32_t thread_slot(uint64_t key) { return static_cast<uint32_t>((key * kThreadHash) >> kThreadHashShift); }
static_assert(kThreadSlots == 1u << (64 - kThreadHashShift));

// Registers the thread if need be. Null: no state left, or the thread was interrupted while it registered.
ThreadState* find_thread_slow(SessionHeader* session, void* area, uint64_t key);

inline ThreadState* find_thread(SessionHeader* session, void* area, uint64_t thread_pointer) {
  ThreadState* state = static_cast<ThreadState*>(area) + thread_slot(thread_pointer);
  if (__builtin_expect(state->key == thread_pointer && *state->tid_word == state->tid_value, 1)) return state;
  return find_thread_slow(session, area, thread_pointer ? thread_pointer : kEarlyKey);
}

// The thread has a ring: its hits may take the usual path, unless calls are only summed.
void allow_usual_path(SessionHeader* session, ThreadState* state);

// A writer of the thread's ring was interrupted, and may not come back for long, or never: what is in flight there cannot be
// published, nor given up, for it may write yet. The thread goes on with another ring: one that it parked so and that is at rest by
// now, or a new one. Where none is to be had it stays with this one.
void park_ring(SessionHeader* session, ThreadState* thread);

// The calling thread has no state from now on: its hits record nothing.
void retire_thread(void* area, uint64_t thread_pointer);

// Whether a path of the thread, other than that with the outermost level, may be interrupted and go on later.
bool others_wait(const ThreadState* thread);

// Frees guards of paths that will never finish; returns the first free level, kMaxContextLevels if there is none.
unsigned settle_guards(SessionHeader* session, ThreadState* thread, uint64_t sp);

// Holds a context level of the thread for one probe path. level() == kMaxContextLevels: none was free.
class Guard {
 public:
  Guard(SessionHeader* session, ThreadState* thread, uint64_t sp) : thread_(thread) {
    if (__builtin_expect(thread->guards[0] != 0, 0)) level_ = settle_guards(session, thread, sp);
    if (level_ < kMaxContextLevels) __atomic_store_n(&thread->guards[level_], sp, __ATOMIC_RELAXED);
    __atomic_signal_fence(__ATOMIC_SEQ_CST);
  }
  ~Guard() {
    __atomic_signal_fence(__ATOMIC_SEQ_CST);
    if (level_ < kMaxContextLevels) __atomic_store_n(&thread_->guards[level_], 0, __ATOMIC_RELAXED);
  }
  Guard(const Guard&) = delete;
  Guard& operator=(const Guard&) = delete;
  unsigned level() const { return level_; }

 private:
  ThreadState* thread_;
  unsigned level_ = 0;
};

}  // namespace sonde
