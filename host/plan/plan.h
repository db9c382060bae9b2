// Which bytes to write where, and why not. Pure: bytes in, plan out; nothing here touches a process. One call plans all
// chosen functions of one loaded image, because patches of neighbours constrain each other.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "host/image/maps.h"

namespace sonde::host {

// How a site is patched, cheapest first.
enum class Method : uint8_t { nops, jump, short_jump, punned_jump, trap, refused };

enum class Refusal : uint8_t {
  none,
  not_code,  // no instruction decodes at offset
  too_small,  // no method fits and traps are not allowed
  not_relocatable,  // an instruction that must move cannot
  jumped_into,  // a branch leads into the bytes and traps are not allowed
  no_room,  // no address for the detour
  engine,  // sonde itself, or code its hit path runs
  cold_part,
  data_in_text,
  system_call,  // begins with a system call that the engine itself watches
  unknown_pads,  // its exception table cannot be read: exceptions may come back anywhere in it
  small_stacks,  // runs where there is no room for what is wanted of a hit
  inside_instruction,  // no instruction begins at the point
  function_entry,  // the point is where a function that is probed begins
  landing_pad,  // the point behind it, which stands for both, is wanted too
  occupied,  // threads always stood in the bytes (found when arming a program that runs)
  differs,  // the code in memory is not what the file holds (found when arming)
};

// Why a function's return is not hooked though its entry is probed.
enum class NoHijack : uint8_t {
  none,
  reads_return_address,  // dlopen, dlsym and kin, or a load from the return slot
  returns_twice,  // setjmp family, getcontext, vfork
  returns_elsewhere,  // clone, longjmp, swapcontext, signal return, program and thread starts
  pops_arguments,  // ret imm16
  sanitizer_entry,
  no_unwinder,  // an image of the process throws with an unwinder that cannot be found
  sanitized,  // the sanitizers' unwinder follows frame pointers and believes what it finds in return slots
  runtime_scans_stacks,  // its runtime looks up the return addresses on its stacks (V8, HotSpot, Go)
  pops_return_address,  // pops or changes its return slot
  point,  // an instruction, not a function
};

struct DetourStep {  // for the walker: where an instruction of the detour stands for
  uint16_t offset;  // bytes from the detour's start
  int16_t original;  // bytes from the patch address; -1: not yet at the displaced instructions
  int16_t sp_adjust;  // sp here + sp_adjust = sp of the original program at `original`
};

struct SitePlan {
  uint32_t function;  // index into the image's functions()
  Addr entry;  // function entry in the target; of a point: its instruction
  Addr patch;  // first patched byte (behind a landing pad)
  Method method = Method::refused;
  Refusal refusal = Refusal::none;  // with Method::trap: why no jump fits
  uint32_t refusal_offset = 0;  // bytes from entry
  NoHijack no_hijack = NoHijack::none;
  // A jump within the function leads to `patch`: a hit whose return slot this site has hijacked already is a loop going
  // round, not a call.
  bool loop_head = false;
  std::vector<uint8_t> original, bytes;  // at `patch`, same length
  bool is_point() const { return no_hijack == NoHijack::point; }
  std::vector<uint8_t> relied;  // what stands from `patch` on, as far as the plan depends on it; begins as `original`
  // short_jump only: the long jump in padding nearby, written before `bytes` and restored after them. A pc there stands
  // for `patch`.
  Addr island;
  std::vector<uint8_t> island_original, island_bytes;
  Addr detour;  // its first instruction; the header lies in front
  std::vector<uint8_t> detour_bytes;  // header included, for address detour - kHeader
  Addr resume;  // of the displaced copies, inside the detour
  std::vector<DetourStep> steps;
};

// A system call instruction that the agent must see (system_calls.h): a site of its own inside a function, with the copy
// of the instruction first in its detour. `site.function` is kNoFunction where no function is known to hold it.
constexpr uint32_t kNoFunction = 0xffffffff;
struct SystemCallPlan {
  SitePlan site;
  std::optional<uint32_t> number;  // none: decided at run time
};

struct PlanRequest {
  const LoadedImage* image;
  std::vector<uint32_t> functions;  // indices into image->image->functions()
  std::vector<ImageAddr> points = {};  // instructions to be probed, ascending (host/plan/places.h)
  uint32_t first_site;  // number of the first site; the others follow in order of `functions`, then of `points`
  Addr entry_trampoline;  // sonde_entry in the target
  std::vector<AddrRange> used;  // occupied address ranges of the target, sorted; detours go elsewhere
  bool allow_traps = false;
  bool force_traps = false;  // of functions; system calls only where nothing else fits
  bool system_calls = false;  // plan these too
  NoHijack no_hijack = NoHijack::none;  // of all functions, for the sake of an image of the process: no_hijack_beside()
  std::vector<AddrRange> kept = {};  // code that earlier plans of this image patched or rely on: not to be changed
};

struct ImagePlan {
  std::vector<SitePlan> sites;  // one per requested function, then one per point, same order
  std::vector<SystemCallPlan> system_calls;  // by address; numbers of their sites follow those of `sites`
  size_t harmless_system_calls = 0;  // not planned: the agent need not see them
  std::vector<Addr> doubtful;  // may be system calls, in code that cannot be read
  std::vector<AddrRange> arenas;  // page-aligned, to be mapped executable before anything is written
  std::vector<std::pair<Addr, std::vector<uint8_t>>> writes;  // to arenas: detours and their pointers
  std::vector<AddrRange> kept;  // code that this plan patches or relies on
};

Result<ImagePlan> plan_image(const PlanRequest& request);

// The site is not to be patched with a trap after all.
void refuse_trap(SitePlan& site);

const char* describe(Method method);
const char* describe(Refusal refusal);
const char* describe(NoHijack reason);

}  // namespace sonde::host
