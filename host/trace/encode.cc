#include "host/trace/encode.h"

#include <bit>
#include <cstring>

#include "core/base/check.h"
#include "core/base/cursor.h"

namespace sonde::host {

namespace {

// A record's control byte holds three lengths: bits 0..1 of the time, 2..3 of the duration, 4..5 of the dictionary
// number. 1, 2, 4 or 8 bytes; a number has none where it is new.
constexpr unsigned kNewNumber = 3;
constexpr size_t kHeaderBytes = 7 * 4;

constexpr uint64_t zigzag(uint64_t difference) { return (difference << 1) ^ (0 - (difference >> 63)); }
constexpr uint64_t unzigzag(uint64_t value) { return (value >> 1) ^ (0 - (value & 1)); }

// Writes the low bytes of value; returns the code of their number. Needs eight bytes of room: no branch on the value.
inline unsigned put(uint8_t*& at, uint64_t value) {
  int bits = 64 - std::countl_zero(value | 1);
  unsigned code = unsigned{bits > 8} + unsigned{bits > 16} + unsigned{bits > 32};
  std::memcpy(at, &value, 8);
  at += size_t{1} << code;
  return code;
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

template <class T>
void append(std::vector<uint8_t>& out, const T* from, size_t count) {
  auto* bytes = reinterpret_cast<const uint8_t*>(from);
  out.insert(out.end(), bytes, bytes + count * sizeof(T));
}

}  // namespace

// Where the next byte of each column goes; the areas are large enough for the worst records.
struct RecordEncoder::Columns {
  uint8_t *control, *numbers, *times, *durations, *frames;
};

RecordEncoder::RecordEncoder() : cache_(new Cached[1u << kCacheBits]{}) {}

uint32_t RecordEncoder::number(uint64_t word) {
  Cached& slot = cache_[(word * 0x9e3779b97f4a7c15) >> (64 - kCacheBits)];
  if (slot.word == word && slot.chunk == chunk_) [[likely]]
    return slot.index;
  uint32_t index = static_cast<uint32_t>(dictionary_.size());
  slot = {word, index, chunk_};
  dictionary_.push_back(word);
  return index;
}

void RecordEncoder::encode(std::span<const uint64_t> words, std::vector<uint8_t>& out) {
  chunk_++;
  dictionary_.clear();
  size_t most = words.size() / 2 + 1, area = most * 8 + 8;  // records have two words at least
  columns_.resize(most + 3 * area + words.size() * 5);
  Columns begin{columns_.data(), columns_.data() + most, columns_.data() + most + area,
                columns_.data() + most + 2 * area, columns_.data() + most + 3 * area};
  Columns to = begin;
  uint64_t last = 0;
  for (size_t at = 0; at < words.size();) {
    uint64_t head = words[at];
    uint32_t count = record_words(head);
    SONDE_CHECK(count != 0 && at + count <= words.size());
    const uint64_t* record = &words[at];
    at += count;
    RecordType type = record_type(head);
    if (type == RecordType::hole) continue;
    uint64_t time = type == RecordType::call ? record[2] : record[1];
    unsigned control = put(to.times, zigzag(time - last));
    if (type == RecordType::call) control |= put(to.durations, time - record[1]) << 2;
    last = time;
    size_t known = dictionary_.size();
    uint32_t n = number(head);
    control |= (n == known ? kNewNumber : put(to.numbers, n)) << 4;
    *to.control++ = static_cast<uint8_t>(control);
    if (type != RecordType::stack) continue;
    for (const uint64_t* frame = record + kStackHeaderWords; frame != record + count; frame++) {
      known = dictionary_.size();
      n = number(*frame);
      put_uleb(to.frames, n == known ? 0 : n + 1);
    }
  }
  uint32_t header[] = {static_cast<uint32_t>(to.control - begin.control),
                       static_cast<uint32_t>(dictionary_.size()),
                       static_cast<uint32_t>(to.numbers - begin.numbers),
                       static_cast<uint32_t>(to.times - begin.times),
                       static_cast<uint32_t>(to.durations - begin.durations),
                       static_cast<uint32_t>(to.frames - begin.frames),
                       static_cast<uint32_t>(words.size())};
  static_assert(sizeof header == kHeaderBytes);
  append(out, header, std::size(header));
  append(out, dictionary_.data(), dictionary_.size());
  append(out, begin.control, header[0]);
  append(out, begin.numbers, header[2]);
  append(out, begin.times, header[3]);
  append(out, begin.durations, header[4]);
  append(out, begin.frames, header[5]);
}

namespace {

class RecordDecoder {
 public:
  explicit RecordDecoder(std::span<const uint8_t> bytes) : in_(bytes) {}

  std::optional<std::vector<uint64_t>> run() {
    uint32_t sizes[7];
    for (uint32_t& size : sizes) size = in_.read<uint32_t>();
    auto dictionary = in_.take(size_t{sizes[1]} * 8);
    auto control = in_.take(sizes[0]);
    numbers_ = Cursor(in_.take(sizes[2]));
    times_ = Cursor(in_.take(sizes[3]));
    durations_ = Cursor(in_.take(sizes[4]));
    frames_ = Cursor(in_.take(sizes[5]));
    if (!in_.ok() || in_.left() != 0) return std::nullopt;
    dictionary_.resize(sizes[1]);
    if (sizes[1]) std::memcpy(dictionary_.data(), dictionary.data(), dictionary.size());
    words_.reserve(std::min<size_t>(sizes[6], control.size() * 3 + sizes[5]));
    for (uint8_t c : control)
      if (!record(c)) return std::nullopt;
    if (new_ != dictionary_.size() || numbers_.left() || times_.left() || durations_.left() || frames_.left())
      return std::nullopt;
    return std::move(words_);
  }

 private:
  // The word of a number; no_number: the next new one.
  static constexpr uint64_t kNext = ~uint64_t{0};
  bool word(uint64_t number, uint64_t& to) {
    if (number == kNext) number = new_++;
    if (number >= new_ || number >= dictionary_.size()) return false;
    to = dictionary_[number];
    return true;
  }

  bool record(uint8_t control) {
    if (control >> 6) return false;
    unsigned code = control >> 4;
    uint64_t head;
    if (!word(code == kNewNumber ? kNext : get(numbers_, code), head)) return false;
    RecordType type = record_type(head);
    last_ += unzigzag(get(times_, control & 3));
    if (type != RecordType::call && (control & 12)) return false;
    switch (type) {
      case RecordType::call: {
        uint64_t duration = get(durations_, control >> 2 & 3);
        words_.insert(words_.end(), {head, last_ - duration, last_});
        break;
      }
      case RecordType::entry: words_.insert(words_.end(), {head, last_}); break;
      case RecordType::stack: {
        if (record_words(head) == 0) return false;
        words_.insert(words_.end(), {head, last_});
        for (uint32_t i = record_high(head); i > 0; i--) {
          uint64_t n = frames_.uleb(), frame;
          if (!frames_.ok() || !word(n == 0 ? kNext : n - 1, frame)) return false;
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
  uint64_t new_ = 0, last_ = 0;
};

}  // namespace

std::optional<std::vector<uint64_t>> decode_records(std::span<const uint8_t> bytes) {
  return RecordDecoder(bytes).run();
}

}  // namespace sonde::host
