#include "host/trace/encode.h"

#include <doctest/doctest.h>

#include <random>

namespace sonde::host {

namespace {

using Words = std::vector<uint64_t>;

Words call(uint32_t site, uint32_t slot, uint64_t entry, uint64_t exit) {
  return {record_word(RecordType::call, 0, site, slot), entry, exit};
}

void add(Words& to, const Words& record) { to.insert(to.end(), record.begin(), record.end()); }

std::vector<uint8_t> encoded(const Words& words) {
  RecordEncoder encoder;
  std::vector<uint8_t> bytes;
  encoder.encode(words, bytes);
  return bytes;
}

// Records of every kind with values of every length, times that go backwards included.
Words mixed(unsigned seed, int records) {
  std::mt19937_64 random(seed);
  Words words;
  uint64_t now = random();
  for (int i = 0; i < records; i++) {
    uint64_t step = random() >> (random() % 64);
    now += random() % 8 ? step : 0 - step;
    uint32_t site = random() % 5000, slot = static_cast<uint32_t>(random() >> (32 + random() % 32));
    switch (random() % 4) {
      case 0:
      case 1: add(words, call(site, slot, now - (random() >> (random() % 64)), now)); break;
      case 2: add(words, {record_word(RecordType::entry, 0, site, slot), now}); break;
      case 3: {
        uint32_t frames = random() % 40 ? random() % 20 : kMaxStackFrames;
        words.push_back(record_word(RecordType::stack, random() % 2, site, frames));
        words.push_back(now);
        for (uint32_t f = 0; f < frames; f++) words.push_back(random() % 3 ? random() % 100 : random());
      }
    }
  }
  return words;
}

}  // namespace

TEST_CASE("records come back as they were") {
  for (unsigned seed = 1; seed <= 50; seed++) {
    Words words = mixed(seed, 2000);
    auto back = decode_records(encoded(words));
    REQUIRE(back.has_value());
    REQUIRE(*back == words);
  }
  CHECK(decode_records(encoded({})) == Words{});
}

TEST_CASE("one encoder serves chunk after chunk") {
  RecordEncoder encoder;
  for (unsigned seed = 1; seed <= 5; seed++) {
    Words words = mixed(seed, 3000);
    std::vector<uint8_t> bytes;
    encoder.encode(words, bytes);
    REQUIRE(decode_records(bytes) == words);
  }
}

TEST_CASE("holes are left out") {
  Words words = call(1, 2, 3, 4), expected = words;
  add(words, {record_word(RecordType::hole, 0, 0, 3), 99, 98});
  add(words, call(1, 2, 5, 6));
  add(expected, call(1, 2, 5, 6));
  CHECK(decode_records(encoded(words)) == expected);
}

TEST_CASE("a call of the common kind takes at most 5 bytes") {
  Words words;
  for (uint64_t i = 0; i < 10000; i++) add(words, call(i % 50, 1000 + i % 50, 1000 * i, 1000 * i + 100));
  CHECK(encoded(words).size() <= 28 + 50 * 8 + 10000 * 5);
}

TEST_CASE("damaged bytes are refused or decode to whole records") {
  auto bytes = encoded(mixed(3, 60));
  for (size_t cut = 0; cut < bytes.size(); cut++) CHECK_FALSE(decode_records(std::span(bytes).first(cut)).has_value());
  std::mt19937 random(1);
  int refused = 0;
  for (int i = 0; i < 100000; i++) {
    auto damaged = bytes;
    for (unsigned n = 1 + random() % 3; n > 0; n--) damaged[random() % damaged.size()] = static_cast<uint8_t>(random());
    auto words = decode_records(damaged);
    if (!words) {
      refused++;
      continue;
    }
    for (size_t at = 0; at < words->size();) {
      uint32_t count = record_words((*words)[at]);
      REQUIRE(count > 0);
      at += count;
      REQUIRE(at <= words->size());
    }
  }
  CHECK(refused > 1000);
}

}  // namespace sonde::host
