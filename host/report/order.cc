#include "host/report/order.h"

#include <algorithm>

namespace sonde::host {

namespace {

constexpr uint64_t kTotal = 4u << 20;  // records in all windows together

struct Item {
  uint64_t entry, exit;
  uint32_t site, slot;
  uint64_t frames_at;
  uint32_t sequence;
  uint16_t frame_count;
  uint8_t type, kind;
};

// Entry order; at equal ticks a call before its stack, outer before inner (later record, larger slot).
bool before(const Item& a, const Item& b) {
  if (a.entry != b.entry) return a.entry < b.entry;
  bool a_stack = a.type == uint8_t(RecordType::stack), b_stack = b.type == uint8_t(RecordType::stack);
  if (a_stack != b_stack) return b_stack;
  if (a.exit != b.exit) return a.exit > b.exit;
  if (a.slot != b.slot) return a.slot > b.slot;
  return a.sequence > b.sequence;
}

struct ThreadWindow {
  uint64_t count = 0;      // records seen in this window
  uint64_t watermark = 0;  // all earlier windows ended before
  uint64_t last_end = 0;   // latest end seen
  std::vector<Item> items;
  std::vector<uint64_t> frames;
  std::vector<Item> straddlers;
  std::vector<uint64_t> straddler_frames;
  size_t next_straddler = 0;

  void restart() {
    count = watermark = last_end = next_straddler = 0;
    items.clear();
    frames.clear();
  }
};

}  // namespace

bool stack_reliable(std::span<const uint64_t> frames, bool overflow, Reason* first_bad) {
  for (uint64_t word : frames) {
    Frame frame = unpack_frame(word);
    if (!is_reliable(frame.reason) || (frame.recovered & kMarked)) return *first_bad = frame.reason, false;
  }
  if (overflow || frames.empty()) return *first_bad = Reason::depth_limit, false;
  if (unpack_frame(frames.back()).reason != Reason::end) return *first_bad = Reason::depth_limit, false;
  return true;
}

struct EntryOrder::Impl {
  const Recording& recording;
  Accept accept;
  bool with_stacks;
  uint32_t window;
  std::vector<ThreadWindow> threads;
  uint64_t total = 0;

  // The record as an item; false if it is a hole or contradicts itself.
  bool decode(uint32_t thread, std::span<const uint64_t> words, Item& item, bool& bad) {
    uint64_t head = words[0];
    RecordType type = record_type(head);
    bad = false;
    if (type == RecordType::hole) return false;
    uint32_t length = record_words(head);
    bad = length == 0 || length != words.size() || record_site(head) >= recording.sites.size() ||
          thread >= recording.threads.size();
    if (bad) return false;
    item = Item{words[1], words[1], record_site(head), record_high(head), 0, 0, 0, uint8_t(type), record_kind(head)};
    if (is_interval(type)) {
      item.exit = words[2];
      bool inherited = type == RecordType::inherited;
      bad = item.exit < item.entry || item.kind > uint8_t(ExitKind::inherited) ||
            inherited != (item.kind == uint8_t(ExitKind::inherited));
      item.type = uint8_t(RecordType::call);
    } else if (type == RecordType::stack) {
      item.slot = 0;
      item.frame_count = static_cast<uint16_t>(words.size() - kStackHeaderWords);
    }
    return !bad;
  }

  // Runs over the trace with the same windows in both passes. take(thread, item, words, straddles) gets each record,
  // close(thread) the end of each window.
  template <class Take, class Close>
  Result<void> pass(Take take, Close close) {
    total = 0;
    threads.resize(recording.threads.size());
    for (ThreadWindow& t : threads) t.restart();
    auto end_window = [&](uint32_t index) {
      ThreadWindow& t = threads[index];
      t.watermark = t.last_end;
      close(index);
      total -= t.count;
      t.count = 0;
    };
    auto result = recording.records->each([&](uint32_t index, std::span<const uint64_t> words) {
      Item item;
      bool bad;
      if (words.empty()) return;
      if (!decode(index, words, item, bad)) return take(index, nullptr, words, bad);
      ThreadWindow& t = threads[index];
      take(index, &item, words, item.entry < t.watermark);
      t.last_end = std::max(t.last_end, item.exit);
      ++t.count;
      ++total;
      if (t.count >= window) end_window(index);
      if (total >= kTotal)
        for (uint32_t i = 0; i < threads.size(); ++i) end_window(i);
    });
    if (!result) return result;
    for (uint32_t i = 0; i < threads.size(); ++i) {
      threads[i].last_end = ~0ull;
      end_window(i);
    }
    return {};
  }

