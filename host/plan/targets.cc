// See targets.h.
#include "host/plan/targets.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "host/plan/insn.h"

namespace sonde::host {
namespace {

int32_t read32(const uint8_t* p) {
  int32_t v;
  std::memcpy(&v, p, 4);
  return v;
}

// Opcode bytes that can begin a 32-bit relative form: e8 call, e9 jmp, 0f 8x jcc, c7 f8 xbegin, 8d lea.
constexpr std::array<bool, 256> kLongForm = [] {
  std::array<bool, 256> a{};
  for (int byte : {0xe8, 0xe9, 0x0f, 0xc7, 0x8d}) a[static_cast<size_t>(byte)] = true;
  return a;
}();

constexpr uint64_t kLandingPad = 4;  // bytes of endbr64

constexpr bool short_form(uint8_t byte) { return byte == 0xeb || (byte & 0xf0) == 0x70 || (byte & 0xfc) == 0xe0; }

}  // namespace

Targets::Targets(const CodeView& view)
    : view_(view), begin_(view.text_begin), size_(view.text_end - view.text_begin), bits_(size_ / 64 + 1),
      state_(view.functions.size()), gap_state_(view.functions.size() + 1) {
  for (const CodeRange& f : view.functions) mark(f.begin);
  for (uint64_t label : view.labels) mark(label);
  for (const Piece& p : view.pieces) {
    if (p.executable) scan_code(p);
    scan_words(p);
  }
  std::sort(tables_.begin(), tables_.end());
  tables_.erase(std::unique(tables_.begin(), tables_.end()), tables_.end());
  for (uint64_t table : tables_) scan_table(table);
}

bool Targets::any(uint64_t from, uint64_t to) const {
  for (uint64_t a = from; a < to; a++)
    if (marked(a)) return true;
  return false;
}

bool Targets::plausible(uint64_t function) const {
  size_t i = view_.function_from(function);
  return i < state_.size() && view_.functions[i].begin == function &&
         (state_[i] == decoded || state_[i] == decoded_and_ends);
}

bool Targets::loops_to(uint64_t function, uint64_t to) const {
  return to - function <= kLandingPad && heads_.contains(to);
}

bool Targets::ends(uint64_t function) const {
  size_t i = view_.function_from(function);
  return i < state_.size() && view_.functions[i].begin == function && state_[i] == decoded_and_ends;
}

void Targets::scan_code(const Piece& piece) {
  const uint8_t* p = piece.bytes.data();
  size_t n = piece.bytes.size();
  for (size_t i = 0; i + 6 <= n; i++) {
    if (!kLongForm[p[i]]) continue;
    uint64_t at = piece.begin + i;
    if (p[i] == 0xe8 || p[i] == 0xe9) {
      mark(at + 5 + static_cast<uint64_t>(int64_t{read32(p + i + 1)}));
    } else if ((p[i] == 0x0f && (p[i + 1] & 0xf0) == 0x80) || (p[i] == 0xc7 && p[i + 1] == 0xf8)) {
      mark(at + 6 + static_cast<uint64_t>(int64_t{read32(p + i + 2)}));
    } else if (p[i] == 0x8d && (p[i + 1] & 0xc7) == 5) {
      uint64_t target = at + 6 + static_cast<uint64_t>(int64_t{read32(p + i + 2)});
      mark(target);
      if (!view_.at(target).empty()) tables_.push_back(target);
    }
  }
  if (!view_.position_dependent) return;
  for (size_t i = 0; i + 4 <= n; i++) mark(static_cast<uint32_t>(read32(p + i)));
}

void Targets::scan_words(const Piece& piece) {
  uint64_t skew = -piece.begin & 7;
  for (uint64_t i = skew; i + 8 <= piece.bytes.size(); i += 8) {
    uint64_t word;
    std::memcpy(&word, piece.bytes.data() + i, 8);
    mark(word + view_.bias);
  }
}

// A table ends where an entry leads out of the code or where the next table begins; what follows belongs to another.
void Targets::scan_table(uint64_t table) {
  auto next = std::upper_bound(tables_.begin(), tables_.end(), table);
  auto bytes = view_.at(table);
  uint64_t limit = bytes.size();
  if (next != tables_.end()) limit = std::min<uint64_t>(limit, *next - table);
  for (uint64_t i = 0; i + 4 <= limit; i += 4) {
    uint64_t target = table + static_cast<uint64_t>(int64_t{read32(bytes.data() + i)});
    if (target - begin_ >= size_) break;
    mark(target);
  }
}

// Linear, from the function's start. Doubtful where bytes do not decode or a branch within the function leads to no
// boundary (a branch behind a lock prefix, one byte in, is an old idiom and in order): then searched byte by byte too.
void Targets::add_function(size_t index) {
  if (state_[index] != not_seen) return;
  state_[index] = decoded;
  auto [begin, end] = view_.functions[index];
  std::vector<bool> boundary(end - begin);
  std::vector<uint64_t> inner;
  uint64_t pc = begin;
  bool ended = false;
  while (pc < end) {
    auto code = view_.code_at(pc);
    auto insn = decode(code.first(std::min<uint64_t>(code.size(), 15)), pc);
    if (!insn) {
      state_[index] = doubtful;
      break;
    }
    boundary[pc - begin] = true;
    // Filler that a symbol's size includes does not count.
    if (!is_padding(*insn)) ended = ends_flow(insn->flow);
    if (insn->bytes[0] == 0xf0 && pc + 1 < end) boundary[pc + 1 - begin] = true;
    if (is_direct(insn->flow)) {
      mark(insn->target);
      if (insn->flow != Flow::call && insn->target - begin <= kLandingPad) heads_.insert(insn->target);
      if (insn->target - begin < end - begin) inner.push_back(insn->target);
    }
    pc = insn->next();
  }
  for (uint64_t target : inner)
    if (!boundary[target - begin]) state_[index] = doubtful;
  if (state_[index] == doubtful) search_short(begin, end);
  else if (ended) state_[index] = decoded_and_ends;
}

void Targets::search_short(uint64_t from, uint64_t to) {
  auto code = view_.code_at(from);
  uint64_t n = std::min<uint64_t>(to - from, code.size());
  for (uint64_t i = 0; i + 2 <= n; i++)
    if (short_form(code[i])) mark(from + i + 2 + static_cast<uint64_t>(int64_t{static_cast<int8_t>(code[i + 1])}));
}

void Targets::add_near(uint64_t from, uint64_t to) {
  constexpr uint64_t kReach = 160;  // 127 bytes and the longest instruction
  from = std::max(from - std::min(from, kReach), begin_), to = std::min(to + kReach, begin_ + size_);
  uint64_t at = from;
  for (size_t i = view_.function_from(from);; i++) {
    // The gap in front of function i: code without a symbol, or padding.
    uint64_t gap_end = i < view_.functions.size() ? view_.functions[i].begin : begin_ + size_;
    uint64_t gap_begin = i > 0 ? view_.functions[i - 1].end : begin_;
    if (at < gap_end && gap_state_[i] == not_seen) {
      // Long gaps (a stripped, table-less image) are searched near the sites only.
      bool whole = gap_end - gap_begin <= 4096;
      search_short(whole ? gap_begin : std::max(gap_begin, at), whole ? gap_end : std::min(gap_end, to));
      if (whole) gap_state_[i] = decoded;
    }
    if (i >= view_.functions.size() || view_.functions[i].begin >= to) break;
    add_function(i);
    at = view_.functions[i].end;
  }
}

}  // namespace sonde::host
