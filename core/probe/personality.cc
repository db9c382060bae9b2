// The personality of return trampolines: Itanium C++ ABI, Exception Handling, level I; register numbers as
// __builtin_eh_return_data_regno on x86-64 (0 = rax, 1 = rdx).
#include "core/probe/personality.h"

#include "core/probe/dynamic_symbols.h"
#include "core/probe/hit.h"

namespace sonde {
namespace {

constexpr int kSearchPhase = 1;      // _UA_SEARCH_PHASE
constexpr int kContinueUnwind = 8;   // _URC_CONTINUE_UNWIND
constexpr int kInstallContext = 7;   // _URC_INSTALL_CONTEXT

using GetIp = uint64_t (*)(void* context);
using SetIp = void (*)(void* context, uint64_t value);
using SetGr = void (*)(void* context, int reg, uint64_t value);

// Looked up here; published by `ready`, never changed afterwards.
struct CachedUnwinder {
  UnwinderFunctions functions;
  uint32_t ready;
};
CachedUnwinder cache[16];
uint32_t cache_used;

const UnwinderFunctions* find_cached(uint64_t address) {
  for (CachedUnwinder& entry : cache)
    if (__atomic_load_n(&entry.ready, __ATOMIC_ACQUIRE) && address >= entry.functions.begin &&
        address < entry.functions.end)
      return &entry.functions;
  return nullptr;
}

const UnwinderFunctions* look_up(uint64_t address) {
  DynamicSymbols image;
  if (!find_image(sonde_agent_control.loader_debug, address, &image)) return nullptr;
  UnwinderFunctions found{image.begin,
                          image.end,
                          find_symbol(image, "_Unwind_GetIP"),
                          find_symbol(image, "_Unwind_SetIP"),
                          find_symbol(image, "_Unwind_SetGR"),
                          find_symbol(image, "_Unwind_Resume")};
  if (!found.get_ip || !found.set_ip || !found.set_gr || !found.resume) return nullptr;
  uint32_t index = __atomic_fetch_add(&cache_used, 1, __ATOMIC_RELAXED);
  if (index >= sizeof cache / sizeof cache[0]) return nullptr;
  cache[index].functions = found;
  __atomic_store_n(&cache[index].ready, 1, __ATOMIC_RELEASE);
  return &cache[index].functions;
}

}  // namespace

const UnwinderFunctions* find_unwinder(uint64_t address) {
  const AgentControl& control = sonde_agent_control;
  uint32_t count = __atomic_load_n(&control.unwinder_count, __ATOMIC_ACQUIRE);
  for (uint32_t i = 0; i < count && i < kMaxUnwinders; i++)
    if (address >= control.unwinders[i].begin && address < control.unwinders[i].end && control.unwinders[i].resume)
      return &control.unwinders[i];
  const UnwinderFunctions* cached = find_cached(address);
  return cached ? cached : look_up(address);
}

// Phase 1 (search) passes through. In phase 2 each hooked frame is a cleanup with its own landing pad; not only for the exit
// event: its size is zero, so libgcc and LLVM would take it for the handler's frame and abort.
// Only a frame that a function returns to is one; a frame interrupted within the return path has nothing left to do.
extern "C" __attribute__((visibility("hidden"))) int sonde_personality(int version, int actions,
                                                                       uint64_t exception_class, void* exception,
                                                                       void* context) {
  if (actions & kSearchPhase) return kContinueUnwind;
  const UnwinderFunctions* unwinder = find_unwinder(reinterpret_cast<uint64_t>(__builtin_return_address(0)));
  if (!unwinder) return kContinueUnwind;
  uint64_t pc = reinterpret_cast<GetIp>(unwinder->get_ip)(context);
  if (!is_trampoline(pc)) return kContinueUnwind;
  uint32_t index = trampoline_index(pc);
  sonde_notes[index].resume = unwinder->resume;
  auto set_gr = reinterpret_cast<SetGr>(unwinder->set_gr);
  set_gr(context, 0, reinterpret_cast<uint64_t>(exception));
  set_gr(context, 1, reinterpret_cast<uint64_t>(&sonde_entries[index]));
  reinterpret_cast<SetIp>(unwinder->set_ip)(context, reinterpret_cast<uint64_t>(&sonde_landing_pad));
  return kInstallContext;
}

}  // namespace sonde
