#include "host/trace/recorder.h"

#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <fstream>

#include "host/target/threads.h"

namespace sonde::host {

namespace {

constexpr size_t kFlushWords = 64 << 10;        // half a megabyte of records make a good chunk
constexpr uint64_t kPortionWords = 16 << 10;    // taken at once: a waiting thread gets its room early
constexpr int64_t kFlushEveryNs = 200'000'000;  // what a killed recorder may lose
constexpr int64_t kAccountEveryNs = 2'000'000'000;
constexpr int64_t kShortestPauseNs = 50'000, kLongestPauseNs = 1'000'000;
constexpr size_t kMostNotes = 100;

int64_t steady_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

std::string task_path(uint32_t pid, uint32_t tid) { return fmt::format("/proc/{}/task/{}", pid, tid); }

std::string thread_name(uint32_t pid, uint32_t tid) {
  std::string name;
  std::ifstream comm(task_path(pid, tid) + "/comm");
  std::getline(comm, name);
  return name;
}

template <class T>
T load(const T& shared) {
  return __atomic_load_n(&shared, __ATOMIC_ACQUIRE);
}

}  // namespace

Recorder::Recorder(Session& session, TraceWriter& writer)
    : session_(session), writer_(writer), rings_(session.layout().ring_count) {
  last_poll_ns_ = last_flush_ns_ = last_account_ns_ = steady_ns();
}

uint32_t Recorder::rings_taken() const {
  return std::min(load(session_.header()->rings_taken), session_.layout().ring_count);
}

uint32_t Recorder::new_thread(uint32_t pid, uint32_t tid) {
  Thread thread;
  thread.info.pid = pid;
  thread.info.tid = tid;
  thread.info.name = thread_name(pid, tid);
  uint32_t index = static_cast<uint32_t>(threads_.size());
  writer_.thread(index, thread.info);
  threads_.push_back(std::move(thread));
  return index;
}

void Recorder::note(std::string sentence) {
  if (notes_.size() < kMostNotes) notes_.push_back(std::move(sentence));
}

// Whether the process of that number, as seen from here, is one of the target's: it maps the session. In another pid
// namespace the number may be a stranger's.
bool Recorder::in_session(uint32_t pid) {
  auto [place, fresh] = processes_.try_emplace(pid, false);
  if (!fresh) return place->second;
  struct stat session;
  if (fstat(session_.fd(), &session) != 0) return false;
  std::string inode = fmt::format(" {} ", session.st_ino), line;
  std::ifstream maps(fmt::format("/proc/{}/maps", pid));
  bool mapped = false;
  while (!mapped && std::getline(maps, line))
    mapped = line.find(inode) != line.npos && line.find("/memfd:") != line.npos;
  std::string ids = status_field(static_cast<pid_t>(pid), "NSpid");  // one for each namespace that it is in
  return place->second = mapped && !ids.empty() && ids.find('\t') == ids.npos;
}

// Notices a ring that was taken. False: nothing to be had from it.
bool Recorder::look_at(uint32_t i) {
  RingView& view = rings_[i];
  RingHeader* ring = session_.ring(i);
  uint64_t taken = load(ring->taken_ticks);
  if (!view.seen) {
    if (taken == 0) return false;  // its thread is just writing down who it is
    uint32_t pid = load(ring->pid), tid = load(ring->tid);
    bool known = in_session(pid) && access(task_path(pid, tid).c_str(), F_OK) == 0;
    view = {new_thread(pid, tid), true, false, known, taken, 0};
  } else if (view.taken_ticks != taken && !view.closed) {
    close_ring(i, "it was taken a second time");  // only recycle_ended gives rings away
  }
  return true;
}

bool Recorder::poll() {
  uint64_t all = 0, fullest = 0;
  for (uint32_t i = 0, taken = rings_taken(); i < taken; i++) {
    uint64_t bytes = drain(i);
    all += bytes;
    fullest = std::max(fullest, bytes);
  }
  int64_t now = steady_ns();
  if (now - last_flush_ns_ > kFlushEveryNs) flush_all(now);
  choose_pause(now, fullest);
  session_.note_progress();
  return all != 0;
}

void Recorder::choose_pause(int64_t now, uint64_t fullest) {
  int64_t since = std::max<int64_t>(now - last_poll_ns_, 1);
  last_poll_ns_ = now;
  if (fullest == 0) {
    pause_ns_ = std::clamp(pause_ns_ * 2, kShortestPauseNs, kLongestPauseNs);
    return;
  }
  double quarter = static_cast<double>(session_.layout().ring_bytes) / 4 / static_cast<double>(fullest);
  pause_ns_ = static_cast<int64_t>(
      std::clamp(static_cast<double>(since) * quarter, double{kShortestPauseNs}, double{kLongestPauseNs}));
}

void Recorder::flush_all(int64_t now) {
  last_flush_ns_ = now;
  for (uint32_t i = 0; i < threads_.size(); i++) flush(i);
  recycle_ended();
  if (now - last_account_ns_ < kAccountEveryNs || events_ == events_at_account_) return;
  last_account_ns_ = now;
  events_at_account_ = events_;
  std::vector<TraceThread> threads;
  for (uint32_t i = 0, taken = rings_taken(); i < taken; i++) keep_account(i);
  for (const Thread& t : threads_) threads.push_back(t.info);
  writer_.account(sample_clock(), threads);
}

// Bytes taken.
uint64_t Recorder::drain(uint32_t i) {
  RingHeader* ring = session_.ring(i);
  if (load(ring->state) == static_cast<uint32_t>(RingState::free) || !look_at(i)) return 0;
  RingView& view = rings_[i];
  uint64_t tail = load(ring->tail), size = session_.layout().ring_bytes, begin = view.head;
  if (!view.closed && (tail < begin || tail - begin > size || tail % 8 != 0))
    close_ring(i, fmt::format("its tail {:#x} contradicts its head {:#x}", tail, begin));
  while (!view.closed && view.head != tail) {
    uint64_t position = view.head % size, bytes = std::min(tail - view.head, size - position);
    std::string problem;
    uint64_t words = take_records(view, ring_data(ring) + position / 8, bytes / 8, problem);
    view.head += words * 8;
    __atomic_store_n(&ring->head, view.head, __ATOMIC_RELEASE);
    if (!problem.empty()) close_ring(i, problem);
    if (threads_[view.thread].pending.size() >= kFlushWords) flush(view.thread);
  }
  if (view.closed) __atomic_store_n(&ring->head, tail, __ATOMIC_RELEASE);
  return view.head - begin;
}

// Takes whole records of at most a portion from data[0, count), which ends where a record must end. Copied first: the
// target may write there while we look. Words taken; if something is wrong behind them, `problem` says what.
uint64_t Recorder::take_records(RingView& view, const uint64_t* data, uint64_t count, std::string& problem) {
  Thread& thread = threads_[view.thread];
  std::vector<uint64_t>& to = thread.pending;
  size_t begin = to.size(), taken = 0, copied = std::min(count, kPortionWords);
  to.insert(to.end(), data, data + copied);
  while (taken < copied) {
    uint64_t word = to[begin + taken];
    uint32_t n = record_words(word);
    if (n == 0 || n > count - taken) {
      problem = fmt::format("{:#x} {}", word, n ? "starts a record without end" : "starts no record");
      break;
    }
    RecordType type = record_type(word);
    if (type == RecordType::hole) {  // without contents, so it may be longer than what was copied
      to.resize(begin + taken);
      return taken + n;
    }
    if (n > copied - taken) break;
    events_++;
    if (type == RecordType::call) thread.info.records++;
    taken += n;
  }
  to.resize(begin + taken);
  return taken;
}

void Recorder::close_ring(uint32_t i, const std::string& why) {
  rings_[i].closed = true;
  note(fmt::format("thread {}: its ring was overwritten by the program and is not used any more ({})",
                   threads_[rings_[i].thread].info.tid, why));
}

void Recorder::flush(uint32_t index) {
  Thread& thread = threads_[index];
  if (thread.pending.empty()) return;
  writer_.records(index, thread.pending);
  thread.pending.clear();
}

void Recorder::append(uint32_t pid, uint32_t tid, std::span<const uint64_t> record) {
  auto found = std::find_if(threads_.rbegin(), threads_.rend(),
                            [&](const Thread& t) { return t.info.pid == pid && t.info.tid == tid; });
  uint32_t index = found == threads_.rend() ? new_thread(pid, tid) : static_cast<uint32_t>(threads_.rend() - found - 1);
  Thread& thread = threads_[index];
  thread.pending.insert(thread.pending.end(), record.begin(), record.end());
  events_++;
  if (!record.empty() && record_type(record[0]) == RecordType::call) thread.info.records++;
}

void Recorder::keep_account(uint32_t i) {
  if (!rings_[i].seen) return;
  RingHeader* ring = session_.ring(i);
  TraceThread& info = threads_[rings_[i].thread].info;
  info.calls = load(ring->calls);
  info.waits = load(ring->waits);
  info.waited_ticks = load(ring->waited_ticks);
  info.lost_calls = load(ring->lost_calls);
  for (unsigned c = 0; c < kLossCauses; c++) info.lost[c] = load(ring->lost[c]);
}

// Reserved and never committed: the thread is gone in the middle of writing.
void Recorder::note_unfinished_record(uint32_t i) {
  RingHeader* ring = session_.ring(i);
  if (!rings_[i].seen || rings_[i].closed || load(ring->reserve) == load(ring->tail)) return;
  note(fmt::format("thread {} ended while it wrote a record: the last {} bytes of its ring are not used",
                   threads_[rings_[i].thread].info.tid, load(ring->reserve) - load(ring->tail)));
}

// A drained ring whose thread gave it up, or is known to be gone, may be taken by a new thread.
void Recorder::recycle_ended() {
  for (uint32_t i = 0, taken = rings_taken(); i < taken; i++) {
    RingHeader* ring = session_.ring(i);
    RingView& view = rings_[i];
    uint32_t state = load(ring->state);
    if (state == static_cast<uint32_t>(RingState::free) || !view.seen) continue;
    if (state != static_cast<uint32_t>(RingState::ended)) {
      const TraceThread& t = threads_[view.thread].info;
      if (!view.thread_known || access(task_path(t.pid, t.tid).c_str(), F_OK) == 0) continue;
      processes_.erase(t.pid);  // the number may come back as another process
    }
    drain(i);
    keep_account(i);
    note_unfinished_record(i);
    flush(view.thread);
    threads_[view.thread].pending.shrink_to_fit();
    view = {};
    std::memset(reinterpret_cast<char*>(ring) + offsetof(RingHeader, pid), 0,
                sizeof(RingHeader) - offsetof(RingHeader, pid));
    __atomic_store_n(&ring->state, static_cast<uint32_t>(RingState::free), __ATOMIC_RELEASE);
  }
}

// Only where the target has written: to read a hole of the sparse mapping would fill it.
void Recorder::count_site_losses(TraceMeta& meta) {
  uint64_t begin = session_.layout().counters_offset;
  uint64_t sites = std::min(load(session_.header()->site_count), session_.layout().max_sites);
  uint64_t end = begin + sites * sizeof(SiteCounters);
  for (uint64_t at = begin; at < end;) {
    off_t data = lseek(session_.fd(), static_cast<off_t>(at), SEEK_DATA);
    if (data < 0 || static_cast<uint64_t>(data) >= end) break;
    off_t hole = lseek(session_.fd(), data, SEEK_HOLE);
    uint64_t first = (static_cast<uint64_t>(data) - begin) / sizeof(SiteCounters);
    uint64_t last = std::min(sites, (static_cast<uint64_t>(hole) - begin) / sizeof(SiteCounters) + 1);
    for (uint64_t s = first; s < last; s++) {
      std::array<uint64_t, kLossCauses> counts;
      for (unsigned c = 0; c < kLossCauses; c++) counts[c] = load(session_.counters()[s].lost[c]);
      if (std::any_of(counts.begin(), counts.end(), [](uint64_t n) { return n != 0; }))
        meta.site_lost[static_cast<uint32_t>(s)] = counts;
    }
    at = static_cast<uint64_t>(hole);
  }
}

void Recorder::finish(TraceMeta& meta) {
  for (uint32_t i = 0, taken = rings_taken(); i < taken; i++) {
    drain(i);
    keep_account(i);
    note_unfinished_record(i);
  }
  for (uint32_t i = 0; i < threads_.size(); i++) {
    flush(i);
    meta.threads.push_back(threads_[i].info);
  }
  meta.lost_no_thread_state = load(session_.header()->lost_no_thread_state);
  count_site_losses(meta);
  meta.notes.insert(meta.notes.end(), notes_.begin(), notes_.end());
}

}  // namespace sonde::host