  bool wanted(uint32_t thread, const Item& item) {
    if (item.type == uint8_t(RecordType::stack) && !with_stacks) return false;
    return !accept || accept(thread, recording.function_of(item.site));
  }

  static void keep(std::vector<Item>& items, std::vector<uint64_t>& frames, Item item,
                   std::span<const uint64_t> words) {
    item.sequence = static_cast<uint32_t>(items.size());
    if (item.frame_count) {
      item.frames_at = frames.size();
      frames.insert(frames.end(), words.begin() + kStackHeaderWords, words.end());
    }
    items.push_back(item);
  }

  void count(Survey& survey, uint32_t thread, const Item& item, std::span<const uint64_t> words) {
    survey.first_ticks = std::min(survey.first_ticks, item.entry);
    survey.last_ticks = std::max(survey.last_ticks, item.exit);
    ++survey.thread_records[thread];
    switch (static_cast<RecordType>(item.type)) {
      case RecordType::call:
        if (item.kind == uint8_t(ExitKind::inherited)) break;
        ++survey.calls;
        ++survey.kinds[item.kind];
        ++survey.sites[item.site].calls;
        break;
      case RecordType::entry:
        ++survey.entries;
        ++survey.sites[item.site].entries;
        break;
      default:
        ++survey.stacks;
        Reason reason;
        if (!stack_reliable(words.subspan(kStackHeaderWords), item.kind != 0, &reason)) {
          ++survey.unreliable_stacks;
          ++survey.unreliable_by[static_cast<unsigned>(reason) % kReasons];
        }
    }
  }

  void emit(uint32_t thread, const Item& item, const std::vector<uint64_t>& frames, const EventSink& sink) {
    Event event;
    event.entry = item.entry;
    event.exit = item.exit;
    event.site = recording.function_of(item.site);
    event.slot = item.slot;
    event.type = static_cast<RecordType>(item.type);
    if (event.type == RecordType::call) event.kind = static_cast<ExitKind>(item.kind);
    if (event.type == RecordType::stack) {
      event.overflow = item.kind != 0;
      event.frames = std::span(frames).subspan(item.frames_at, item.frame_count);
    }
    sink(thread, event);
  }

  // The window's items and the straddlers entered within it, merged.
  void emit_window(uint32_t index, const EventSink& sink) {
    ThreadWindow& t = threads[index];
    std::sort(t.items.begin(), t.items.end(), before);
    auto straddler_due = [&] {
      return t.next_straddler < t.straddlers.size() && t.straddlers[t.next_straddler].entry < t.watermark;
    };
    for (const Item& item : t.items) {
      while (straddler_due() && !before(item, t.straddlers[t.next_straddler]))
        emit(index, t.straddlers[t.next_straddler++], t.straddler_frames, sink);
      emit(index, item, t.frames, sink);
    }
    while (straddler_due()) emit(index, t.straddlers[t.next_straddler++], t.straddler_frames, sink);
    t.items.clear();
    t.frames.clear();
  }
};

EntryOrder::EntryOrder(const Recording& recording, Accept accept, bool with_stacks, uint32_t window)
    : impl_(new Impl{recording, std::move(accept), with_stacks, window, {}, 0}) {}
EntryOrder::~EntryOrder() = default;

Result<Survey> EntryOrder::survey() {
  Survey survey;
  survey.sites.resize(impl_->recording.sites.size());
  survey.thread_records.resize(impl_->recording.threads.size());
  auto take = [&](uint32_t index, const Item* item, std::span<const uint64_t> words, bool flag) {
    if (!item) return void(survey.bad_records += flag);
    impl_->count(survey, index, *item, words);
    ThreadWindow& t = impl_->threads[index];
    if (flag && impl_->wanted(index, *item)) Impl::keep(t.straddlers, t.straddler_frames, *item, words);
  };
  auto result = impl_->pass(take, [](uint32_t) {});
  if (!result) return std::unexpected(result.error());
  for (ThreadWindow& t : impl_->threads) std::sort(t.straddlers.begin(), t.straddlers.end(), before);
  return survey;
}

Result<void> EntryOrder::replay(const EventSink& sink, const std::vector<bool>* only) {
  auto take = [&](uint32_t index, const Item* item, std::span<const uint64_t> words, bool straddles) {
    if (!item || straddles || (only && !(*only)[index]) || !impl_->wanted(index, *item)) return;
    ThreadWindow& t = impl_->threads[index];
    Impl::keep(t.items, t.frames, *item, words);
  };
  return impl_->pass(take, [&](uint32_t index) {
    if (!only || (*only)[index]) impl_->emit_window(index, sink);
  });
}

}  // namespace sonde::host
