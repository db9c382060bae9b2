// Return trampolines (x86-64): where hooked functions return to.
//
// ABI facts: System V psABI 3.2.2 (128-byte red zone below sp, kept by signal delivery), 3.2.1 (any register may carry a
// value here: callers compiled with -fipa-ra keep some even in caller-saved ones).
//
// Each hooked activation has a trampoline of its own, the address in its return slot. Trampoline i belongs to
// sonde_entries[i] = {real return address, slot}; both have a stride of 16 bytes:
//
//   T+0   e9 <rel32>        jmp sonde_return_common
//   T+5   90 ... 90
//
// and the tables lie ENTRY_DISTANCE apart (agent/layout.ld), so that entry i is at T + ENTRY_DISTANCE.
//
// The unwind information computes the real address from that: CFA = sp (the slot has been consumed), T = *(CFA - 8)
// (nothing writes into the red zone), return address = *(T + ENTRY_DISTANCE). It needs no search and no state, so it holds
// for every unwinder at every instruction, and text is neither written nor read: core files do not hold it. CFA must be sp
// itself: GNU libunwind and lldb set sp := CFA whatever a rule for sp says.
//
// A frame of size zero shares its CFA with its caller, by which libgcc and LLVM tell the frame of a handler. So exceptions
// do not pass through: the personality makes every such frame a cleanup that lands in sonde_landing_pad.

    .equ TRAMPOLINES, 131072       // kTrampolines in core/probe/control.h
    .equ ENTRY_DISTANCE, 0x300000

    .equ NO_TICKS, 4               // kControlNoTicks
    .equ CONTROL_FLAGS, 48         // kControlFlagsOffset

    .section .text.sonde_trampolines, "ax", @progbits
    .balign 64
    .cfi_startproc simple
    .cfi_personality 0x9b, personality_reference      // indirect pcrel sdata4
    .cfi_def_cfa %rsp, 0
    // DW_CFA_val_expression rip: lit8 minus deref (T) plus_uconst ENTRY_DISTANCE deref
    .cfi_escape 0x16, 16, 9, 0x38, 0x1c, 0x06, 0x23, ENTRY_DISTANCE & 127 | 128, ENTRY_DISTANCE >> 7 & 127 | 128, \
      ENTRY_DISTANCE >> 14 & 127 | 128, ENTRY_DISTANCE >> 21, 0x06
    .fill 64, 1, 0x90              // unwinders look up pc-1: trampoline 0 needs covered bytes in front
    .globl sonde_trampolines
    .hidden sonde_trampolines
    .type sonde_trampolines, @function
sonde_trampolines:
    .rept TRAMPOLINES
    .byte 0xe9
    .long sonde_return_common - . - 4
    .fill 11, 1, 0x90
    .endr
    .size sonde_trampolines, . - sonde_trampolines

// Return common. R = sp of the caller after the return.
//
//   R-8    the slot: T, later the real return address
//   R-16   rax
//   R-24   flags: lahf + seto in ah, al
//   R-32   rcx, rdx, rsi, rdi, r8, r9, r10, r11 (at R-88)
//
// Vector, x87 and MXCSR state are not touched: the agent is compiled for general registers only, and without string
// instructions, so that the direction flag does not matter to it.
    .balign 16
    .globl sonde_return_common
    .hidden sonde_return_common
    .type sonde_return_common, @function
sonde_return_common:
    lea -8(%rsp), %rsp             // the slot is a stack word again; flags untouched
    .cfi_def_cfa_offset 8
    push %rax
    .cfi_def_cfa_offset 16
    lahf
    seto %al
    push %rax
    .cfi_def_cfa_offset 24
    push %rcx
    .cfi_def_cfa_offset 32
    push %rdx
    .cfi_def_cfa_offset 40
    push %rsi
    .cfi_def_cfa_offset 48
    push %rdi
    .cfi_def_cfa_offset 56
    push %r8
    .cfi_def_cfa_offset 64
    push %r9
    .cfi_def_cfa_offset 72
    push %r10
    .cfi_def_cfa_offset 80
    push %r11
    .cfi_def_cfa_offset 88
    // First the slot holds the truth, then the entry may go. Here and not in C++: the rule for the return address changes
    // with the store, and unwinders look up callers at the byte before their pc, that is within the call.
    .cfi_remember_state
    testl $NO_TICKS, sonde_agent_control + CONTROL_FLAGS(%rip)
    jnz sonde_return_without_ticks
    rdtsc
1:  mov 80(%rsp), %rdi             // T
    mov ENTRY_DISTANCE(%rdi), %rcx // entry.real
    mov %rcx, 80(%rsp)
    .cfi_offset 16, -8
    shl $32, %rdx
    mov %eax, %esi
    or %rdx, %rsi                  // the exit's time
    mov %rsp, %rdx
    call sonde_on_return           // (T, ticks, sp): writes the record, frees the entry
    pop %r11
    .cfi_def_cfa_offset 80
    pop %r10
    .cfi_def_cfa_offset 72
    pop %r9
    .cfi_def_cfa_offset 64
    pop %r8
    .cfi_def_cfa_offset 56
    pop %rdi
    .cfi_def_cfa_offset 48
    pop %rsi
    .cfi_def_cfa_offset 40
    pop %rdx
    .cfi_def_cfa_offset 32
    pop %rcx
    .cfi_def_cfa_offset 24
    pop %rax
    .cfi_def_cfa_offset 16
    add $127, %al                  // OF = (al was 1)
    sahf                           // SF ZF AF PF CF
    pop %rax
    .cfi_def_cfa_offset 8
    lea 8(%rsp), %rsp              // the slot stays intact in the red zone
    .cfi_def_cfa_offset 0
    jmp *-8(%rsp)                  // not `ret`: the return predictor stays paired with the program's calls
    .size sonde_return_common, . - sonde_return_common

    .cfi_restore_state
    .type sonde_return_without_ticks, @function
sonde_return_without_ticks:        // the time stamp counter is forbidden: nothing is recorded
    xor %eax, %eax
    xor %edx, %edx
    jmp 1b
    .size sonde_return_without_ticks, . - sonde_return_without_ticks
    .cfi_endproc

// Unwinding (exception, pthread_exit, cancellation) reached a hooked frame and the personality sent it here.
// sp = R, rax = exception object, rdx = entry. The unwinder has written this address into the slot on its way.
    .balign 16
    .globl sonde_landing_pad
    .hidden sonde_landing_pad
    .type sonde_landing_pad, @function
    nop                            // covered: lookups at pc-1
sonde_landing_pad:
    .cfi_startproc simple
    .cfi_def_cfa %rsp, 0
    .cfi_escape 0x10, 16, 2, 0x71, 0   // DW_CFA_expression rip: at breg1 (rdx) + 0
    push (%rdx)                    // the real return address back into its slot
    .cfi_def_cfa_offset 8
    .cfi_offset 16, -8
    push %rax
    .cfi_def_cfa_offset 16
    mov %rdx, %rdi
    mov %rsp, %rsi
    call sonde_on_unwind           // the "unwound" exit; frees the entry; returns the unwinder's _Unwind_Resume
    pop %rdi
    .cfi_def_cfa_offset 8
    sub $8, %rsp
    .cfi_def_cfa_offset 16
    call *%rax
    hlt
    .cfi_endproc
    .size sonde_landing_pad, . - sonde_landing_pad

    .section .data.rel.ro.sonde_personality, "aw", @progbits
    .balign 8
personality_reference:
    .quad sonde_personality

    .section .note.GNU-stack, "", @progbits
