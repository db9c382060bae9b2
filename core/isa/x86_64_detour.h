// The bytes of an x86-64 detour: shared by host/plan, which writes them, by the trampolines in core/native, whose unwind
// information reads them, and by the walker.
//
//   detour - 16:  u64 return point
//   detour - 8:   u64 patch address (site pc); the entry trampoline's unwind information finds the probed function here
//   detour:       48 8d 64 24 80         lea -128(%rsp),%rsp     step over the red zone, flags untouched
//                 68 <site:32>           push $site
//                 ff 35 <disp:32>        push detour-16(%rip)    the return point
//                 ff 25 <disp:32>        jmp *pointer(%rip)      -> sonde_entry, pointer in the same arena
//   return point: 48 8d a4 24 88 00 00 00  lea 136(%rsp),%rsp
//   resume:       relocated copies of the displaced instructions
//                 jmp back (e9 rel32, or ff 25 00000000 <addr:64>)
//
// Pushed and jumped, not called: most hits do not come back here, and the processor's predictor of returns must stay
// paired with the program's calls (core/native/x86_64/trampolines.S).
//
// Stack inside sonde_entry, S = sp at the site:
//   S-136 site number   S-144 return point
#pragma once

#include <cstdint>

namespace sonde::x86_64_detour {

constexpr int kHeader = 16;  // bytes in front of the detour: the return point, the patch address
constexpr int kPushOffset = 5;  // of `push $site`
constexpr int kPushReturnOffset = 10;  // of the second push
constexpr int kJumpOffset = 16;  // of `jmp *pointer(%rip)`
constexpr int kReturnOffset = 22;  // return point
constexpr int kResumeOffset = 30;  // first relocated instruction
constexpr int kEntryCfa = 144;  // S - sp at the first instruction of sonde_entry
constexpr int kPatchFromReturn = 30;  // *(return point - 30) = patch address
static_assert(kPatchFromReturn == kReturnOffset + 8);

}  // namespace sonde::x86_64_detour
