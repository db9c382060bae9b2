#include "core/probe/trap.h"

#include "core/native/syscall.h"
#include "core/probe/hit.h"
#include "core/probe/program_signals.h"

namespace sonde {

extern "C" {
void sonde_restorer() __attribute__((visibility("hidden")));
}

namespace {

// struct ucontext up to the general registers (arch/x86/include/uapi/asm/sigcontext.h).
struct TrapContext {
  uint64_t flags, link, stack_base, stack_flags, stack_size;
  uint64_t r8, r9, r10, r11, r12, r13, r14, r15, rdi, rsi, rbp, rbx, rdx, rax, rcx, rsp, rip;
};
struct TrapInfo {
  int32_t signal, error, code;
};
constexpr int32_t kFromKernel = 0x80;  // SI_KERNEL: what a trap instruction gives

constexpr uint64_t kSigInfo = 4, kRestorer = 0x04000000, kNoDefer = 0x40000000;

}  // namespace

extern "C" {
__attribute__((used)) const KernelSigaction sonde_trap_action = {
    .handler = reinterpret_cast<uint64_t>(&sonde_trap),
    .flags = kSigInfo | kRestorer | kNoDefer,
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

extern "C" void sonde_trap(int signal, void* info, void* context) {
  auto* interrupted = static_cast<TrapContext*>(context);
  uint64_t pc = interrupted->rip - 1;
  const TrapSite* trap = nullptr;
  if (static_cast<TrapInfo*>(info)->code == kFromKernel)
    trap = find_trap(__atomic_load_n(&sonde_agent_control.traps, __ATOMIC_ACQUIRE), pc);
  if (!trap) return forward_trap(signal, info, context);
  SessionHeader* session = sonde_agent_control.session;
  const Site& site = session_sites(session)[trap->site];
  interrupted->rip = pc;  // for unwinders meanwhile: nothing of the function has run
  if (__atomic_load_n(&session->state, __ATOMIC_RELAXED) == static_cast<uint32_t>(SessionState::recording)) {
    SiteRegs regs{pc,
                  interrupted->rsp,
                  interrupted->rbp,
                  interrupted->rbx,
                  interrupted->r12,
                  interrupted->r13,
                  interrupted->r14,
                  interrupted->r15};
    hit_site(session, trap->site, regs, reinterpret_cast<uint64_t>(__builtin_frame_address(0)));
  }
  __atomic_store_n(&interrupted->rip, site.resume, __ATOMIC_RELAXED);
}

}  // namespace sonde
