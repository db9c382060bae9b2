#include "core/probe/trap.h"

#include "core/probe/backtrace.h"
#include "core/probe/hit.h"
#include "core/probe/program_signals.h"
#include "core/probe/system_call.h"

namespace sonde {

extern "C" {
void sonde_restorer() __attribute__((visibility("hidden")));
}

namespace {
constexpr int32_t kFromKernel = 0x80;  // SI_KERNEL: what a trap instruction gives

void carry_out(SignalContext* context, const Site& site) {
  uint64_t flags = context->eflags & ~uint64_t{0x10000};  // RF
  ProgramCall call{
      context->rax, {context->rdi, context->rsi, context->rdx, context->r10, context->r8, context->r9}, context};
  int64_t result = is_minded(call.number) ? mind_system_call(call) : kNotCarriedOut;
  if (result == kNotCarriedOut) {
    __atomic_store_n(&context->rip, site.resume, __ATOMIC_RELAXED);
    return;
  }
  context->rax = static_cast<uint64_t>(result);
  context->rcx = site.patch + kSystemCallBytes;
  context->r11 = flags;
  __atomic_store_n(&context->rip, site.patch + kSystemCallBytes, __ATOMIC_RELAXED);
}

}  // namespace

extern "C" {
__attribute__((used)) const KernelSigaction sonde_trap_action = {
    .handler = reinterpret_cast<uint64_t>(&sonde_trap),
    .flags = kSaSigInfo | kSaRestorer | kSaNoDefer | kSaRestart,
    .restorer = reinterpret_cast<uint64_t>(&sonde_restorer),
    .mask = 0,
};
}

const TrapSite* find_trap(const TrapTable* table, uint64_t pc) {
  if (!table) return nullptr;
  uint64_t begin = 0, end = table->count;
  while (begin < end) {
    uint64_t middle = begin + (end - begin) / 2;
    if (table->sites[middle].pc == pc) return &table->sites[middle];
    if (table->sites[middle].pc < pc) begin = middle + 1;
    else end = middle;
  }
  return nullptr;
}

extern "C" void sonde_trap(int, SignalInfo* info, SignalContext* interrupted) {
  uint64_t pc = interrupted->rip - 1;
  const TrapSite* trap = nullptr;
  if (info->code == kFromKernel) trap = find_trap(__atomic_load_n(&sonde_agent_control.traps, __ATOMIC_ACQUIRE), pc);
  if (!trap) return forward_trap(info, interrupted);
  SessionHeader* session = sonde_agent_control.session;
  const Site& site = session_sites(session)[trap->site];
  interrupted->rip = pc;  // for unwinders meanwhile: nothing of the function has run
  if (site.flags & kSiteSystemCall) return carry_out(interrupted, site);
  if (is_recording(session)) {
    if (site.flags & kSitesByArguments) argument_event(site.flags, interrupted->rdi, interrupted->rsi, interrupted);
    SiteRegs regs{pc,
                  interrupted->rsp,
                  interrupted->rbp,
                  interrupted->rbx,
                  interrupted->r12,
                  interrupted->r13,
                  interrupted->r14,
                  interrupted->r15};
    hit_site(session, trap->site, regs);
  }
  uint64_t resume = site.flags & kSiteBacktrace ? divert_backtrace(interrupted, site.resume) : site.resume;
  __atomic_store_n(&interrupted->rip, resume, __ATOMIC_RELAXED);
}

}  // namespace sonde
