#include "core/probe/detour_place.h"

#include "core/probe/control.h"
#include "core/walk/arena_view.h"

namespace sonde {
namespace {

bool names_an_instruction(const SignalInfo& info) {
  switch (info.number) {
    case kSigill:
    case kSigtrap:
    case kSigbus:
    case kSigfpe:
    case kSigsegv:
    case kSigsys: return info.code > 0;  // from the kernel, not from kill() and its kin
    default: return false;
  }
}

const DetourStepEntry* steps_of(const TableArena* arena, const DetourEntry& detour) {
  return reinterpret_cast<const DetourStepEntry*>(reinterpret_cast<const char*>(arena) + arena->steps_offset) +
         detour.first_step;
}

}  // namespace

DetourPlace find_detour_place(uint64_t pc) {
  const TableArena* arena = __atomic_load_n(&sonde_agent_control.tables, __ATOMIC_ACQUIRE);
  if (!arena) return {};
  ArenaView view(arena);
  const DetourEntry* detour = view.detour(Addr(pc));
  if (!detour) return {};
  const DetourStepEntry* step = view.detour_step(*detour, pc - detour->begin);
  if (!step) return {pc, detour->patch, 0};
  uint64_t original = step->original > 0 ? static_cast<uint64_t>(step->original) : 0;
  return {pc, detour->patch + original, step->sp_adjust};
}

void show_original(const DetourPlace& place, SignalContext* context, SignalInfo* info) {
  if (info && info->address == place.pc && names_an_instruction(*info)) info->address = place.shown;
  context->rip = place.shown;
  context->rsp += static_cast<uint64_t>(place.sp_adjust);
}

void back_to_detour(const DetourPlace& place, SignalContext* context) {
  if (context->rip == place.shown) {
    context->rip = place.pc;
    context->rsp -= static_cast<uint64_t>(place.sp_adjust);
    return;
  }
  // Another of the displaced instructions: the bytes of the patch stand in its place. Elsewhere is elsewhere.
  const TableArena* arena = __atomic_load_n(&sonde_agent_control.tables, __ATOMIC_ACQUIRE);
  const DetourEntry* detour = ArenaView(arena).detour(Addr(place.pc));
  if (!detour) return;
  const DetourStepEntry* steps = steps_of(arena, *detour);
  for (uint32_t i = 0; i < detour->step_count; i++) {
    if (steps[i].original < 0 || detour->patch + static_cast<uint64_t>(steps[i].original) != context->rip) continue;
    context->rip = detour->begin + steps[i].offset;
    context->rsp -= static_cast<uint64_t>(int64_t{steps[i].sp_adjust});
    return;
  }
}

}  // namespace sonde
