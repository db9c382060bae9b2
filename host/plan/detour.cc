// See detour.h.
#include "host/plan/detour.h"

#include "core/base/check.h"
#include "core/isa/x86_64_detour.h"

namespace sonde::host {
namespace {

constexpr size_t kLargestGrowth = 18, kAbsoluteJump = 14;

}  // namespace

size_t detour_bound(const Displaced& displaced) {
  size_t bound = x86_64_detour::kHeader + x86_64_detour::kResumeOffset + kAbsoluteJump;
  if (displaced.copied)
    for (const Insn& insn : displaced.insns) bound += insn.length + kLargestGrowth;
  return bound;
}

Moved build_detour(uint64_t at, uint64_t pointer, uint32_t site, uint64_t patch, const Displaced& displaced,
                   Detour* out) {
  using namespace x86_64_detour;
  CodeBuffer code(at - kHeader);
  auto step = [&](int original, int sp_adjust) {
    out->steps.push_back({static_cast<uint16_t>(code.size() - kHeader), static_cast<int16_t>(original),
                          static_cast<int16_t>(sp_adjust)});
  };
  code.append64(at + kReturnOffset);
  code.append64(patch);
  step(-1, 0);
  code.append({0x48, 0x8d, 0x64, 0x24, 0x80});
  step(-1, 128);
  code.append({0x68});
  code.append32(site);
  step(-1, 136);
  code.append({0xff, 0x35});
  code.append32(static_cast<uint64_t>(-kHeader - kJumpOffset));
  step(-1, 144);
  int64_t disp = static_cast<int64_t>(pointer - (at + kReturnOffset));
  if (!fits32(disp)) return Moved::out_of_reach;
  code.append({0xff, 0x25});
  code.append32(static_cast<uint64_t>(disp));
  step(-1, 136);
  code.append({0x48, 0x8d, 0xa4, 0x24, 0x88, 0, 0, 0});
  SONDE_CHECK(code.size() == kHeader + kResumeOffset);

  if (displaced.copied) {
    for (const Insn& insn : displaced.insns) {
      int original = static_cast<int>(insn.pc - patch);
      size_t start = code.size() - kHeader;
      step(original, 0);
      std::vector<InnerStep> inner;
      if (Moved moved = move_insn(insn, code, &inner); moved != Moved::yes) return moved;
      for (InnerStep i : inner)
        out->steps.push_back({static_cast<uint16_t>(start + i.offset), static_cast<int16_t>(original), i.sp_adjust});
    }
  }
  // A moved call returns to the original code; behind other ends of flow nothing runs either.
  Flow last = displaced.insns.back().flow;
  bool goes_on = !ends_flow(last) && last != Flow::call && last != Flow::call_indirect;
  if (goes_on || !displaced.copied) {
    step(static_cast<int>(displaced.length), 0);
    code.jump(patch + displaced.length);
  }
  SONDE_CHECK(code.size() <= detour_bound(displaced));
  out->bytes = std::move(code.bytes());
  return Moved::yes;
}

}  // namespace sonde::host
