// The recorder's side of the shared mapping that core/event/session.h describes: makes it, keeps its heart beating,
// starts and stops recording. What the target writes into it is never trusted: sizes and offsets come from layout(),
// which lies in the recorder's own memory.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>

#include "core/event/session.h"
#include "host/error.h"
#include "host/trace/clock.h"

namespace sonde::host {

struct SessionOptions {
  FullPolicy policy = FullPolicy::wait;
  uint32_t ring_count = 512;
  uint64_t ring_bytes = 4 << 20;  // a power of two, at least 64 KiB; some milliseconds of calls at full speed
  uint32_t max_sites = kMaxSites;
  unsigned heartbeat_timeout_ms = 70;  // waiters give up after this: less than 100 ms after a kill -9 of the recorder
};

struct SessionLayout {
  uint64_t size, counters_offset, rings_offset, ring_bytes;
  uint32_t ring_count, max_sites;
};

class Session {
 public:
  // A sparse memfd, sealed against shrinking, mapped here. The heart beats from now on.
  // `fd`: a new memory file of that kind, which stays the caller's; -1: one is made.
  static Result<std::unique_ptr<Session>> create(const SessionOptions& options, int fd = -1);
  ~Session();
  Session(const Session&) = delete;

  SessionHeader* header() const { return header_; }
  const SessionLayout& layout() const { return layout_; }
  FullPolicy policy() const { return policy_; }
  int fd() const { return fd_; }  // close-on-exec; to be mapped shared and writable into the target
  const ClockSample& start_clock() const { return start_clock_; }
  const TickClock& early_clock() const { return early_clock_; }  // good to 0.1 %, before the recording is over

  Site* sites() const { return at<Site>(kSitesOffset); }
  SiteCounters* counters() const { return at<SiteCounters>(layout_.counters_offset); }
  RingHeader* ring(uint32_t i) const { return at<RingHeader>(layout_.rings_offset + i * (kPage + layout_.ring_bytes)); }

  // Publishes sites [0, count): to be called when they are written. Never shrinks; at most max_sites.
  void set_site_count(uint32_t count);
  void set_state(SessionState state);

  // The heart stops beating when the draining thread made no progress for so long (a dead disk): the target goes on and
  // counts its losses. Without a recorder (never called) the heart just beats.
  void note_progress() { progress_ticks_.store(1 + now_ticks(), std::memory_order_relaxed); }

 private:
  Session() = default;
  template <class T>
  T* at(uint64_t offset) const {
    return reinterpret_cast<T*>(reinterpret_cast<char*>(header_) + offset);
  }
  static uint64_t now_ticks();
  void beat();
  void run_heart();

  int fd_ = -1;
  SessionHeader* header_ = nullptr;
  SessionLayout layout_{};
  FullPolicy policy_ = FullPolicy::wait;
  ClockSample start_clock_;
  TickClock early_clock_;
  std::atomic<uint64_t> progress_ticks_ = 0;
  std::atomic<bool> ending_ = false;
  std::thread heart_;
};

}  // namespace sonde::host
