#include "host/trace/encode.h"

#include <algorithm>
#include <cstring>

#include "core/base/cursor.h"

namespace sonde::host {

namespace {

// A group's control byte: bits 0..1 width of its times, 2..3 of its durations, as 1, 2, 4 or 8 bytes; 4..5 of its
// numbers: none where each is the one that followed its predecessor the last time, or 1, 2, 4 bytes.
constexpr size_t kHeaderBytes = 7 * 4;
constexpr size_t kGroup = RecordEncoder::kGroup, kMostRecords = RecordEncoder::kMostRecords;
constexpr size_t kSlack = kGroup * 8;  // a group is written whole, and only its part is counted

// Where the columns lie in their memory: each has room for the worst records.
constexpr size_t kNumbersAt = kMostRecords / kGroup + kSlack;
constexpr size_t kTimesAt = kNumbersAt + kMostRecords * 4 + kSlack;
constexpr size_t kDurationsAt = kTimesAt + kMostRecords * 8 + kSlack;
constexpr size_t kFramesAt = kDurationsAt + kMostRecords * 8 + kSlack;
constexpr size_t kColumnBytes = kFramesAt + RecordEncoder::kMostWords * 5;

unsigned width_code(uint64_t bits) {
  return unsigned{bits >> 8 != 0} + unsigned{bits >> 16 != 0} + unsigned{bits >> 32 != 0};
}

template <class Narrow, class Wide>
void put_narrow(uint8_t* to, const Wide* from) {
  Narrow narrow[kGroup];
  for (size_t i = 0; i < kGroup; i++) narrow[i] = static_cast<Narrow>(from[i]);
  std::memcpy(to, narrow, sizeof narrow);
}

// Writes a group's values with the width of that code.
template <class Wide>
void put_column(uint8_t*& to, const Wide* from, size_t size, unsigned code) {
  switch (code) {
    case 0: put_narrow<uint8_t>(to, from); break;
    case 1: put_narrow<uint16_t>(to, from); break;
    case 2: put_narrow<uint32_t>(to, from); break;
    default: put_narrow<uint64_t>(to, from); break;
  }
  to += size << code;
}

void put_uleb(uint8_t*& at, uint64_t value) {
  for (; value >= 0x80; value >>= 7) *at++ = static_cast<uint8_t>(value | 0x80);
  *at++ = static_cast<uint8_t>(value);
}

uint64_t get(Cursor& column, unsigned code) {
  switch (code) {
    case 0: return column.read<uint8_t>();
    case 1: return column.read<uint16_t>();
    case 2: return column.read<uint32_t>();
    default: return column.read<uint64_t>();
  }
}

// Once: what is checked is what is used.
uint64_t look(const uint64_t& shared) { return __atomic_load_n(&shared, __ATOMIC_RELAXED); }

template <class T>
void append(std::vector<uint8_t>& out, const T* from, size_t count) {
  auto* bytes = reinterpret_cast<const uint8_t*>(from);
  out.insert(out.end(), bytes, bytes + count * sizeof(T));
}

}  // namespace

RecordEncoder::RecordEncoder()
    : cache_(new Cached[1u << kCacheBits]{}),
      dictionary_(new uint64_t[kMostWords + 1]),
      next_(new uint32_t[kMostWords + 1]),
      columns_(new uint8_t[kColumnBytes]) {
  reset();
}

void RecordEncoder::reset() {
  chunk_++;
  control_ = columns_.get();
  numbers_ = columns_.get() + kNumbersAt;
  times_ = columns_.get() + kTimesAt;
  durations_ = columns_.get() + kDurationsAt;
  frames_ = columns_.get() + kFramesAt;
  group_ = {};
  records_ = known_ = previous_ = 0;
  last_ = words_ = 0;
  dictionary_[0] = 0;  // no record's word: the first one is never foreseen
  next_[0] = 0;
}

uint32_t RecordEncoder::number(uint64_t word) {
  Cached& slot = cache_[(word * 0x9e3779b97f4a7c15) >> (64 - kCacheBits)];
  if (slot.word == word && slot.chunk == chunk_) [[likely]]
    return slot.index;
  uint32_t index = known_++;
  slot = {word, index, chunk_};
  dictionary_[index] = word;
  next_[index] = 0;
  return index;
}

void RecordEncoder::add(uint64_t head, uint64_t time, uint64_t duration) {
  uint32_t next = next_[previous_];
  if (dictionary_[next] != head) {
    next = next_[previous_] = number(head);
    group_.foreseen = false;
  }
  previous_ = next;
  uint32_t i = group_.size++;
  group_.number_bits |= group_.numbers[i] = next;
  group_.time_bits |= group_.times[i] = time - last_;
  group_.duration_bits |= group_.durations[i] = duration;
  last_ = time;
}

void RecordEncoder::close_group() {
  Group& g = group_;
  unsigned time = width_code(g.time_bits), duration = width_code(g.duration_bits), number = width_code(g.number_bits);
  put_column(times_, g.times, g.size, time);
  put_column(durations_, g.durations, g.size, duration);
  if (!g.foreseen) put_column(numbers_, g.numbers, g.size, number);
  *control_++ = static_cast<uint8_t>(time | duration << 2 | (g.foreseen ? 0 : number + 1) << 4);
  records_ += g.size;
  g.size = g.number_bits = 0;
  g.time_bits = g.duration_bits = 0;
  g.foreseen = true;
}

// Calls that fill groups from their first record on, with everything in registers. Words taken; stops in front of whatever
// is not of this kind.
size_t RecordEncoder::take_calls(const uint64_t* words, size_t count) {
  constexpr size_t kGroupWords = kGroup * kCallWords;
  size_t taken = 0;
  Group& g = group_;
  while (g.size == 0 && count - taken >= kGroupWords && records_ < kMostRecords && words_ + kGroupWords <= kMostWords) {
    uint64_t time_bits = 0, duration_bits = 0, last = last_;
    uint32_t number_bits = 0, previous = previous_, i = 0;
    for (const uint64_t* record = words + taken; i < kGroup; i++, record += kCallWords) {
      uint64_t head = look(record[0]), entry = look(record[1]), exit = look(record[2]);
      if (record_type(head) != RecordType::call) [[unlikely]]
        break;
      uint32_t next = next_[previous];
      if (dictionary_[next] != head) [[unlikely]] {
        next = next_[previous] = number(head);
        g.foreseen = false;
      }
      previous = next;
      number_bits |= g.numbers[i] = next;
      time_bits |= g.times[i] = exit - last;
      duration_bits |= g.durations[i] = exit - entry;
      last = exit;
    }
    last_ = last;
    previous_ = previous;
    g.size = i;
    g.time_bits = time_bits;
    g.duration_bits = duration_bits;
    g.number_bits = number_bits;
    taken += i * kCallWords;
    words_ += i * kCallWords;
    if (i < kGroup) break;
    close_group();
  }
  return taken;
}

RecordEncoder::Taken RecordEncoder::take(const uint64_t* words, size_t count, size_t most) {
  Taken taken;
  auto stop = [&](Stop why) { return taken.stop = why, taken; };
  while (taken.words < count && taken.words < most) {
    size_t of_calls = take_calls(words + taken.words, std::min(count, most) - taken.words);
    taken.words += of_calls;
    taken.calls += of_calls / kCallWords;
    if (taken.words == count) break;
    const uint64_t* record = words + taken.words;
    uint64_t head = look(record[0]);
    RecordType type = record_type(head);
    uint32_t n = record_words(head);
    if (n == 0) return stop(Stop::no_record);
    if (n > count - taken.words) return stop(Stop::no_end);
    if (type == RecordType::hole) {
      taken.words += n;
      continue;
    }
    if (records() == kMostRecords || words_ + n > kMostWords) return stop(Stop::full);
    uint64_t first = look(record[1]), time = is_interval(type) ? look(record[2]) : first;
    add(head, time, time - first);
    taken.calls += type == RecordType::call;
    taken.entries += type == RecordType::entry;
    taken.stacks += type == RecordType::stack;
    if (type == RecordType::stack) {
      for (uint32_t f = kStackHeaderWords; f < n; f++) {
        uint32_t fresh = known_, frame = number(look(record[f]));
        put_uleb(frames_, frame == fresh ? 0 : frame + 1);
      }
    }
    words_ += n;
    taken.words += n;
    if (group_.size == kGroup) close_group();
  }
  return taken;
}

void RecordEncoder::finish(std::vector<uint8_t>& out) {
  if (group_.size) close_group();
  const uint8_t* begin = columns_.get();
  auto length = [&](const uint8_t* end, size_t at) { return static_cast<uint32_t>(end - begin - at); };
  uint32_t header[] = {records_,
                       known_,
                       length(numbers_, kNumbersAt),
                       length(times_, kTimesAt),
                       length(durations_, kDurationsAt),
                       length(frames_, kFramesAt),
                       static_cast<uint32_t>(words_)};
  static_assert(sizeof header == kHeaderBytes);
  append(out, header, std::size(header));
  append(out, dictionary_.get(), known_);
  append(out, begin, static_cast<size_t>(control_ - begin));
  append(out, begin + kNumbersAt, header[2]);
  append(out, begin + kTimesAt, header[3]);
  append(out, begin + kDurationsAt, header[4]);
  append(out, begin + kFramesAt, header[5]);
  reset();
}

namespace {

class RecordDecoder {
 public:
  explicit RecordDecoder(std::span<const uint8_t> bytes) : in_(bytes) {}

