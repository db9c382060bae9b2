#include "host/trace/recorder.h"

#include <fmt/format.h>
#include <sched.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <fstream>
#include <utility>

#include "core/base/check.h"
#include "core/event/ring.h"
#include "core/native/ticks.h"
#include "host/target/hurry.h"
#include "host/target/presence.h"
#include "host/target/threads.h"
#include "host/words.h"

namespace sonde::host {

namespace {

constexpr uint64_t kPortionWords = 4 << 10;     // taken at once: a waiting thread gets its room early
constexpr int64_t kFlushEveryNs = 200'000'000;  // what a killed recorder may lose
constexpr int64_t kAccountEveryNs = 2'000'000'000;
constexpr int64_t kLookEveryNs = 10'000'000;
constexpr int64_t kFirstSumsAfterNs = 1'000'000'000, kSumsEveryNs = 60'000'000'000;  // twice as long each time
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

// The thread is there, but on its way out of the kernel: it runs no instruction of the program any more.
bool is_exiting(uint32_t pid, uint32_t tid) {
  constexpr unsigned long kExiting = 4;  // PF_EXITING, Linux include/linux/sched.h
  std::string line;
  std::ifstream stat(task_path(pid, tid) + "/stat");
  std::getline(stat, line);
  size_t name_end = line.rfind(')');
  unsigned long flags = 0;
  bool found =
      name_end != line.npos && std::sscanf(line.c_str() + name_end + 1, " %*c %*d %*d %*d %*d %*d %lu", &flags) == 1;
  return found && flags & kExiting;
}

template <class T>
T load(const T& shared) {
  return __atomic_load_n(&shared, __ATOMIC_ACQUIRE);
}

constexpr int kNicer = -10;
constexpr uint64_t kSliceNs = 100'000;  // Linux 6.12: a short slice has an early deadline; before it says nothing

}  // namespace

void drain_first() {
  int nice = getpriority(PRIO_PROCESS, 0);
  for (int wanted : {std::max(nice + kNicer, -20), nice}) {
    Scheduling wish;
    wish.nice = wanted;
    wish.runtime = kSliceNs;
    if (wish.set(0)) return;
  }
}

Recorder::Recorder(Session& session, TraceWriter& writer)
    : session_(session),
      writer_(writer),
      rings_(session.layout().ring_count),
      summing_(session.policy() == FullPolicy::sum),
      sums_(session),
      sums_every_ns_(kFirstSumsAfterNs) {
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
  bool mapped = maps_memory_file(static_cast<pid_t>(pid), session_.fd());
  std::string ids = status_field(static_cast<pid_t>(pid), "NSpid");  // one for each namespace that it is in
  return place->second = mapped && !ids.empty() && ids.find('\t') == ids.npos;
}

// Whether the process is still the program that it was, without one of its threads.
bool Recorder::outlives(uint32_t pid) {
  processes_.erase(pid);  // another program may be in it by now
  return in_session(pid) && !status_field(static_cast<pid_t>(pid), "State").starts_with('Z');
}

// Of a ring that was just taken. A thread may take several, and remains one.
uint32_t Recorder::thread_of(uint32_t pid, uint32_t tid) {
  for (uint32_t i = 0, taken = rings_taken(); i < taken; i++) {
    if (!rings_[i].seen || !load(session_.ring(i)->several)) continue;
    const TraceThread& t = threads_[rings_[i].thread].info;
    if (t.pid == pid && t.tid == tid) return rings_[i].thread;
  }
  return new_thread(pid, tid);
}

// Notices a ring that was taken. False: nothing to be had from it.
bool Recorder::look_at(uint32_t i) {
  RingView& view = rings_[i];
  RingHeader* ring = session_.ring(i);
  uint64_t taken = load(ring->taken_ticks);
  if (!view.seen) {
    if (taken == 0) return false;  // its thread is just writing down who it is
    uint32_t pid = load(ring->pid), tid = load(ring->tid);
    bool process_known = in_session(pid), known = process_known && access(task_path(pid, tid).c_str(), F_OK) == 0;
    view = {thread_of(pid, tid), true, false, known, process_known, taken, 0, {}};
  } else if (view.taken_ticks != taken && !view.closed) {
    close_ring(i, "it was taken a second time");  // only recycle_ended gives rings away
  }
  return true;
}

bool Recorder::poll() {
  uint64_t all = 0, fullest = 0;
  uint32_t wanted = load(session_.header()->rings_wanted);  // first: what was taken before is seen below
  for (uint32_t i = 0, taken = rings_taken(); i < taken; i++) {
    uint64_t bytes = drain(i);
    all += bytes;
    fullest = std::max(fullest, bytes);
  }
  if (wanted != looked_) free_wanted(wanted);
  int64_t now = steady_ns();
  if (now - last_flush_ns_ > kFlushEveryNs) flush_all(now);
  choose_pause(now, fullest);
  if (all != 0 && now - last_look_ns_ > kLookEveryNs) choose_hurry(now);
  session_.note_progress();
  return all != 0;
}

// Goes to the next processor, and may go on to any from there: else the one thread whose processor this is would pay for all.
void move_on(const cpu_set_t& allowed) {
  int now = sched_getcpu(), next = now;
  do next = (next + 1) % CPU_SETSIZE;
  while (next != now && !CPU_ISSET(next, &allowed));
  if (now < 0 || next == now) return;
  cpu_set_t only;
  CPU_ZERO(&only);
  CPU_SET(next, &only);
  if (sched_setaffinity(0, sizeof only, &only) == 0) (void)sched_setaffinity(0, sizeof allowed, &allowed);
}

// Where every processor is busy, the time that a record costs here is time that the program does not get.
void Recorder::choose_hurry(int64_t now) {
  last_look_ns_ = now;
  std::ifstream file("/proc/loadavg");
  std::string load;
  unsigned running = 0;
  for (int i = 0; i < 3; i++) file >> load;
  file >> running;  // "running/all"; this thread is one of them
  cpu_set_t allowed;
  if (!file || sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
  bool all_busy = running > static_cast<unsigned>(CPU_COUNT(&allowed));
  writer_.set_hurry(all_busy);
  if (all_busy) move_on(allowed);
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
  recycle_ended(Look::now_and_then);
  if (summing_) return take_sums(now);
  if (now - last_account_ns_ < kAccountEveryNs || calls_ == calls_at_account_) return;
  last_account_ns_ = now;
  calls_at_account_ = calls_;
  std::vector<TraceThread> threads;
  for (uint32_t i = 0, taken = rings_taken(); i < taken; i++) keep_account(i);
  for (const Thread& t : threads_) threads.push_back(t.info);
  writer_.account(sample_clock(), threads);
}

// Each tree in the file replaces the one before: what a killed recorder loses must not make the file grow for ever.
void Recorder::take_sums(int64_t now) {
  if (now - last_account_ns_ < sums_every_ns_) return;
  last_account_ns_ = now;
  sums_every_ns_ = std::min(sums_every_ns_ * 2, kSumsEveryNs);
  std::vector<TraceThread> threads;
  for (uint32_t i = 0, taken = rings_taken(); i < taken; i++) keep_account(i);
  sums_.write(writer_, false);
  for (const Thread& t : threads_) threads.push_back(t.info);
  writer_.account(sample_clock(), threads);
}

// Bytes taken. to_end: the thread is gone, or stopped; it may not have published all that it has written.
uint64_t Recorder::drain(uint32_t i, bool to_end) {
  RingHeader* ring = session_.ring(i);
  if (load(ring->state) == static_cast<uint32_t>(RingState::free) || !look_at(i)) return 0;
  RingView& view = rings_[i];
  uint64_t tail = to_end ? ring_committed(ring) : load(ring->tail), size = session_.layout().ring_bytes,
           begin = view.head;
  if (!view.closed && (tail < begin || tail - begin > size || tail % 8 != 0))
    close_ring(i, fmt::format("its tail {:#x} contradicts its head {:#x}", tail, begin));
  while (!view.closed && view.head != tail) {
    uint64_t position = view.head % size, bytes = std::min(tail - view.head, size - position);
    const uint64_t* words = ring_data(ring) + position / 8;
    RecordEncoder::Taken taken = take(view.thread, words, bytes / 8);
    view.head += taken.words * 8;
    __atomic_store_n(&ring->head, view.head, __ATOMIC_RELEASE);
    if (taken.stop == RecordEncoder::Stop::taken) continue;
    close_ring(
        i, fmt::format("{:#x} {}", load(words[taken.words]),
                       taken.stop == RecordEncoder::Stop::no_end ? "starts a record without end" : "starts no record"));
  }
  if (view.closed) __atomic_store_n(&ring->head, tail, __ATOMIC_RELEASE);
  return view.head - begin;
}

// Takes whole records of about a portion from words[0, count), which ends where a record must end. Nothing but the
// encoder reads them: the target may write there while we look.
RecordEncoder::Taken Recorder::take(uint32_t index, const uint64_t* words, uint64_t count) {
  Thread& thread = threads_[index];
  if (!thread.pending) thread.pending = std::make_unique<RecordEncoder>();
  RecordEncoder::Taken taken = thread.pending->take(words, count, kPortionWords);
  thread.info.records += taken.calls;
  calls_ += taken.calls + taken.entries;
  stacks_ += taken.stacks;
  if (taken.stop != RecordEncoder::Stop::full) return taken;
  writer_.records(index, *thread.pending);
  taken.stop = RecordEncoder::Stop::taken;
  return taken;
}

void Recorder::close_ring(uint32_t i, const std::string& why) {
  rings_[i].closed = true;
  note(fmt::format("thread {}: its ring was overwritten by the program and is not used any more ({})",
                   threads_[rings_[i].thread].info.tid, why));
}

void Recorder::flush(uint32_t index) {
  if (threads_[index].pending) writer_.records(index, *threads_[index].pending);
}

// The last one of those numbers; -1: none.
int Recorder::find_thread(uint32_t pid, uint32_t tid) const {
  auto found = std::find_if(threads_.rbegin(), threads_.rend(),
                            [&](const Thread& t) { return t.info.pid == pid && t.info.tid == tid; });
  return static_cast<int>(threads_.rend() - found) - 1;
}

// Its thread's own tree knows the call, or, after a fork, the tree of the thread that forked.
void Recorder::end_summed(uint32_t pid, const InFlight& call, uint64_t now) {
  int own = find_thread(pid, call.tid);
  if (own < 0 || !sums_.has(static_cast<uint32_t>(own))) {
    uint32_t area = call.sum.area;
    if (area >= rings_.size() || !rings_[area].seen) return;
    if (own < 0) own = static_cast<int>(new_thread(pid, call.tid));
    return sums_.end_later(static_cast<uint32_t>(own), rings_[area].thread, call, now);
  }
  sums_.end_later(static_cast<uint32_t>(own), static_cast<uint32_t>(own), call, now);
}

void Recorder::append(uint32_t pid, uint32_t tid, std::span<const uint64_t> record) {
  int known = find_thread(pid, tid);
  uint32_t index = known < 0 ? new_thread(pid, tid) : static_cast<uint32_t>(known);
  while (!record.empty()) {
    RecordEncoder::Taken taken = take(index, record.data(), record.size());
    SONDE_CHECK(taken.stop == RecordEncoder::Stop::taken);
    record = record.subspan(taken.words);
  }
}

void Recorder::set_signal_stack(uint32_t pid, uint32_t tid, AddrRange stack) {
  int known = find_thread(pid, tid);
  if (known >= 0 && stack.size()) threads_[static_cast<size_t>(known)].info.signal_stack = stack;
}

void Recorder::keep_account(uint32_t i) {
  if (!rings_[i].seen) return;
  RingHeader* ring = session_.ring(i);
  TraceThread& info = threads_[rings_[i].thread].info;
  TraceThread& counted = rings_[i].counted;
  auto count = [](uint64_t& sum, uint64_t& known, uint64_t now) { sum += now - std::exchange(known, now); };
  count(info.calls, counted.calls, load(ring->calls));
  count(info.waits, counted.waits, load(ring->waits));
  count(info.waited_ticks, counted.waited_ticks, load(ring->waited_ticks));
  count(info.lost_calls, counted.lost_calls, load(ring->lost_calls));
  for (unsigned c = 0; c < kLossCauses; c++) count(info.lost[c], counted.lost[c], load(ring->lost[c]));
  if (!summing_) return;
  sums_.take(i, rings_[i].thread);
  sums_.account(rings_[i].thread, info);
}

// Reserved and never committed: the thread is gone in the middle of writing, or its writer never came back.
void Recorder::note_unfinished_record(uint32_t i) {
  RingHeader* ring = session_.ring(i);
  if (!rings_[i].seen || rings_[i].closed || ring_committed(ring) == load(ring->reserve)) return;
  if (load(ring->several)) {
    TraceThread& info = threads_[rings_[i].thread].info;
    uint64_t lost = ring_in_flight(ring);
    info.lost[static_cast<unsigned>(LossCause::abandoned)] += lost;
    info.lost_calls += lost;
    return;
  }
  note(fmt::format("thread {} ended while it wrote a record: the last {} of its ring are not used",
                   threads_[rings_[i].thread].info.tid,
                   counted((load(ring->reserve) & ~kUsualWriter) - load(ring->tail), "byte")));
}

// Whether the thread that took the ring will write no more. close: also where it was gone before it was seen, for which its process
// speaks, or where the kernel is still busy with its end.
bool Recorder::is_over(const RingView& view, Look look) {
  TraceThread& t = threads_[view.thread].info;
  bool there = access(task_path(t.pid, t.tid).c_str(), F_OK) == 0;
  if (there) return look == Look::close && view.thread_known && is_exiting(t.pid, t.tid);
  if (view.thread_known || (look == Look::close && view.process_known)) return true;
  if (look == Look::now_and_then && !t.outlived) t.outlived = outlives(t.pid);  // a number of other processes', perhaps
  return false;
}

// Threads of the target wait for a ring.
void Recorder::free_wanted(uint32_t wanted) {
  constexpr uint64_t kRest = 8;  // times what the look took: so long none is made that would be in vain
  uint64_t begun = ticks();
  bool helped = recycle_ended(Look::wanted) || recycle_ended(Look::close);
  if (!helped) {
    uint64_t now = ticks();
    __atomic_store_n(&session_.header()->rings_hopeless_until, now + kRest * (now - begun), __ATOMIC_RELAXED);
  }
  looked_ = wanted;
  __atomic_store_n(&session_.header()->rings_looked, wanted, __ATOMIC_RELEASE);
}

// A drained ring whose thread gave it up, or is known to be gone, may be taken by a new thread. How many there were.
uint32_t Recorder::recycle_ended(Look look) {
  uint32_t freed = 0;
  for (uint32_t i = 0, taken = rings_taken(); i < taken; i++) {
    RingHeader* ring = session_.ring(i);
    RingView& view = rings_[i];
    uint32_t state = load(ring->state);
    if (state == static_cast<uint32_t>(RingState::free) || !view.seen) continue;
    TraceThread& t = threads_[view.thread].info;
    bool given_back = state == static_cast<uint32_t>(RingState::ended);
    if (!given_back) {
      if (!is_over(view, look)) continue;
      processes_.erase(t.pid);  // the number may come back as another process
    }
    drain(i, true);
    keep_account(i);
    if (t.calls > t.records + t.lost_calls) t.outlived = given_back || outlives(t.pid);
    note_unfinished_record(i);
    flush(view.thread);
    threads_[view.thread].pending.reset();
    view = {};
    if (summing_) sums_.clear(i);
    std::memset(reinterpret_cast<char*>(ring) + offsetof(RingHeader, tid), 0,
                sizeof(RingHeader) - offsetof(RingHeader, tid));
    __atomic_store_n(&ring->state, static_cast<uint32_t>(RingState::free), __ATOMIC_RELEASE);
    __atomic_store_n(&session_.header()->rings_freed, ++rings_freed_, __ATOMIC_RELEASE);
    freed++;
  }
  return freed;
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
    drain(i, true);
    keep_account(i);
    note_unfinished_record(i);
    if (rings_[i].seen && load(session_.ring(i)->state) == static_cast<uint32_t>(RingState::ended))
      threads_[rings_[i].thread].info.outlived = true;
  }
  if (summing_) {
    sums_.finish();
    sums_.write(writer_, true);
    calls_ = sums_.calls();
  }
  for (uint32_t i = 0; i < threads_.size(); i++) {
    flush(i);
    if (summing_) sums_.account(i, threads_[i].info);
    meta.threads.push_back(threads_[i].info);
  }
  meta.lost_no_thread_state = load(session_.header()->lost_no_thread_state);
  meta.lost_no_ring = load(session_.header()->lost_no_ring);
  meta.ring_waits = load(session_.header()->ring_waits);
  meta.ring_waited_ticks = load(session_.header()->ring_waited_ticks);
  count_site_losses(meta);
  meta.notes.insert(meta.notes.end(), notes_.begin(), notes_.end());
}

}  // namespace sonde::host
