// What a ring and a trace chunk hold: records of 64-bit words. docs/formats.md has the same in prose; change both.
//
//   word 0   63      32 31          8 7    4 3    0
//           +----------+-------------+------+------+
//   call    | slot     | site        | exit | 1    |   then: entry ticks, exit ticks                  (3 words)
//   stack   | frames n | site        | ovrl | 2    |   then: entry ticks of its hit, n frame words    (2 + n words)
//   entry   | slot     | site        | 0    | 3    |   then: ticks; a hit whose return is not hooked  (2 words)
//   hole    | words    | 0           | 0    | 4    |   skip that many words, this one included
//   inherit | slot     | site        | 5    | 5    |   as a call, but of the process that this one was forked from; here only the
//           |          |             |      |      |   caller of others
//           +----------+-------------+------+------+
//
// slot: bits 3..34 of the address of the return slot (the frame key): orders calls of one stack by depth, and tells
// stacks apart. A call record is written when the call ends, so records stand in order of their ends.
#pragma once

#include <cstdint>

namespace sonde {

enum class RecordType : uint8_t { none = 0, call = 1, stack = 2, entry = 3, hole = 4, inherited = 5 };

enum class ExitKind : uint8_t {
  returned = 0,
  unwound = 1,  // left by an exception, pthread_exit or cancellation
  abandoned = 2,  // its frame is gone without either (longjmp); noticed late, exit ticks = when noticed
  unfinished = 3,  // still running when the recording ended
  thread_ended = 4,  // still on the stack when its thread ended
  inherited = 5,  // began before its process was forked and counts in the other one; its record has a type of its own
};

constexpr unsigned kCallWords = 3;
constexpr unsigned kStackHeaderWords = 2;
constexpr unsigned kEntryWords = 2;
constexpr unsigned kMaxStackFrames = 1000;  // per stack record; deeper stacks are cut and say so
constexpr uint32_t kMaxSites = 1u << 21;

constexpr uint64_t record_word(RecordType type, uint8_t kind, uint32_t site, uint32_t high) {
  return static_cast<uint64_t>(type) | (static_cast<uint64_t>(kind) << 4) | (static_cast<uint64_t>(site) << 8) |
         (static_cast<uint64_t>(high) << 32);
}
constexpr uint64_t call_word(ExitKind kind, uint32_t site, uint32_t slot) {
  RecordType type = kind == ExitKind::inherited ? RecordType::inherited : RecordType::call;
  return record_word(type, static_cast<uint8_t>(kind), site, slot);
}
constexpr RecordType record_type(uint64_t word) { return static_cast<RecordType>(word & 15); }
constexpr uint8_t record_kind(uint64_t word) { return (word >> 4) & 15; }
constexpr uint32_t record_site(uint64_t word) { return (word >> 8) & 0xffffff; }
constexpr uint32_t record_high(uint64_t word) { return static_cast<uint32_t>(word >> 32); }
constexpr uint32_t slot_key(uint64_t slot_address) { return static_cast<uint32_t>(slot_address >> 3); }

constexpr bool is_interval(RecordType type) { return type == RecordType::call || type == RecordType::inherited; }

// Words of the record that starts with `word`; 0 if the word starts no record.
constexpr uint32_t record_words(uint64_t word) {
  switch (record_type(word)) {
    case RecordType::call:
    case RecordType::inherited: return kCallWords;
    case RecordType::stack: return record_high(word) <= kMaxStackFrames ? kStackHeaderWords + record_high(word) : 0;
    case RecordType::entry: return kEntryWords;
    case RecordType::hole: return record_high(word);
    case RecordType::none: break;
  }
  return 0;
}

}  // namespace sonde