  std::optional<std::vector<uint64_t>> run() {
    uint32_t sizes[7];
    for (uint32_t& size : sizes) size = in_.read<uint32_t>();
    auto dictionary = in_.take(size_t{sizes[1]} * 8);
    auto control = in_.take((size_t{sizes[0]} + kGroup - 1) / kGroup);
    numbers_ = Cursor(in_.take(sizes[2]));
    times_ = Cursor(in_.take(sizes[3]));
    durations_ = Cursor(in_.take(sizes[4]));
    frames_ = Cursor(in_.take(sizes[5]));
    if (!in_.ok() || in_.left() != 0) return std::nullopt;
    dictionary_.resize(sizes[1]);
    next_.resize(sizes[1] + 1);
    if (sizes[1]) std::memcpy(dictionary_.data(), dictionary.data(), dictionary.size());
    words_.reserve(std::min<size_t>(sizes[6], size_t{sizes[0]} * 3 + sizes[5]));
    for (size_t at = 0; at < sizes[0]; at++)
      if (!record(control[at / kGroup])) return std::nullopt;
    if (new_ != dictionary_.size() || numbers_.left() || times_.left() || durations_.left() || frames_.left())
      return std::nullopt;
    return std::move(words_);
  }

 private:
  // The word of a number that is known or the next new one.
  bool word(uint64_t number, uint64_t& to) {
    if (number == new_) new_++;
    if (number >= new_ || number >= dictionary_.size()) return false;
    to = dictionary_[number];
    return true;
  }

