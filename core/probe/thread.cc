#include "core/probe/thread.h"

#include "core/base/check.h"
#include "core/native/syscall.h"
#include "core/native/ticks.h"
#include "core/probe/alternate_stack.h"
#include "core/probe/entries.h"
#include "core/probe/safe_read.h"

namespace sonde {
namespace {

constexpr uint64_t kRegistering = 1;
constexpr uint32_t kProbes = 64;  // slots looked at per thread pointer

// Where libc keeps the thread's id, in bytes behind the thread pointer; 0: not found yet. glibc on x86-64: 0x2d0 of
// struct pthread; musl: near 0x30. Found by looking for the id, so no libc is assumed.
uint32_t tid_offset;

uint32_t* find_tid_word(ThreadState* state, uint64_t thread_pointer) {
  if (thread_pointer <= kEarlyKey) return &state->no_tid_word;
  constexpr uint64_t kLookedAt = 0x400;  // into the thread's own scratch: there may be little stack
  ThreadScratch* scratch = thread_scratch(sonde_agent_control.thread_area, state);
  auto* words = reinterpret_cast<uint32_t*>(scratch->walks[0].frames);
  static_assert(sizeof scratch->walks[0].frames >= kLookedAt);
  uint64_t in_page = kPage - thread_pointer % kPage;  // what is known to be mapped
  uint64_t bytes = safe_read(thread_pointer, words, kLookedAt, in_page);
  uint32_t known = __atomic_load_n(&tid_offset, __ATOMIC_RELAXED);
  if (known && known + 4 <= bytes) return reinterpret_cast<uint32_t*>(thread_pointer + known);
  for (uint32_t at = 0; at + 4 <= bytes; at += 4) {
    if (words[at / 4] != state->tid) continue;
    __atomic_store_n(&tid_offset, at, __ATOMIC_RELAXED);
    return reinterpret_cast<uint32_t*>(thread_pointer + at);
  }
  return &state->no_tid_word;
}

bool is_alive(uint32_t pid, uint32_t tid) {
  constexpr int64_t kNoSuchProcess = -3;
  return system_call(__NR_tgkill, pid, tid, 0) != kNoSuchProcess;
}

// The first thread of a process. What it inherited, with the very thread pointer, the usual path must not take for its own.
void mark_process() {
  ProcessMark* mark = process_mark(sonde_agent_control.thread_area);
  uint64_t none = 0, *begun = &mark->begun_ticks;
  if (__atomic_load_n(begun, __ATOMIC_RELAXED)) return;
  if (!__atomic_compare_exchange_n(begun, &none, ticks(), false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) return;
  mark->first_sp = reinterpret_cast<uint64_t>(__builtin_frame_address(0));
  uint32_t fresh = __atomic_load_n(&sonde_fresh_entries, __ATOMIC_RELAXED);
  for (uint32_t index = 0; index < fresh && index < kTrampolines; index++)
    if (sonde_owners[index].state == EntryState::in_use) sonde_owners[index].usual = &no_usual_thread;
}

// The state is the caller's alone: key has kRegistering set.
ThreadState* set_up(SessionHeader* session, ThreadState* state, uint64_t key) {
  state->pid = static_cast<uint32_t>(system_call(__NR_getpid));
  state->tid = static_cast<uint32_t>(system_call(__NR_gettid));
  for (uint64_t& guard : state->guards) guard = 0;
  state->usual_owner[0] = state->tid;
  state->usual_owner[1] = static_cast<uint32_t>(EntryState::in_use);
  ask_alternate_stack(thread_scratch(sonde_agent_control.thread_area, state));
  state->tid_word = find_tid_word(state, key);
  state->tid_value = *state->tid_word;
  state->ring = ring_take(session, state->pid, state->tid, key);
  state->ring_retry = 0;
  mark_process();
  __atomic_store_n(&state->key, key, __ATOMIC_RELEASE);
  allow_usual_path(session, state);
  return state;
}

// The state is about to become another thread's; its key has kRegistering set.
void leave_to_another(ThreadState* state) {
  __atomic_store_n(&state->usual_key, 0, __ATOMIC_RELAXED);
  if (state->ring) ring_end(state->ring, state->tid);
  ThreadScratch* scratch = thread_scratch(sonde_agent_control.thread_area, state);
  for (RingHeader*& parked : scratch->parked) {
    if (parked) ring_end(parked, state->tid);
    parked = nullptr;
  }
  scratch->unguarded = false;
  for (WalkPlace& place : scratch->walks) place.holder = 0;
}

// libc's word changed: libc has only now filled it in (program start, fork), or this is another thread.
ThreadState* check_identity(SessionHeader* session, ThreadState* state, uint64_t key) {
  uint32_t value = *state->tid_word;
  if (static_cast<uint32_t>(system_call(__NR_gettid)) == state->tid) {
    state->tid_value = value;
    return state;
  }
  __atomic_store_n(&state->key, key | kRegistering, __ATOMIC_RELAXED);
  leave_to_another(state);
  return set_up(session, state, key);
}

// False: as many threads as there may be have come.
bool give_scratch(void* area, ThreadState* state) {
  if (state->scratch) return true;
  uint32_t* given = &process_mark(area)->scratches;
  uint32_t number = __atomic_load_n(given, __ATOMIC_RELAXED);
  while (number < kMaxThreads)
    if (__atomic_compare_exchange_n(given, &number, number + 1, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
      state->scratch = number + 1;
      return true;
    }
  return false;
}

bool claim(ThreadState* state, uint64_t expected, uint64_t key) {
  return __atomic_compare_exchange_n(&state->key, &expected, key | kRegistering, false, __ATOMIC_ACQ_REL,
                                     __ATOMIC_RELAXED);
}

}  // namespace

void allow_usual_path(SessionHeader* session, ThreadState* state) {
  if (state->ring && session->policy != FullPolicy::sum)
    __atomic_store_n(&state->usual_key, state->key, __ATOMIC_RELEASE);
}

void park_ring(SessionHeader* session, ThreadState* thread) {
  ThreadScratch* scratch = thread_scratch(sonde_agent_control.thread_area, thread);
  RingHeader *old = thread->ring, *next = nullptr, **place = nullptr;
  __atomic_store_n(&old->several, 1, __ATOMIC_RELEASE);  // before the next is seen to be taken
  // Each place is emptied before it is looked at: a handler may park too.
  for (RingHeader*& parked : scratch->parked) {
    RingHeader* there = __atomic_exchange_n(&parked, nullptr, __ATOMIC_RELAXED);
    if (there && (next || !ring_comes_to_rest(there) || ring_in_flight(there)))
      __atomic_store_n(&parked, there, __ATOMIC_RELAXED);
    else if (there) next = there;
    if (!parked) place = &parked;
  }
  if (!next && place) next = ring_take(session, thread->pid, thread->tid, thread->key);
  if (!next) return;
  __atomic_store_n(&next->several, 1, __ATOMIC_RELAXED);
  bool done = __atomic_compare_exchange_n(&thread->ring, &old, next, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  RingHeader* left = done ? old : next;
  __atomic_store_n(place, left, __ATOMIC_RELAXED);
}

ThreadState* find_thread_slow(SessionHeader* session, void* area, uint64_t key) {
  if (!area) return nullptr;
  ThreadState* states = static_cast<ThreadState*>(area);
  uint32_t first = thread_slot(key);
  for (uint32_t i = 0; i < kProbes; i++) {
    ThreadState* state = &states[(first + i) % kThreadSlots];
    uint64_t there = __atomic_load_n(&state->key, __ATOMIC_ACQUIRE);
    if (there == key) return *state->tid_word == state->tid_value ? state : check_identity(session, state, key);
    if (there == (key | kRegistering)) return nullptr;  // a handler interrupted this thread's own registration
    if (there) continue;
    if (sonde_agent_control.flags & kControlNoTicks) return nullptr;  // it may have inherited that
    if (!claim(state, 0, key)) continue;
    if (give_scratch(area, state)) return set_up(session, state, key);
    __atomic_store_n(&state->key, 0, __ATOMIC_RELEASE);
    break;
  }
  if (sonde_agent_control.flags & kControlNoTicks) return nullptr;
  for (uint32_t i = 0; i < kProbes; i++) {  // crowded: states of threads that are gone
    ThreadState* state = &states[(first + i) % kThreadSlots];
    uint64_t there = __atomic_load_n(&state->key, __ATOMIC_ACQUIRE);
    if (!there || there & kRegistering || is_alive(state->pid, state->tid) || !claim(state, there, key)) continue;
    leave_to_another(state);
    return set_up(session, state, key);
  }
  return nullptr;
}

void retire_thread(void* area, uint64_t thread_pointer) {
  uint64_t key = thread_pointer ? thread_pointer : kEarlyKey;
  ThreadState* states = static_cast<ThreadState*>(area);
  for (uint32_t i = 0; i < kProbes; i++) {
    ThreadState* state = &states[(thread_slot(key) + i) % kThreadSlots];
    if (state->key != key) continue;
    __atomic_store_n(&state->usual_key, 0, __ATOMIC_RELAXED);
    return __atomic_store_n(&state->key, key | kRegistering, __ATOMIC_RELEASE);  // as if it registered for ever
  }
}

namespace {

struct AlternateStack {
  uint64_t begin;
  int32_t flags;
  int32_t padding;
  uint64_t size;
  bool holds(uint64_t sp) const { return sp - begin < size; }
};

constexpr uint64_t kSuspect = 1;  // in a guard
constexpr uint64_t kSignalFrame = 512;  // less than the red zone, siginfo and context

enum class Path { goes_on, suspect, gone };

// Whether the path that set the guard is gone. A path interrupted on the same stack has its sp above ours, by a signal frame at
// least: what a return of the same call has left there is nearer, and must be found by the next entry, for it may be that
// no return comes any more, with no entries left and none reclaimed before this is. Only a handler on the alternate stack may
// run above a path that still waits; or another context of the program, on a stack of its own.
Path judge(uint64_t guard, uint64_t sp, bool look) {
  bool known = guard & kSuspect;
  guard &= ~kSuspect;
  if (guard > sp + kSignalFrame) return Path::goes_on;
  constexpr int32_t kOnStack = 1;  // SS_ONSTACK
  AlternateStack alternate{};
  if (guard >= sp) return Path::gone;
  if ((known && !look) || sonde_agent_control.flags & kControlNoSystemCalls) return Path::suspect;
  if (system_call(__NR_sigaltstack, 0, reinterpret_cast<uint64_t>(&alternate)) < 0) return Path::suspect;
  if (alternate.holds(guard)) return Path::gone;
  return alternate.flags & kOnStack ? Path::goes_on : Path::suspect;
}

// What a path has saved at its sp stays while it waits. False: nothing is mapped there any more.
bool read_saved(uint64_t guard, uint64_t& sum) {
  uint64_t words[8];
  if (safe_read(guard, words, sizeof words) < sizeof words) return false;
  sum = 0;
  for (uint64_t word : words) sum = (sum ^ word) * kThreadHash;
  return true;
}

constexpr uint64_t kChangedOnce = 1;  // in ThreadScratch::saved; 0 there: not yet read

// Of a suspect: what it has saved is remembered when it is first seen, and it is gone when that has changed twice. Once might be
// what another context remembered of an earlier path with the same sp, when it was interrupted here. For the same reason it is
// marked (in `guard` too) before it is read, and a word that has meanwhile become another's is left alone.
[[gnu::noinline]] bool is_overwritten(ThreadState* thread, unsigned level, uint64_t& guard, bool look) {
  uint64_t& saved = thread_scratch(sonde_agent_control.thread_area, thread)->saved[level];
  bool known = guard & kSuspect;
  if ((known && !look) || sonde_agent_control.flags & kControlNoSystemCalls) return false;
  if (!known) {
    __atomic_store_n(&saved, 0, __ATOMIC_RELAXED);
    if (!local_compare_exchange(&thread->guards[level], &guard, guard | kSuspect)) return false;
    guard |= kSuspect;
  }
  uint64_t before = __atomic_load_n(&saved, __ATOMIC_RELAXED), sum;
  bool mapped = read_saved(guard & ~kSuspect, sum);
  if (__atomic_load_n(&thread->guards[level], __ATOMIC_RELAXED) != guard) return false;
  if (!mapped) return true;
  sum = (sum & ~kChangedOnce) | 2;
  if (before == 0) local_compare_exchange(&saved, &before, sum);
  if (before == 0 || (before & ~kChangedOnce) == sum) return false;
  if (before & kChangedOnce) return true;
  local_compare_exchange(&saved, &before, sum | kChangedOnce);
  return false;
}

// The rings of a thread none of whose writers will come back.
void give_up_records(SessionHeader* session, ThreadState* thread) {
  ring_abandon_all(session, thread->ring);
  for (RingHeader* parked : thread_scratch(sonde_agent_control.thread_area, thread)->parked)
    if (parked && !ring_comes_to_rest(parked)) ring_abandon_all(session, parked);
}

// False: the guard has changed meanwhile.
[[gnu::noinline]] bool take_level(SessionHeader* session, ThreadState* thread, unsigned level, uint64_t guard,
                                  bool gone) {
  if (!local_compare_exchange(&thread->guards[level], &guard, 0)) return false;
  give_up_walk(thread_scratch(sonde_agent_control.thread_area, thread), level, gone);
  if (level != 0 || !thread->ring || ring_comes_to_rest(thread->ring)) return true;
  if (gone && !others_wait(thread)) give_up_records(session, thread);
  else park_ring(session, thread);
  return true;
}

// Between two looks at suspects, which take system calls.
constexpr uint32_t kHitsPerLook = 64;

}  // namespace

[[gnu::noinline]] bool others_wait(const ThreadState* thread) {
  for (unsigned level = 1; level < kMaxContextLevels; level++)
    if (thread->guards[level]) return true;
  return thread_scratch(sonde_agent_control.thread_area, thread)->unguarded;
}

unsigned settle_guards(SessionHeader* session, ThreadState* thread, uint64_t sp) {
  ThreadScratch* scratch = thread_scratch(sonde_agent_control.thread_area, thread);
  bool look = scratch->next_look++ % kHitsPerLook == 0;
  unsigned suspect = kMaxContextLevels;
  uint64_t suspected = 0;
  for (unsigned level = 0; level < kMaxContextLevels; level++) {
    uint64_t guard = __atomic_load_n(&thread->guards[level], __ATOMIC_RELAXED);
    if (!guard) return level;
    Path path = judge(guard, sp, look);
    bool gone = path == Path::gone || (path == Path::suspect && is_overwritten(thread, level, guard, look));
    if (gone && take_level(session, thread, level, guard, true)) return level;
    if (path != Path::suspect || suspect != kMaxContextLevels) continue;
    suspect = level;
    suspected = guard;
  }
  scratch->unguarded = true;  // a return goes on without a level, too
  bool taken = suspect != kMaxContextLevels && take_level(session, thread, suspect, suspected, false);
  return taken ? suspect : kMaxContextLevels;
}

}  // namespace sonde
