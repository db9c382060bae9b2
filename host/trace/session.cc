// Layout and heartbeat of a session. The heart has its own thread, at real-time priority where permitted: the drain may
// sit in a write to a slow disk while the target's threads must still be told that waiting is worth it.
#include "host/trace/session.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <bit>
#include <new>

#include "core/base/check.h"
#include "core/native/ticks.h"

namespace sonde::host {
namespace {

constexpr int64_t kBeatNs = 4'000'000;
constexpr int64_t kStallLimitNs = 10'000'000'000;

uint64_t page_up(uint64_t n) { return (n + kPage - 1) & ~(kPage - 1); }

void sleep_ns(int64_t ns) {
  struct timespec t = {ns / 1'000'000'000, ns % 1'000'000'000};
  nanosleep(&t, nullptr);
}

SessionLayout lay_out(const SessionOptions& options) {
  SessionLayout l{};
  l.ring_bytes = options.ring_bytes;
  l.ring_count = options.ring_count;
  l.max_sites = options.max_sites;
  l.counters_offset = page_up(kSitesOffset + uint64_t{l.max_sites} * sizeof(Site));
  l.rings_offset = page_up(l.counters_offset + uint64_t{l.max_sites} * sizeof(SiteCounters));
  l.size = l.rings_offset + l.ring_count * (kPage + l.ring_bytes);
  return l;
}

}  // namespace

Result<std::unique_ptr<Session>> Session::create(const SessionOptions& options, int fd) {
  if (!std::has_single_bit(options.ring_bytes) || options.ring_bytes < 65536 || options.ring_bytes > 1 << 30)
    return fail(
        fmt::format("a ring of {} bytes is impossible: a power of two from 64 KiB to 1 GiB", options.ring_bytes), 2);
  if (options.ring_count < 1 || options.ring_count > 65536 || options.max_sites < 1 || options.max_sites > kMaxSites)
    return fail("a session has 1 to 65536 rings and 1 to 2097152 sites", 2);

  std::unique_ptr<Session> session(new Session);
  SessionLayout& l = session->layout_;
  l = lay_out(options);
  session->policy_ = options.policy;
  session->fd_ = fd >= 0 ? fcntl(fd, F_DUPFD_CLOEXEC, 3) : memfd_create("sonde", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (session->fd_ < 0) return fail_errno("making the shared session memory");
  if (ftruncate(session->fd_, static_cast<off_t>(l.size))) return fail_errno("sizing the shared session memory");
  // Without the seal a target could shrink it under the recorder's feet (SIGBUS).
  if (fcntl(session->fd_, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL))
    return fail_errno("sealing the session");
  void* memory = mmap(nullptr, l.size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, session->fd_, 0);
  if (memory == MAP_FAILED) return fail_errno("mapping the shared session memory");

  session->start_clock_ = sample_clock();
  sleep_ns(3'000'000);
  session->early_clock_ = TickClock(session->start_clock_, sample_clock());
  SessionHeader* h = session->header_ = new (memory) SessionHeader{};
  h->size = l.size;
  h->counters_offset = l.counters_offset;
  h->rings_offset = l.rings_offset;
  h->ring_bytes = l.ring_bytes;
  h->ring_count = l.ring_count;
  h->policy = options.policy;
  h->heartbeat_timeout_ticks = session->early_clock_.ticks_of(int64_t{options.heartbeat_timeout_ms} * 1'000'000);
  h->magic = kSessionMagic;
  session->beat();
  session->heart_ = std::thread([s = session.get()] { s->run_heart(); });
  return session;
}

Session::~Session() {
  ending_ = true;
  if (heart_.joinable()) heart_.join();
  if (header_) munmap(header_, layout_.size);
  if (fd_ >= 0) close(fd_);
}

void Session::set_site_count(uint32_t count) {
  SONDE_CHECK(count <= layout_.max_sites && count >= __atomic_load_n(&header_->site_count, __ATOMIC_RELAXED));
  __atomic_store_n(&header_->site_count, count, __ATOMIC_RELEASE);
}

void Session::set_state(SessionState state) {
  __atomic_store_n(&header_->state, static_cast<uint32_t>(state), __ATOMIC_RELEASE);
}

uint64_t Session::now_ticks() { return ticks(); }

void Session::beat() {
  uint64_t progress = progress_ticks_.load(std::memory_order_relaxed), now = ticks();
  if (progress && early_clock_.ns(static_cast<int64_t>(now - progress)) > kStallLimitNs) return;
  __atomic_store_n(&header_->heartbeat_ticks, now, __ATOMIC_RELAXED);
}

void Session::run_heart() {
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
  struct sched_param priority = {1};
  pthread_setschedparam(pthread_self(), SCHED_FIFO, &priority);  // a wish: refused without the right to it
  while (!ending_.load(std::memory_order_relaxed)) {
    beat();
    sleep_ns(kBeatNs);
  }
}

}  // namespace sonde::host
