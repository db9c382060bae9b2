// Words for what a plan says.
#include "host/plan/plan.h"

namespace sonde::host {

const char* describe(Method method) {
  switch (method) {
    case Method::nops: return "nops";
    case Method::jump: return "jump";
    case Method::short_jump: return "short jump";
    case Method::punned_jump: return "punned jump";
    case Method::trap: return "trap";
    case Method::refused: return "refused";
  }
  return "?";
}

const char* describe(Refusal refusal) {
  switch (refusal) {
    case Refusal::none: return "none";
    case Refusal::not_code: return "no instruction there";
    case Refusal::too_small: return "too small for any jump";
    case Refusal::not_relocatable: return "an instruction that cannot be moved";
    case Refusal::jumped_into: return "a branch leads into the bytes to be patched";
    case Refusal::no_room: return "no free address for its detour";
    case Refusal::engine: return "part of sonde";
    case Refusal::cold_part: return "a split-off part, entered by jumps";
    case Refusal::data_in_text: return "data among its instructions";
    case Refusal::system_call: return "a system call that sonde watches is or begins there";
    case Refusal::unknown_pads: return "its exception table cannot be read";
    case Refusal::small_stacks: return "its stacks have no room for sums";
    case Refusal::inside_instruction: return "inside an instruction";
    case Refusal::function_entry: return "the entry of a function that is probed";
    case Refusal::landing_pad: return "a landing pad: the instruction behind it is probed for both";
    case Refusal::occupied: return "a thread always stood in it";
    case Refusal::differs: return "the code in memory differs from the file";
  }
  return "?";
}

const char* describe(NoHijack reason) {
  switch (reason) {
    case NoHijack::none: return "none";
    case NoHijack::reads_return_address: return "reads its return address";
    case NoHijack::returns_twice: return "returns twice";
    case NoHijack::returns_elsewhere: return "returns elsewhere";
    case NoHijack::pops_arguments: return "pops its arguments";
    case NoHijack::runtime_scans_stacks: return "runtime that looks up return addresses on its stacks";
    case NoHijack::sanitized: return "program under a sanitizer, which reads return addresses from its stacks";
    case NoHijack::sanitizer_entry: return "entry point of a sanitizer";
    case NoHijack::no_unwinder: return "program with an unwinder that nobody can find";
    case NoHijack::pops_return_address: return "changes its return address";
    case NoHijack::point: return "an instruction";
  }
  return "?";
}

}  // namespace sonde::host
