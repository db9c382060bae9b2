// A read position in untrusted bytes. Every read is checked; the first failure sticks and later reads give zero, so a
// parser may read a whole structure and ask ok() once. Signal-safe, header only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace sonde {

class Cursor {
 public:
  constexpr explicit Cursor(std::span<const uint8_t> bytes, size_t at = 0) : bytes_(bytes), at_(at) {
    if (at > bytes.size()) ok_ = false;
  }

  constexpr bool ok() const { return ok_; }
  constexpr size_t at() const { return at_; }
  constexpr size_t left() const { return ok_ ? bytes_.size() - at_ : 0; }
  constexpr void fail() { ok_ = false; }

  // Little-endian integer of sizeof(T) bytes.
  template <class T>
  constexpr T read() {
    if (left() < sizeof(T)) return ok_ = false, T{};
    size_t at = at_;
    at_ += sizeof(T);
    if !consteval {  // every machine that sonde runs on is little-endian
      T value;
      __builtin_memcpy(&value, bytes_.data() + at, sizeof value);
      return value;
    }
    uint64_t value = 0;
    for (size_t i = 0; i < sizeof(T); i++) value |= static_cast<uint64_t>(bytes_[at + i]) << (8 * i);
    return static_cast<T>(value);
  }

  constexpr uint64_t uleb() {
    if (left() && bytes_[at_] < 0x80) return bytes_[at_++];
    uint64_t value = 0;
    for (unsigned shift = 0;; shift += 7) {
      uint8_t byte = read<uint8_t>();
      if (!ok_) return 0;
      if (shift < 64) value |= static_cast<uint64_t>(byte & 0x7f) << shift;
      if (!(byte & 0x80)) return value;
      if (shift > 70) return ok_ = false, 0;
    }
  }

  constexpr int64_t sleb() {
    uint64_t value = 0;
    for (unsigned shift = 0;; shift += 7) {
      uint8_t byte = read<uint8_t>();
      if (!ok_) return 0;
      if (shift < 64) value |= static_cast<uint64_t>(byte & 0x7f) << shift;
      if (!(byte & 0x80)) {
        if ((byte & 0x40) && shift + 7 < 64) value |= ~uint64_t{0} << (shift + 7);
        return static_cast<int64_t>(value);
      }
      if (shift > 70) return ok_ = false, 0;
    }
  }

  constexpr std::span<const uint8_t> take(size_t n) {
    if (left() < n) return ok_ = false, std::span<const uint8_t>{};
    auto piece = bytes_.subspan(at_, n);
    at_ += n;
    return piece;
  }
  constexpr void skip(size_t n) { take(n); }

 private:
  std::span<const uint8_t> bytes_;
  size_t at_;
  bool ok_ = true;
};

}  // namespace sonde
