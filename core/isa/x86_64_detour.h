// The bytes of an x86-64 detour: shared by host/plan, which writes them, by the trampolines in core/native, whose unwind
// information reads them, and by the walker.
//
//   detour - 8:   u64 patch address (site pc); the entry trampoline's unwind information finds the probed function here
//   detour:       48 8d 64 24 80         lea -128(%rsp),%rsp     step over the red zone, flags untouched
//                 68 <site:32>           push $site
//                 ff 15 <disp:32>        call *pointer(%rip)     -> sonde_entry, pointer in the same arena
//   return point: 48 8d a4 24 88 00 00 00  lea 136(%rsp),%rsp
//   resume:       relocated copies of the displaced instructions
//                 jmp back (e9 rel32, or ff 25 00000000 <addr:64>)
//
// Stack inside sonde_entry, S = sp at the site:
//   S-136 site number   S-144 return point
#pragma once

#include <cstdint>

namespace sonde::x86_64_detour {

constexpr int kHeader = 8;           // bytes in front of the detour: the patch address
constexpr int kPushOffset = 5;       // of `push $site`
constexpr int kCallOffset = 10;      // of `call *pointer(%rip)`
constexpr int kReturnOffset = 16;    // return point
constexpr int kResumeOffset = 24;    // first relocated instruction
constexpr int kEntryCfa = 144;       // S - sp at the first instruction of sonde_entry
constexpr int kPatchFromReturn = 24; // *(return point - 24) = patch address
static_assert(kPatchFromReturn == kReturnOffset + kHeader);

}  // namespace sonde::x86_64_detour
