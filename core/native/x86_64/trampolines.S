// Return trampolines (x86-64): where hooked functions return to.
//
// ABI facts: System V psABI 3.2.2 (128-byte red zone below sp, kept by signal delivery), 3.2.1 (any register may carry a
// value here: callers compiled with -fipa-ra keep some even in caller-saved ones).
//
// Each hooked activation has a trampoline of its own, T, the address in its return slot:
//
//   T-6   ff 15 <rel32>     call *target(%rip)
//   T+0   e9 <rel32>        jmp sonde_return_common
//   T+5   90 ... 90
//
// Trampoline i belongs to sonde_entries[i] = {real return address, slot} and to the same rows of some more tables
// (core/probe/entries.h), one of which holds target. Trampolines begin at multiples of 16, rows have 16 bytes, and the
// tables lie at fixed distances (offsets.h, agent/layout.ld): entry i is at T + ENTRIES_DISTANCE.
//
// Most functions are entered by that call. The entry trampoline puts T-6 into the slot and jumps there, with sp above the
// slot; the call leads to where the function goes on, and puts T into the slot. So the processor expects the function to return
// to T, and the real return address is next in its predictor: for that `ret` is right as well. Where the slot had a
// trampoline already (a tail call), the function is entered by a jump, and left by one.
//
// The unwind information computes the real address from the slot: CFA = sp (the slot has been consumed), T or T-6 = *(CFA - 8)
// (nothing writes into the red zone), return address = *(that, rounded down to 16, + ENTRIES_FROM_BEGINNING). It needs no
// search and no state, so it holds for every unwinder at every instruction, and text is neither written nor read: core files
// do not hold it. CFA must be sp itself: GNU libunwind and lldb set sp := CFA whatever a rule for sp says.
//
// A frame of size zero shares its CFA with its caller, by which libgcc and LLVM tell the frame of a handler. So exceptions
// do not pass through: the personality makes every such frame a cleanup that lands in sonde_landing_pad.

#include "core/native/x86_64/offsets.h"

    .macro push_callee_saved depth // struct CalleeSaved, core/probe/hit.h; the CFA is sp + depth before
    push %rbp
    .cfi_def_cfa_offset \depth + 8
    push %rbx
    .cfi_def_cfa_offset \depth + 16
    push %r12
    .cfi_def_cfa_offset \depth + 24
    push %r13
    .cfi_def_cfa_offset \depth + 32
    push %r14
    .cfi_def_cfa_offset \depth + 40
    push %r15
    .cfi_def_cfa_offset \depth + 48
    .endm

    .section .text.sonde_trampolines, "ax", @progbits
    .balign 128                    // and so are the tables: see kFreshTogether in core/probe/entries.cc
    .cfi_startproc simple
    .cfi_personality 0x9b, personality_reference      // indirect pcrel sdata4
    .cfi_def_cfa %rsp, 0
    CFI_RETURN_ADDRESS_OF_TRAMPOLINE
    .fill 128, 1, 0x90             // unwinders look up pc-1: the first one's beginning needs covered bytes in front
    call *TARGETS_DISTANCE(%rip)
    .globl sonde_trampolines
    .hidden sonde_trampolines
    .type sonde_trampolines, @function
sonde_trampolines:
    .rept TRAMPOLINES
    .byte 0xe9
    .long sonde_return_common - . - 4
    .fill TRAMPOLINE_STRIDE - 5 - TRAMPOLINE_CALL, 1, 0x90
    call *TARGETS_DISTANCE(%rip)
    .endr
    .size sonde_trampolines, . - sonde_trampolines

// Return common. R = sp of the caller after the return.
//
//   R-8    the slot: T, later the real return address
//   R-16   rax
//   R-24   flags: lahf + seto in ah, al
//   R-32   rcx, rdx, rsi, rdi, r8 (at R-64)
//   R-72   r9, r10, r11 (at R-88), for the full path only
//
// Vector, x87 and MXCSR state are not touched: the agent is compiled for general registers only, and without string
// instructions, so that the direction flag does not matter to it.
//
// As in entry.S nearly every return takes the usual path: end_guarded() of core/probe/hit.cc by hand, for the call of a
// usual site that returns on the thread that entered it and shared its slot with no other. The full path is
// sonde_on_return() in C++.
    .equ RETURN_SLOT, 64 - 8       // from sp below r8

    .balign 64
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
    // First the slot holds the truth, then the entry may go. Here and not in C++: the rule for the return address changes
    // with the store, and unwinders look up callers at the byte before their pc, that is within the call.
    mov RETURN_SLOT(%rsp), %rdi    // T
    mov ENTRIES_DISTANCE + ENTRY_REAL(%rdi), %rcx
    mov %rcx, RETURN_SLOT(%rsp)
    .cfi_offset 16, -8
    .cfi_remember_state
    rdfsbase %rax
    mov OWNERS_DISTANCE + OWNER_USUAL(%rdi), %rsi
    cmp %rax, THREAD_USUAL(%rsi)
    jne .Lfull
    mov THREAD_TID_WORD(%rsi), %rcx
    mov (%rcx), %ecx
    cmp %ecx, THREAD_TID_VALUE(%rsi)
    jne .Lfull
    cmpq $0, THREAD_GUARD(%rsi)
    jne .Lfull
    cmpl $STATE_IN_USE, OWNERS_DISTANCE + OWNER_STATE(%rdi)
    jne .Lfull
    mov sonde_agent_control + CONTROL_SESSION(%rip), %rdx
    cmpl $RECORDING, SESSION_STATE(%rdx)
    jne .Lfull
    rdtsc
    mov %rsp, THREAD_GUARD(%rsi)
    movl $STATE_FREE, OWNERS_DISTANCE + OWNER_STATE(%rdi)
    shl $32, %rdx
    or %rdx, %rax
    mov %rax, %r8                  // the exit's time
    // ring_reserve(): the record, RING_DATA before it, to rax
    mov THREAD_RING(%rsi), %rdx
