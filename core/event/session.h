// The shared mapping between the recorder (host) and the target's agent: one memfd, sparse, made by the recorder and
// mapped into the target before anything is armed. The recorder treats everything the target writes as hostile: it
// copies, then checks. The target may die at any instruction; nothing recorded before is lost.
//
//   0                 SessionHeader        (one page)
//   kSitesOffset      Site[kMaxSites]          written by the host, read by the target
//   counters_offset   SiteCounters[kMaxSites]  written by the target
//   rings_offset      ring_count x { RingHeader (one page), ring_bytes of records }
//
// All integers are native; both sides run on one machine. Fields that both sides touch while running are accessed with
// __atomic built-ins.
#pragma once

#include <cstdint>

#include "core/event/record.h"

namespace sonde {

constexpr uint64_t kSessionMagic = 0x31303045444e4f53;  // "SONDE001"
constexpr uint64_t kPage = 4096;
constexpr uint64_t kSitesOffset = kPage;

enum class SessionState : uint32_t { preparing = 0, recording = 1, stopped = 2 };
enum class FullPolicy : uint32_t { wait = 0, drop = 1, sum = 2 };

// Why a hit, an exit hook or a record was lost. Counted per site in place, shown in every report footer.
enum class LossCause : uint32_t {
  nesting = 0,        // more than kMaxContextLevels signal handlers interrupted each other inside the probe path
  no_return_entry,    // all return trampolines in use: the call ran, its return was not hooked
  ring_full,          // --drop, or the recorder is gone
  no_ring,            // more threads than rings
  abandoned,          // its writer was left by a longjmp out of a signal handler
  no_stack,           // --sum: its signal stack has no room for looking up the caller
  stack_left_out,  // of the stack of a hit only: too little room, or too many contexts were switched away from in a walk
  count,
};
constexpr unsigned kLossCauses = static_cast<unsigned>(LossCause::count);

// Why the agent took the traps out of a process by itself.
enum class DisarmCause : uint32_t {
  seccomp = 0,  // a filter goes in, which may forbid what a trap needs
  small_stack,  // an alternate signal stack or a coroutine's without room for a (second) signal frame
  no_ticks,  // the time stamp counter is forbidden: nothing is recorded from then on
  traced,  // it asked its parent to trace it, who would see each trap
  child_loads,  // a forked child loads a library, and nobody looks whether that is safe for traps
  count,
};
constexpr unsigned kDisarmCauses = static_cast<unsigned>(DisarmCause::count);

struct SessionHeader {
  uint64_t magic;
  uint64_t size;  // of the whole mapping
  uint64_t counters_offset, rings_offset;
  uint64_t ring_bytes;  // a power of two
  uint32_t ring_count;
  FullPolicy policy;
  uint64_t heartbeat_timeout_ticks;  // no heartbeat for so long while a thread waits: the recorder is gone

  alignas(64) uint32_t state;  // SessionState; the hit path records only while `recording`
  uint32_t site_count;  // sites [0, site_count) are valid

  alignas(64) uint64_t heartbeat_ticks;  // written by the recorder at least every 10 ms
  uint32_t answered;  // last request that the host has carried out

  alignas(64) uint32_t requested;  // a thread of the target asks (libraries changed) and waits until answered >= it
  uint32_t rings_taken;  // high-water mark of rings ever taken
  uint64_t lost_no_thread_state;  // hits of threads for which no thread state was left
  uint64_t lost_no_ring;  // of threads for which no ring was
  uint64_t ring_waits;  // times a thread waited for a ring
  uint64_t ring_waited_ticks;
  uint64_t ring_gone_beat;  // as RingHeader::gone_beat, of the waiting for a ring
  uint32_t exiting_pid;  // a process of the target that is about to end and waits for the host to look at it
  uint32_t disarmed[kDisarmCauses];  // processes of the target whose traps the agent took out
  char check_reason[160];  // why the agent stopped by itself (SONDE_CHECK); "" if it did not

