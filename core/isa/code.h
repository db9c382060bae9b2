// What a walker knows of machine code and of the kernel's signal frame, per instruction set: plain functions over the
// bytes around an address, compiled and tested on every machine. Signal-safe, header only.
//
// x86-64: `call` leaves its return address on the stack, so the slot's address names the activation. A signal handler
// returns to `mov $15,%rax; syscall` with sp at the kernel's struct ucontext (arch/x86/include/asm/sigframe.h; x86-64 psABI
// has nothing on it), registers in the order of struct sigcontext_64.
// AArch64: `bl` leaves it in x30, so sp at entry (the CFA) names the activation. A handler returns to `mov x8,#139; svc #0`
// with sp at siginfo (128 bytes), ucontext behind it (arch/arm64/kernel/signal.c, struct rt_sigframe). Bits 48..54 and
// 56..63 of a signed return address hold its code (Arm ARM D8.10, 48-bit addresses).
#pragma once

#include <cstdint>

#include "core/isa/aarch64.h"
#include "core/isa/x86_64.h"

namespace sonde {

template <class Isa>
struct Code;

template <>
struct Code<X86_64> {
  static constexpr uint64_t kSignatureBits = 0;
  static constexpr unsigned kSystemResult = X86_64::rax;
  static constexpr bool kKeyIsSlot = true;
  static constexpr int kResolverPushed = 0;  // that rows of the dynamic linker's lazy resolver forget

  // Bytes from sp to the words of a signal frame.
  static constexpr int kSignalStackBase = 16, kSignalStackSize = 32;
  static constexpr uint64_t kSignalFrameBytes = 176;  // holds all of these words
  static constexpr int signal_register(unsigned reg) {
    constexpr int kOffset[X86_64::kRegs] = {144, 136, 152, 128, 112, 104, 120, 160, 40,
                                            48,  56,  64,  72,  80,  88,  96,  168};
    return kOffset[reg];
  }

  // Whether a call instruction may end just behind these eight bytes (lowest address in the low byte). Decoding backwards
  // is ambiguous: `true` proves nothing, `false` proves that none does.
  static constexpr bool may_end_call(uint64_t before) {
    auto byte = [&](unsigned back) { return static_cast<uint8_t>(before >> (64 - 8 * back)); };
    if (byte(5) == 0xe8) return true;  // call rel32
    // ff /2: register; memory with no, 8-bit or 32-bit displacement; each with or without a SIB byte.
    auto is_ff2 = [&](unsigned back) { return byte(back) == 0xff && (byte(back - 1) >> 3 & 7) == 2; };
    auto mode = [&](unsigned back) { return byte(back - 1) >> 6; };
    auto rm = [&](unsigned back) { return byte(back - 1) & 7; };
    if (is_ff2(2) && (mode(2) == 3 || (mode(2) == 0 && rm(2) != 4 && rm(2) != 5))) return true;
    if (is_ff2(3) && ((mode(3) == 0 && rm(3) == 4) || (mode(3) == 1 && rm(3) != 4))) return true;
    if (is_ff2(4) && mode(4) == 1 && rm(4) == 4) return true;
    if (is_ff2(6) && ((mode(6) == 0 && rm(6) == 5) || (mode(6) == 2 && rm(6) != 4))) return true;
    return is_ff2(7) && rm(7) == 4 && (mode(7) == 2 || (mode(7) == 0 && (byte(5) & 7) == 5));
  }

  // Whether these bytes are a near return (with or without a repeat prefix, or popping arguments).
  static constexpr bool is_return(uint64_t at) {
    uint8_t first = at & 0xff, second = at >> 8 & 0xff;
    return first == 0xc3 || first == 0xc2 || ((first == 0xf3 || first == 0xf2) && second == 0xc3);
  }

  // The end of a function that throws (gcc's __builtin_eh_return): mov %rcx,%rsp; then ret, or pop %rcx; jmp *%rcx. All
  // registers are another frame's by then, which its rows do not say.
  static constexpr bool is_eh_return(uint64_t before, uint64_t at) {
    uint64_t popped = 0xe1ff59;
    if ((at & 0xffffff) == 0xcc8948) return (at >> 24 & 0xff) == 0xc3 || (at >> 24 & 0xffffff) == popped;
    return (at & 0xffffff) == popped || ((at & 0xffff) == 0xe1ff && before >> 56 == 0x59);
  }

