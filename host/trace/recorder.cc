#include "host/trace/recorder.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <fstream>

namespace sonde::host {

namespace {

constexpr size_t kFlushWords = 64 << 10;              // half a megabyte of records make a good chunk
constexpr int64_t kFlushEveryNs = 200'000'000;        // what a killed recorder may lose

int64_t steady_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

std::string thread_name(uint32_t pid, uint32_t tid) {
  std::string name;
  std::getline(std::ifstream(fmt::format("/proc/{}/task/{}/comm", pid, tid)), name);
  return name;
}

template <class T>
T load(const T& shared) {
  return __atomic_load_n(&shared, __ATOMIC_ACQUIRE);
}

}  // namespace

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

// Notices a ring that was taken, or taken anew by another thread.
void Recorder::look_at(uint32_t i) {
  RingView& view = rings_[i];
  RingHeader* ring = session_.ring(i);
  uint64_t taken = load(ring->taken_ticks);
  if (view.seen && view.taken_ticks == taken) return;
  view = {new_thread(load(ring->pid), load(ring->tid)), true, false, taken, 0};
}

bool Recorder::poll() {
  bool any = false;
  uint32_t taken = std::min(load(session_.header()->rings_taken), session_.layout().ring_count);
  for (uint32_t i = 0; i < taken; i++) any |= drain(i);
  int64_t now = steady_ns();
  if (now - last_flush_ns_ > kFlushEveryNs) {
    last_flush_ns_ = now;
    for (uint32_t i = 0; i < threads_.size(); i++) flush(i);
    recycle_ended();
  }
  session_.note_progress();
  return any;
}

bool Recorder::drain(uint32_t i) {
  RingHeader* ring = session_.ring(i);
  if (load(ring->state) == static_cast<uint32_t>(RingState::free)) return false;
  look_at(i);
  RingView& view = rings_[i];
  if (view.closed) return false;
  uint64_t tail = load(ring->tail), size = session_.layout().ring_bytes;
  if (tail == view.head) return false;
  if (tail < view.head || tail - view.head > size || tail % 8 != 0) {
    close_ring(i, fmt::format("its tail {:#x} contradicts its head {:#x}", tail, view.head));
    return false;
  }
  uint64_t end_of_lap = std::min(tail, (view.head / size + 1) * size);
  bool good = take_records(i, view.head, end_of_lap) && (end_of_lap == tail || take_records(i, end_of_lap, tail));
  if (!good) return false;
  view.head = tail;
  __atomic_store_n(&ring->head, tail, __ATOMIC_RELEASE);
  return true;
}

// Records of [begin, end), which do not wrap. Copied first: the target may write there while we look.
bool Recorder::take_records(uint32_t i, uint64_t begin, uint64_t end) {
  RingView& view = rings_[i];
  Thread& thread = threads_[view.thread];
  const uint64_t* data = ring_data(session_.ring(i)) + begin % session_.layout().ring_bytes / 8;
  size_t old = thread.pending.size(), count = (end - begin) / 8;
  thread.pending.insert(thread.pending.end(), data, data + count);
  for (size_t at = old; at < thread.pending.size();) {
    uint64_t word = thread.pending[at];
    uint32_t n = record_words(word);
    if (n == 0 || at + n > thread.pending.size()) {
      thread.pending.resize(at);
      close_ring(i, fmt::format("no record starts with {:#x}", word));
      return false;
    }
    RecordType type = record_type(word);
    if (type != RecordType::hole) events_++;
    if (type == RecordType::call) thread.info.records++;
    at += n;
  }
  if (thread.pending.size() >= kFlushWords) flush(view.thread);
  return true;
}

void Recorder::close_ring(uint32_t i, const std::string& why) {
  rings_[i].closed = true;
  notes_.push_back(fmt::format("thread {}: its ring was overwritten by the program and is not used any more ({})",
                               threads_[rings_[i].thread].info.tid, why));
}

void Recorder::flush(uint32_t index) {
  Thread& thread = threads_[index];
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

// A drained ring whose thread gave it up, or is gone, may be taken by a new thread.
void Recorder::recycle_ended() {
  uint32_t taken = std::min(load(session_.header()->rings_taken), session_.layout().ring_count);
  for (uint32_t i = 0; i < taken; i++) {
    RingHeader* ring = session_.ring(i);
    uint32_t state = load(ring->state);
    if (state == static_cast<uint32_t>(RingState::free) || !rings_[i].seen) continue;
    if (state == static_cast<uint32_t>(RingState::taken) &&
        access(fmt::format("/proc/{}/task/{}", load(ring->pid), load(ring->tid)).c_str(), F_OK) == 0)
      continue;
    drain(i);
    keep_account(i);
    flush(rings_[i].thread);
    rings_[i] = {};
    std::memset(reinterpret_cast<char*>(ring) + offsetof(RingHeader, pid), 0,
                sizeof(RingHeader) - offsetof(RingHeader, pid));
    __atomic_store_n(&ring->state, static_cast<uint32_t>(RingState::free), __ATOMIC_RELEASE);
  }
}

void Recorder::finish(TraceMeta& meta) {
  uint32_t taken = std::min(load(session_.header()->rings_taken), session_.layout().ring_count);
  for (uint32_t i = 0; i < taken; i++) {
    drain(i);
    keep_account(i);
  }
  for (uint32_t i = 0; i < threads_.size(); i++) {
    flush(i);
    meta.threads.push_back(threads_[i].info);
  }
  meta.lost_no_thread_state = load(session_.header()->lost_no_thread_state);
  uint32_t sites = std::min(load(session_.header()->site_count), session_.layout().max_sites);
  for (uint32_t s = 0; s < sites; s++) {
    std::array<uint64_t, kLossCauses> counts;
    for (unsigned c = 0; c < kLossCauses; c++) counts[c] = load(session_.counters()[s].lost[c]);
    if (std::any_of(counts.begin(), counts.end(), [](uint64_t n) { return n != 0; })) meta.site_lost[s] = counts;
  }
  meta.notes.insert(meta.notes.end(), notes_.begin(), notes_.end());
}

}  // namespace sonde::host
