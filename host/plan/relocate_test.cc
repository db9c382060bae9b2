#include "host/plan/relocate.h"

#include <doctest/doctest.h>
#include <fmt/format.h>

#include <fstream>
#include <sstream>
#include <string>

using namespace sonde::host;

namespace {

std::vector<std::string> fields_of(const std::string& line) {
  std::vector<std::string> fields;
  std::stringstream in(line);
  for (std::string field; std::getline(in, field, ';');) {
    size_t begin = field.find_first_not_of(' '), end = field.find_last_not_of(' ');
    fields.push_back(begin == std::string::npos ? "" : field.substr(begin, end - begin + 1));
  }
  return fields;
}

std::vector<uint8_t> bytes_of(const std::string& text) {
  std::vector<uint8_t> bytes;
  std::stringstream in(text);
  for (std::string byte; in >> byte;) bytes.push_back(static_cast<uint8_t>(std::stoul(byte, nullptr, 16)));
  return bytes;
}

std::string move(const std::vector<uint8_t>& bytes, uint64_t from, uint64_t to) {
  auto insn = decode(bytes, from);
  if (!insn || insn->length != bytes.size()) return "not one instruction";
  CodeBuffer out(to);
  Moved moved = move_insn(*insn, out, nullptr);
  if (moved != Moved::yes) return moved == Moved::cannot ? "cannot" : "out of reach";
  return fmt::format("{:02x}", fmt::join(out.bytes(), " "));
}

}  // namespace

TEST_CASE("moved instructions are the expected bytes") {
  std::ifstream in(SONDE_SOURCE_DIR "/host/plan/relocate_cases.txt");
  REQUIRE(in);
  int cases = 0;
  for (std::string line; std::getline(in, line);) {
    if (line.empty() || line[0] == '#') continue;
    auto f = fields_of(line);
    REQUIRE_MESSAGE(f.size() == 5, line);
    CAPTURE(f[0]);
    CHECK(move(bytes_of(f[1]), std::stoull(f[2], nullptr, 16), std::stoull(f[3], nullptr, 16)) == f[4]);
    cases++;
  }
  CHECK(cases > 40);
}
