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

constexpr uint64_t kMaxTableEntries = uint64_t{1} << 26;
constexpr uint64_t kLandingPad = 4;  // bytes of endbr64
constexpr uint8_t kEndbr64[kLandingPad] = {0xf3, 0x0f, 0x1e, 0xfa};
constexpr uint8_t kNop = 0x90;

constexpr bool short_form(uint8_t byte) { return byte == 0xeb || (byte & 0xf0) == 0x70 || (byte & 0xfc) == 0xe0; }

}  // namespace

Targets::Targets(const CodeView& view)
    : view_(view),
      begin_(view.text_begin),
      size_(view.text_end - view.text_begin),
      bits_(size_ / 64 + 1),
      state_(view.functions.size()),
      gap_state_(view.functions.size() + 1) {
  for (const CodeRange& f : view.functions) {
    mark(f.begin);
    auto code = view.code_at(f.begin);
    if (code.size() > 1 && code[0] == kNop && code[1] != kNop) mark(f.begin + 1);
  }
  for (uint64_t label : view.labels) mark(label);
  for (const CodeRange& r : view.unknown_pads)
    for (uint64_t a = r.begin; a < r.end; a++) mark(a);
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
  for (size_t i = 0; i + kLandingPad <= n; i++)
    if (std::memcmp(p + i, kEndbr64, kLandingPad) == 0) mark(piece.begin + i);
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
  if (view_.position_dependent) scan_absolute(piece);
}

// Immediates and absolute displacements of the forms that can make an address of code: at their distances from the
// opcode (SDM volume 2, appendix A; section 2.1.5 for the lengths of ModRM, SIB and displacement).
void Targets::scan_absolute(const Piece& piece) {
  const uint8_t* p = piece.bytes.data();
  size_t n = piece.bytes.size();
  auto mark_at = [&](size_t i) {
    if (i + 4 <= n) mark(static_cast<uint32_t>(read32(p + i)));
  };
  for (size_t i = 0; i < n; i++) {
    switch (p[i]) {
      case 0xb8:
      case 0xb9:
      case 0xba:
      case 0xbb:
      case 0xbc:
      case 0xbd:
      case 0xbe:
      case 0xbf:  // mov $, register
      case 0x05:
      case 0x0d:
      case 0x15:
      case 0x1d:
      case 0x25:
      case 0x2d:
      case 0x35:
      case 0x3d:  // add .. cmp $, %eax
      case 0x68: mark_at(i + 1); break;                                                        // push $
      case 0xc7:
      case 0x81:
      case 0x69:                                                         // mov, add .. cmp, imul
        for (size_t distance : {2, 3, 4, 6, 7}) mark_at(i + distance);
        break;
      case 0x8d: mark_at(i + 2), mark_at(i + 3); break;                                        // lea
      default: break;
    }
  }
}

void Targets::scan_words(const Piece& piece) {
  uint64_t skew = -piece.begin & 7;
  for (uint64_t i = skew; i + 8 <= piece.bytes.size(); i += 8) {
    uint64_t word;
    std::memcpy(&word, piece.bytes.data() + i, 8);
    mark(word + view_.bias);
  }
}

// How long a table is nobody says: it ends where an entry leads out of the code. The next table's start is no sign, a
// false one may lie in the middle.
void Targets::scan_table(uint64_t table) {
  auto bytes = view_.at(table);
  for (uint64_t i = 0; i + 4 <= bytes.size(); i += 4) {
    // Only a hostile file has so many: then tables end where others begin.
    if (table_entries_++ > kMaxTableEntries && i > 0 && std::ranges::binary_search(tables_, table + i)) break;
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
