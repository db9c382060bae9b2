// What the kernel puts on the stack for a signal handler, and its numbers (x86-64). Sources: arch/x86/include/uapi/asm/
// sigcontext.h, ucontext.h, signal.h; include/uapi/asm-generic/siginfo.h.
#pragma once

#include <cstdint>

namespace sonde {

struct SignalContext {  // struct ucontext
  uint64_t flags, link;
  struct {  // stack_t
    uint64_t begin;
    int32_t flags;
    int32_t padding;
    uint64_t size;
  } stack;
  uint64_t r8, r9, r10, r11, r12, r13, r14, r15, rdi, rsi, rbp, rbx, rdx, rax, rcx, rsp, rip, eflags;
  uint64_t selectors, error, trap_number, old_mask, cr2, fpstate, reserved[8];
  uint64_t mask;  // restored when the handler returns
};
static_assert(sizeof(SignalContext) == 304);

struct SignalInfo {  // siginfo_t
  int32_t number, error, code, padding;
  uint64_t address;  // of a fault; of other signals something else
  uint64_t rest[13];
};
static_assert(sizeof(SignalInfo) == 128);

constexpr int kSigill = 4, kSigtrap = 5, kSigbus = 7, kSigfpe = 8, kSigkill = 9, kSigsegv = 11, kSigstop = 19,
              kSigsys = 31;
constexpr uint64_t kDefaultAction = 0, kIgnoreAction = 1;  // SIG_DFL, SIG_IGN
constexpr uint64_t kSaSigInfo = 4, kSaRestorer = 0x04000000, kSaOnStack = 0x08000000, kSaRestart = 0x10000000,
                   kSaNoDefer = 0x40000000, kSaResetHand = 0x80000000;
constexpr uint64_t kSaKnown = 7 | 0x800 | kSaRestorer | kSaOnStack | kSaRestart | kSaNoDefer | kSaResetHand;
constexpr uint64_t kMaskBytes = 8;  // sizeof(sigset_t) as the kernel sees it
constexpr uint64_t kBlock = 0, kUnblock = 1, kSetMask = 2;  // SIG_BLOCK, ...
constexpr uint64_t signal_bit(int number) { return uint64_t{1} << (number - 1); }
constexpr uint64_t kTrapBit = signal_bit(kSigtrap);
constexpr uint64_t kUnblockable = signal_bit(kSigkill) | signal_bit(kSigstop);
constexpr int32_t kStackOnStack = 1, kStackDisabled = 2;  // SS_ONSTACK, SS_DISABLE
constexpr int32_t kStackAutoDisarm = static_cast<int32_t>(0x80000000);  // SS_AUTODISARM

constexpr int64_t kEintr = -4, kEfault = -14, kEinval = -22;

}  // namespace sonde