  bool record(uint8_t control) {
    if (control >> 6) return false;
    unsigned code = control >> 4;
    uint64_t number = code == 0 ? next_[previous_] : get(numbers_, code - 1), head;
    if (code == 0 && number >= new_) return false;
    if (!word(number, head)) return false;
    next_[previous_] = static_cast<uint32_t>(number);
    previous_ = number;
    last_ += get(times_, control & 3);
    uint64_t duration = get(durations_, control >> 2 & 3);
    RecordType type = record_type(head);
    if (!is_interval(type) && duration) return false;
    switch (type) {
      case RecordType::call:
      case RecordType::inherited: words_.insert(words_.end(), {head, last_ - duration, last_}); break;
      case RecordType::entry: words_.insert(words_.end(), {head, last_}); break;
      case RecordType::stack: {
        if (record_words(head) == 0) return false;
        words_.insert(words_.end(), {head, last_});
        for (uint32_t i = record_high(head); i > 0; i--) {
          uint64_t n = frames_.uleb(), frame;
          if (!frames_.ok() || n > new_ || !word(n == 0 ? new_ : n - 1, frame)) return false;
          words_.push_back(frame);
        }
        break;
      }
      default: return false;
    }
    return numbers_.ok() && times_.ok() && durations_.ok();
  }

  Cursor in_;
  Cursor numbers_{{}}, times_{{}}, durations_{{}}, frames_{{}};
  std::vector<uint64_t> dictionary_, words_;
  std::vector<uint32_t> next_;
  uint64_t new_ = 0, last_ = 0, previous_ = 0;
};

}  // namespace

std::optional<std::vector<uint64_t>> decode_records(std::span<const uint8_t> bytes) {
  return RecordDecoder(bytes).run();
}

}  // namespace sonde::host
