// See hijack.h.
#include "host/plan/hijack.h"

#include "host/plan/insn.h"

namespace sonde::host {

NoHijack no_hijack_by_code(const CodeView& view, CodeRange function) {
  for (uint64_t pc = function.begin; pc < function.end;) {
    auto insn = decode(view.code_at(pc), pc);
    if (!insn) break;
    if (insn->flow == Flow::ret && insn->pops) return NoHijack::pops_arguments;
    pc = insn->next();
  }
  return NoHijack::none;
}

}  // namespace sonde::host