1:  mov RING_RESERVE(%rdx), %rax
    lea CALL_RECORD_BYTES(%rax), %rcx
    cmp %rcx, RING_LIMIT(%rdx)
    jb .Lno_room
    cmp %rax, RING_TAIL(%rdx)
    jne .Lno_room
    or $USUAL_WRITER, %rcx
    cmpxchg %rcx, RING_RESERVE(%rdx)
    jne 1b
    and RING_MASK(%rdx), %rax
    add %rdx, %rax
    prefetchw RING_DATA + RING_AHEAD(%rax)
    mov %r8, RING_DATA + 16(%rax)
    mov CALLS_DISTANCE + CALL_TICKS(%rdi), %rcx
    mov %rcx, RING_DATA + 8(%rax)
    mov ENTRIES_DISTANCE + ENTRY_SLOT(%rdi), %rcx
    shr $3, %rcx                   // slot_key()
    shl $32, %rcx
    mov CALLS_DISTANCE + CALL_SITE(%rdi), %r8d
    shl $RECORD_SITE_SHIFT, %r8d
    lea CALL_RETURNED(%rcx, %r8), %rcx
    mov %rcx, RING_DATA(%rax)
    // ring_commit(): the record is the one at tail
    addq $CALL_RECORD_BYTES, RING_TAIL(%rdx)
    andq $~USUAL_WRITER, RING_RESERVE(%rdx)
    // entry_give()
    lea sonde_trampolines - TRAMPOLINE_STRIDE(%rip), %rcx
    mov %rdi, %rdx
    sub %rcx, %rdx                 // the entry's number in lists
3:  mov THREAD_FREE(%rsi), %rax
    mov %rax, %rcx
    shr $32, %rcx
    sub %edx, %ecx
    mov %ecx, CALLS_DISTANCE + CALL_LINK(%rdi)
    mov %rdx, %r8
    shl $32, %r8
    lea 1(%rax), %ecx
    or %rcx, %r8
    cmpxchg %r8, THREAD_FREE(%rsi)
    jne 3b
    movq $0, THREAD_GUARD(%rsi)

.Lback:
    .macro restore_return
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
    .endm
    restore_return
    ret

    .cfi_restore_state
.Lno_room:                         // or not the outermost
    movl $STATE_IN_USE, OWNERS_DISTANCE + OWNER_STATE(%rdi)
    movq $0, THREAD_GUARD(%rsi)
.Lfull:
    push %r9
    .cfi_def_cfa_offset 72
    push %r10
    .cfi_def_cfa_offset 80
    push %r11
    .cfi_def_cfa_offset 88
    xor %eax, %eax
    xor %edx, %edx
    testl $NO_TICKS, sonde_agent_control + CONTROL_FLAGS(%rip)
    jnz 4f                         // the time stamp counter is forbidden: nothing is recorded
    rdtsc
4:  shl $32, %rdx
    mov %eax, %esi
    or %rdx, %rsi                  // the exit's time
    mov %rsp, %rdx
    xor %ecx, %ecx
    cmpq $0, sonde_hit_handlers + HANDLERS_EXIT(%rip)
    jne sonde_return_handled
    call sonde_on_return           // (T, ticks, sp, 0): writes the record, frees the entry; not 0 if it was entered by a jump
.Lended:
    pop %r11
    .cfi_def_cfa_offset 80
    pop %r10
    .cfi_def_cfa_offset 72
    pop %r9
    .cfi_def_cfa_offset 64
    test %rax, %rax
    jz .Lback
    restore_return
    lea 8(%rsp), %rsp              // the slot stays intact in the red zone
    .cfi_def_cfa_offset 0
    jmp *-8(%rsp)                  // not `ret`: the return predictor stays paired with the program's calls
    .size sonde_return_common, . - sonde_return_common
    .cfi_endproc

// Part of the above, where somebody wants the caller's registers (core/probe/hit_handler.h).
    .globl sonde_return_handled
    .hidden sonde_return_handled
    .type sonde_return_handled, @function
sonde_return_handled:
    .cfi_startproc simple
    .cfi_def_cfa %rsp, 88
    .cfi_offset 16, -8
    push_callee_saved 88
    mov %rsp, %rcx
    call sonde_on_return
    lea 48(%rsp), %rsp
    .cfi_def_cfa_offset 88
    jmp .Lended
    .cfi_endproc
    .size sonde_return_handled, . - sonde_return_handled

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
    push_callee_saved 16
    mov %rsp, %rdx
    call sonde_on_unwind           // the "unwound" exit; frees the entry; returns the unwinder's _Unwind_Resume
    lea 48(%rsp), %rsp
    .cfi_def_cfa_offset 16
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