  // 48 c7 c0 0f 00 00 00 0f 05; a shorter `mov $15,%eax` (b8) as well. `next` are the eight bytes behind the first eight.
  static constexpr bool is_signal_return(uint64_t at, uint64_t next) {
    if (at == 0x0f0000000fc0c748) return (next & 0xff) == 0x05;
    return (at & 0xffffffffffffff) == 0x050f0000000fb8;
  }

  // How many words a PLT stub has pushed when execution stands at `at`, in front of which are the eight bytes `before` and, in
  // front of those, `further`. -1: no stub that is known.
  //   .plt.sec, .plt.got:  [endbr64] [bnd] jmp *GOT(%rip)
  //   .plt:                [endbr64 | jmp *GOT(%rip)] push $n; [bnd] jmp header
  //   header:              push GOT+8(%rip); [bnd] jmp *GOT+16(%rip)      entered with n on the stack
  static constexpr int plt_words(uint64_t before, uint64_t at, uint64_t = 0) {
    auto back = [&](unsigned n) { return static_cast<uint8_t>(before >> (64 - 8 * n)); };
    if ((at & 0xff) == 0xf2) at >>= 8;  // bnd
    uint8_t first = at & 0xff, second = at >> 8 & 0xff;
    if ((at & 0xffffffff) == 0xfa1e0ff3 || first == 0x68) return 0;
    if (first == 0xff && second == 0x35) return 1;
    if (first == 0xff && second == 0x25) return back(6) == 0xff && back(5) == 0x35 ? 2 : 0;
    return first == 0xe9 && back(5) == 0x68 ? 1 : -1;
  }
};

template <>
struct Code<Aarch64> {
  static constexpr uint64_t kSignatureBits = 0xff7f000000000000;
  static constexpr unsigned kSystemResult = Aarch64::x0;
  static constexpr bool kKeyIsSlot = false;
  // glibc's _dl_runtime_resolve is entered with two words that the PLT has pushed, and says that its CFA is sp: its return
  // address would lie above the CFA (sysdeps/aarch64/dl-trampoline.S). Marked only where rows say so (host/tables/specials.cc).
  static constexpr int kResolverPushed = 16;

  static constexpr int kSignalStackBase = 144, kSignalStackSize = 160;
  static constexpr uint64_t kSignalFrameBytes = 312 + 8 * Aarch64::kRegs;
  static constexpr int signal_register(unsigned reg) { return 312 + 8 * static_cast<int>(reg); }

  static constexpr bool may_end_call(uint64_t before) {
    uint32_t insn = static_cast<uint32_t>(before >> 32);
    return (insn & 0xfc000000) == 0x94000000 ||  // bl
           (insn & 0xfffffc1f) == 0xd63f0000 ||  // blr
           (insn & 0xfefff800) == 0xd63f0800;  // blraa, blrab, blraaz, blrabz
  }

  static constexpr bool is_return(uint64_t at) {
    uint32_t insn = static_cast<uint32_t>(at);
    return (insn & 0xfffffc1f) == 0xd65f0000 || (insn & 0xfffffbff) == 0xd65f0bff;  // ret, retaa, retab
  }

  static constexpr bool is_eh_return(uint64_t, uint64_t) { return false; }
  static constexpr bool is_signal_return(uint64_t at, uint64_t) { return at == 0xd4000001d2801168; }

  // Stubs leave x30 alone; only the header pushes anything, x16 and x30.
  //   header:  [bti c] stp x16,x30,[sp,#-16]!; adrp x16; ldr x17,[x16,#]; add x16,x16,#; br x17; nop...
  //   stub:    [bti c] adrp x16; ldr x17,[x16,#]; add x16,x16,#; [autia1716] br x17; [nop]
  static constexpr int plt_words(uint64_t before, uint64_t at, uint64_t further) {
    constexpr uint32_t kPush = 0xa9bf7bf0, kJump = 0xd61f0220;
    auto low = [](uint64_t two) { return static_cast<uint32_t>(two); };
    auto high = [](uint64_t two) { return static_cast<uint32_t>(two >> 32); };
    const uint32_t insn = low(at);
    bool known = insn == kPush || insn == kJump || insn == 0xd503201f || insn == 0xd503245f || insn == 0xd503219f ||
                 (insn & 0x9f00001f) == 0x90000010 || (insn & 0xffc003ff) == 0xf9400211 ||
                 (insn & 0xff8003ff) == 0x91000210;
    if (!known) return -1;
    for (uint32_t back : {high(before), low(before), high(further), low(further)}) {
      if (back == kJump) return 0;
      if (back == kPush) return 2;
    }
    return 0;
  }
};

}  // namespace sonde