  // No ring is free: a thread asks the recorder to look for rings of threads that are gone, and waits until rings_looked >= its
  // request. See ring_await.
  alignas(64) uint32_t rings_wanted;
  alignas(64) uint32_t rings_looked;  // written by the recorder, as the rest
  uint32_t rings_freed;  // rings freed so far
  uint64_t rings_hopeless_until;  // ticks; a look found that living threads hold them all: until then waiting is no use
};
static_assert(sizeof(SessionHeader) <= kPage);

[[gnu::always_inline]] inline bool is_recording(const SessionHeader* session) {
  return __atomic_load_n(&session->state, __ATOMIC_RELAXED) == static_cast<uint32_t>(SessionState::recording);
}

enum SiteFlags : uint32_t {
  kSiteEnabled = 1,  // soft enable
  kSiteHijack = 2,  // hook the return
  kSiteStack = 4,  // a stack record for each hit
  kSiteLoader = 8,  // the loader's debug hook, kSiteExit: the process ends; see core/probe/host_event.h
  kSiteExit = 16,
  kSiteBacktrace = 32,  // _Unwind_Backtrace, see core/probe/backtrace.h
  kSiteSilent = 64,  // the engine's own only: leaves no record
  kSitePrctl = 128,  // prctl() and syscall(), which may forbid system calls, see core/probe/sandbox.h
  kSiteSyscall = 256,
  kSiteSigaltstack = 512,  // sigaltstack(), see core/probe/alternate_stack.h
  // `patch` is a system call instruction, `resume` its two-byte copy: the agent may carry the call out itself and go on at
  // resume + 2. Acts in every session state.
  kSiteSystemCall = 1024,
  kSiteMakecontext = 4096,  // makecontext(), see core/probe/disarm.h
  kSiteHandler = 8192,  // calls the target's own handlers, see core/probe/hit_handler.h
};

constexpr uint32_t kUsualSite = kSiteEnabled | kSiteHijack;  // what the usual paths in core/native serve

struct Site {
  uint64_t function;  // address of the function's entry in the target (before a landing pad)
  uint64_t patch;  // address of the first patched byte
  uint64_t resume;  // where execution goes on after the hit: the displaced instructions' copy
  uint32_t flags;  // SiteFlags
  uint32_t
      loop_head;  // 1: a jump within the function leads to `patch`: with this site's hook in the slot it is no call
};
static_assert(sizeof(Site) == 32);

struct SiteCounters {
  uint64_t lost[kLossCauses];
};

enum class RingState : uint32_t { free = 0, taken = 1, ended = 2 };

struct RingHeader {
  // Identity, written by the producer when it takes the ring.
  uint32_t state;  // RingState; free -> taken by the target (compare-exchange), ended -> free by the host
  uint32_t tid;  // beside the state, for ring_end
  uint32_t pid;
  uint32_t several;  // 1: its thread has more than this one, see park_ring in core/probe/thread.h
  uint64_t thread_pointer;
  uint64_t taken_ticks;

  alignas(64) uint64_t head;  // bytes consumed, written by the host

  alignas(64) uint64_t tail;  // bytes published, written by the producer
  uint64_t reserve;  // bytes reserved (>= tail), and a bit, see ring.h; the producer's own
  uint64_t nested;  // writers between them, see ring.h; the producer's own
  uint64_t limit;  // up to here `reserve` may go without another look at head or at the ring's end
  uint64_t mask;  // size of the records' space - 1
  uint64_t gone_beat;  // the recorder's heartbeat with which it was found gone; the producer's own

  alignas(64) uint64_t calls;  // calls entered and hooked; in flight = calls - call records - lost_calls
  uint64_t waits;  // times the producer waited for room
  uint64_t waited_ticks;
  uint64_t lost[kLossCauses];  // records, whatever their type
  uint64_t lost_calls;  // call records among them
};
static_assert(sizeof(RingHeader) <= kPage);

inline RingHeader* ring_header(SessionHeader* session, uint32_t ring) {
  return reinterpret_cast<RingHeader*>(reinterpret_cast<char*>(session) + session->rings_offset +
                                       ring * (kPage + session->ring_bytes));
}
inline uint64_t* ring_data(RingHeader* ring) {
  return reinterpret_cast<uint64_t*>(reinterpret_cast<char*>(ring) + kPage);
}
inline Site* session_sites(SessionHeader* session) {
  return reinterpret_cast<Site*>(reinterpret_cast<char*>(session) + kSitesOffset);
}
inline SiteCounters* session_counters(SessionHeader* session) {
  return reinterpret_cast<SiteCounters*>(reinterpret_cast<char*>(session) + session->counters_offset);
}

}  // namespace sonde
