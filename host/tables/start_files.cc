#include "host/tables/start_files.h"

#include <string.h>

#include <algorithm>
#include <optional>
#include <string_view>

namespace sonde::host {
namespace {

// Bytes in hexadecimal, ?? is any; w loads a weak symbol's address into rax: by mov from the GOT, or relaxed by the linker
// to an immediate; | where the frame pointer lies on the stack from here on, or no more.
constexpr std::string_view kDeregister[] = {
    "488d3d???????? 488d05???????? 4839f8 7415 w 4885c0 7409 ffe0 0f1f8000000000 c3",
    "b8???????? 483d???????? 7413 b8???????? 4885c0 7409 bf???????? ffe0 6690 c3",
};
constexpr std::string_view kOthers[] = {
    // register_tm_clones
    "488d3d???????? 488d35???????? 4829fe 4889f0 48c1ee3f 48c1f803 4801c6 48d1fe 7414 w 4885c0 7408 ffe0 "
    "660f1f440000 c3",
    "be???????? 4881ee???????? 4889f0 48c1ee3f 48c1f803 4801c6 48d1fe 7411 b8???????? 4885c0 7407 bf???????? ffe0 c3",
    // __do_global_dtors_aux
    "f30f1efa 803d????????00 752b 55|48833d????????00 4889e5 740c 488b3d???????? e8???????? e8???????? c605????????01 "
    "5d|c3 "
    "0f1f00 c3",
    "f30f1efa 803d????????00 7533 55|48833d????????00 4889e5 740d 488b3d???????? ff15???????? e8???????? "
    "c605????????01 5d|c3 "
    "660f1f440000 c3",
    "f30f1efa 803d????????00 7513 55|4889e5 e8???????? c605????????01 5d|c3 90 c3",
    "f30f1efa 803d????????00 752b 55|4889e5 e8???????? b8???????? 4885c0 740a bf???????? e8???????? c605????????01 "
    "5d|c3 "
    "0f1f440000 c3",
    // frame_dummy
    "f30f1efa e9????ffff",
    "f30f1efa eb??",
    "f30f1efa b8???????? 4885c0 7422 55|be???????? bf???????? 4889e5 e8???????? 5d|e9????ffff 660f1f840000000000 "
    "e9????ffff",
};
constexpr size_t kAlignment = 16, kMaxFunctions = 4;

int digit(char c) { return c <= '9' ? c - '0' : c - 'a' + 10; }

// How far `shape` agrees with the beginning of `code`: the end of what it covers, its parts appended to `found`.
std::optional<size_t> match(std::string_view shape, std::span<const uint8_t> code, size_t base,
                            std::vector<BareCode>* found) {
  std::vector<BareCode> parts;
  size_t at = 0, begin = 0;
  bool pushed = false;
  auto end_part = [&] {
    parts.push_back({base + begin, base + at, pushed ? SpecialKind::bare_frame : SpecialKind::bare});
  };
  for (size_t i = 0; i < shape.size(); i++) {
    if (shape[i] == ' ') continue;
    if (shape[i] == '|') {
      end_part();
      pushed = !pushed, begin = at;
      continue;
    }
    if (shape[i] == 'w') {
      if (code.size() - at < 7 || code[at] != 0x48) return std::nullopt;
      bool loads = code[at + 1] == 0x8b && code[at + 2] == 0x05,
           immediate = code[at + 1] == 0xc7 && code[at + 2] == 0xc0;
      if (!loads && !immediate) return std::nullopt;
      at += 7;
      continue;
    }
    if (at == code.size()) return std::nullopt;
    if (shape[i] != '?' && code[at] != digit(shape[i]) * 16 + digit(shape[i + 1])) return std::nullopt;
    i++, at++;
  }
  end_part();
  found->insert(found->end(), parts.begin(), parts.end());
  return at;
}

// What lies at a distance from the start of kDeregister's shapes and is rare enough to look for.
struct Anchor {
  std::string_view bytes;
  size_t offset;
};
constexpr Anchor kAnchors[] = {{"\x48\x39\xf8\x74\x15\x48", 14}, {"\x48\x85\xc0\x74\x09\xbf", 18}};

}  // namespace

std::vector<BareCode> find_crtbegin(std::span<const uint8_t> code) {
  std::vector<BareCode> found;
  for (size_t kind = 0; kind < std::size(kAnchors); kind++) {
    const Anchor& anchor = kAnchors[kind];
    for (size_t from = 0; from < code.size();) {
      const void* hit = memmem(code.data() + from, code.size() - from, anchor.bytes.data(), anchor.bytes.size());
      if (!hit) break;
      size_t at = static_cast<size_t>(static_cast<const uint8_t*>(hit) - code.data());
      from = at + 1;
      if (at < anchor.offset) continue;
      at -= anchor.offset;
      auto size = match(kDeregister[kind], code.subspan(at), at, &found);
      for (size_t more = 1; size && more < kMaxFunctions; more++) {
        at += (*size + kAlignment - 1) & ~(kAlignment - 1);
        size.reset();
        for (std::string_view shape : kOthers)
          if (at < code.size() && !size) size = match(shape, code.subspan(at), at, &found);
      }
    }
  }
  return found;
}

// [endbr64] sub $8,%rsp; calls, of a weak symbol too; add $8,%rsp; ret
std::vector<BareCode> find_init(std::span<const uint8_t> section) {
  constexpr std::string_view kEnter = "4883ec08", kLeave = "4883c408c3", kLandingPad = "f30f1efa";
  constexpr std::string_view kBetween[] = {"e8????????", "ff15????????", "w 4885c0 7402 ffd0"};
  std::vector<BareCode> ignored;
  size_t at = match(kLandingPad, section, 0, &ignored).value_or(0);
  auto skip = [&](std::string_view shape) {
    auto size = match(shape, section.subspan(at), 0, &ignored);
    at += size.value_or(0);
    return size.has_value();
  };
  if (!skip(kEnter)) return {};
  const size_t entered = at;
  while (std::ranges::any_of(kBetween, skip)) continue;
  const size_t leaves = at + 4;  // the `ret` of kLeave
  if (!skip(kLeave)) return {};
  return {{0, entered, SpecialKind::bare}, {entered, leaves, SpecialKind::bare_word}, {leaves, at, SpecialKind::bare}};
}

}  // namespace sonde::host
