// Records before compression: ticks become differences, so that most bytes are zero. The first word of a record, which
// gives its length, stays as it is.
#pragma once

#include <cstdint>
#include <span>

#include "core/event/record.h"

namespace sonde::host {

// Both directions in place. The words must be whole records. False if they are not.
inline bool encode_ticks(std::span<uint64_t> words, bool decode) {
  uint64_t last = 0;
  for (size_t at = 0; at < words.size();) {
    uint32_t n = record_words(words[at]);
    if (n == 0 || at + n > words.size()) return false;
    RecordType type = record_type(words[at]);
    if (type != RecordType::hole) {
      uint64_t entry = decode ? words[at + 1] + last : words[at + 1];
      if (type == RecordType::call) words[at + 2] = decode ? words[at + 2] + entry : words[at + 2] - entry;
      words[at + 1] = decode ? entry : entry - last;
      last = entry;
    }
    at += n;
  }
  return true;
}

}  // namespace sonde::host
