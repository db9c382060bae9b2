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

// Taken in portions, as a ring gives them.
std::vector<uint8_t> encoded(RecordEncoder& encoder, const Words& words, size_t portion = 4096) {
  std::vector<uint8_t> bytes;
  for (size_t at = 0; at < words.size();) {
    RecordEncoder::Taken taken = encoder.take(words.data() + at, words.size() - at, portion);
    REQUIRE(taken.stop == RecordEncoder::Stop::taken);
    REQUIRE(taken.words > 0);
    at += taken.words;
  }
  encoder.finish(bytes);
  return bytes;
}

std::vector<uint8_t> encoded(const Words& words, size_t portion = 4096) {
  RecordEncoder encoder;
  return encoded(encoder, words, portion);
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
    auto back = decode_records(encoded(words, 1 + seed * seed));
    REQUIRE(back.has_value());
    REQUIRE(*back == words);
  }
  CHECK(decode_records(encoded({})) == Words{});
}

TEST_CASE("one encoder serves chunk after chunk") {
  RecordEncoder encoder;
  for (unsigned seed = 1; seed <= 5; seed++) {
    Words words = mixed(seed, 3000);
    REQUIRE(decode_records(encoded(encoder, words)) == words);
  }
}

TEST_CASE("holes are left out") {
  Words words = call(1, 2, 3, 4), expected = words;
  add(words, {record_word(RecordType::hole, 0, 0, 3), 99, 98});
  add(words, call(1, 2, 5, 6));
  add(expected, call(1, 2, 5, 6));
  CHECK(decode_records(encoded(words)) == expected);
}

TEST_CASE("calls of the common kind take at most 3 bytes, in any order at most 5") {
  Words words;
  for (uint64_t i = 0; i < 10000; i++) add(words, call(i % 50, 1000 + i % 50, 1000 * i, 1000 * i + 100));
  CHECK(encoded(words).size() <= 28 + 4 + 50 * 8 + 10000 * 3 + 10000 / 16 + 150);
  std::mt19937 random(1);
  for (uint64_t i = 0; i < 10000; i++) words[3 * i] = record_word(RecordType::call, 0, random() % 50, 1000);
  CHECK(encoded(words).size() <= 28 + 4 + 50 * 8 + 10000 * 5);
  CHECK(decode_records(encoded(words)) == words);
}

TEST_CASE("an encoder takes what fits into a chunk and goes on in the next") {
  auto stops = [](const Words& words) {
    RecordEncoder encoder;
    Words back;
    int full = 0;
    for (size_t at = 0; at < words.size();) {
      RecordEncoder::Taken taken = encoder.take(words.data() + at, words.size() - at, 10000);
      at += taken.words;
      REQUIRE((taken.words > 0 || taken.stop == RecordEncoder::Stop::full));
      if (taken.stop != RecordEncoder::Stop::full && at != words.size()) continue;
      full++;
      std::vector<uint8_t> bytes;
      encoder.finish(bytes);
      CHECK(encoder.records() == 0);
      auto part = decode_records(bytes);
      REQUIRE(part.has_value());
      back.insert(back.end(), part->begin(), part->end());
    }
    CHECK(back == words);
    return full;
  };
  Words many;
  for (uint64_t i = 0; i < RecordEncoder::kMostRecords + 1; i++) add(many, call(1, 2, i, i + 1));
  CHECK(stops(many) == 2);
  Words deep;
  for (uint64_t i = 0; i < 200; i++) {
    add(deep, {record_word(RecordType::stack, 0, 1, kMaxStackFrames), i});
    for (uint64_t f = 0; f < kMaxStackFrames; f++) deep.push_back(i * f * 0x9e3779b97f4a7c15);
  }
  CHECK(stops(deep) == 2);
}

TEST_CASE("an encoder stops in front of what is no record") {
  for (size_t before : {0, 1, 15, 16, 17, 40}) {
    Words words;
    for (uint64_t i = 0; i < before; i++) add(words, call(1, 2, i, i + 1));
    for (auto [bad, why] : {std::pair{uint64_t{0}, RecordEncoder::Stop::no_record},
                            {~uint64_t{0}, RecordEncoder::Stop::no_record},
                            {record_word(RecordType::hole, 0, 0, 0), RecordEncoder::Stop::no_record},
                            {record_word(RecordType::stack, 0, 0, 1001), RecordEncoder::Stop::no_record},
                            {record_word(RecordType::hole, 0, 0, 0xffffffff), RecordEncoder::Stop::no_end},
                            {record_word(RecordType::stack, 0, 0, 1000), RecordEncoder::Stop::no_end}}) {
      Words all = words;
      all.push_back(bad);
      all.insert(all.end(), 60, 7);
      RecordEncoder encoder;
      RecordEncoder::Taken taken = encoder.take(all.data(), all.size(), all.size());
      CHECK(taken.stop == why);
      CHECK(taken.words == words.size());
      CHECK(taken.calls == before);
      std::vector<uint8_t> bytes;
      encoder.finish(bytes);
      CHECK(decode_records(bytes) == words);
    }
  }
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
