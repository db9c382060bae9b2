// Entry trampoline (x86-64): detours come here with the site's number, it saves what the hit path may touch.
//
// On entry (core/isa/x86_64_detour.h; S = sp at the site, for a function entry the address of the return slot):
//
//   S-128   the program's red zone ends
//   S-136   site number
//   S-144   return point in the detour            <- sp
//   S-152   rax
//   S-160   flags: lahf + seto in ah, al
//   S-168   rcx, rdx, rsi, rdi (at S-192)
//   S-200   r8, r9, r10, r11 (at S-224), for the full path only
//
// EntryFrame in core/probe/hit.h is this picture in C++. rbx, rbp, r12-r15 are preserved by the hit path itself; vector,
// x87 and MXCSR state and the direction flag by how the agent is compiled (see trampolines.S). For the same reason the
// stack needs no alignment: nothing in the agent relies on more than the 8 bytes that every stack has.
//
// For every unwinder the caller of this frame is the probed function, stopped at its first patched byte: CFA = S, and the
// return address is the patch address plus one (unwinders look up pc-1), read from the detour's header: *(return point - 30) + 1.
//
// Nearly every hit takes the usual path, which is hit_usual() of core/probe/hit.cc by hand, for what it comes to when
// nothing is special: the session records, the site only wants its return hooked, the thread is known and has a ring, it
// is in no other probe path, the slot is not hooked yet, the thread's free list has an entry. All this is looked at
// before anything is changed; anything else is left to the full path, sonde_on_entry() in C++.

#include "core/native/x86_64/entry_frame.h"
#include "core/native/x86_64/offsets.h"

    .equ RETURN_POINT, 192 - 144   // from sp below rdi
    .equ SITE, 192 - 136
    .equ SLOT, 192

    .text
    .balign 64
    .globl sonde_entry_full
    .hidden sonde_entry_full
    .type sonde_entry_full, @function
sonde_entry_full:
    .cfi_startproc simple
    saved_usual
.Lnone_free:
    movq $0, THREAD_GUARD(%rdx)
.Lfull:
    push %r8
    .cfi_def_cfa_offset 200
    .cfi_offset %r8, -200
    push %r9
    .cfi_def_cfa_offset 208
    .cfi_offset %r9, -208
    push %r10
    .cfi_def_cfa_offset 216
    .cfi_offset %r10, -216
    push %r11
    .cfi_def_cfa_offset 224
    .cfi_offset %r11, -224
    mov %rsp, %rdi                 // sonde_on_entry(frame, rbp, rbx, r12, r13, r14, r15): for a walk from the site
    push %r15                      // the seventh argument's place
    .cfi_def_cfa_offset 232
    mov %rbp, %rsi
    mov %rbx, %rdx
    mov %r12, %rcx
    mov %r13, %r8
    mov %r14, %r9
    call sonde_on_entry            // T if the function is to be entered through it, else 0
    lea 8(%rsp), %rsp
    .cfi_def_cfa_offset 224
    pop %r11
    .cfi_def_cfa_offset 216
    .cfi_same_value %r11
    pop %r10
    .cfi_def_cfa_offset 208
    .cfi_same_value %r10
    pop %r9
    .cfi_def_cfa_offset 200
    .cfi_same_value %r9
    pop %r8
    .cfi_def_cfa_offset 192
    .cfi_same_value %r8
    test %rax, %rax
    jz 1f
    mov RETURN_POINT(%rsp), %rdi
    add $RESUME_BEHIND_RETURN, %rdi
    mov %rdi, TARGETS_DISTANCE(%rax)
    sub $TRAMPOLINE_CALL, %rax
    mov %rax, SLOT(%rsp)
    jmp .Lthrough
1:  restore_usual                  // back to the detour
    lea 8(%rsp), %rsp
    .cfi_def_cfa_offset 136
    jmp *-8(%rsp)                  // not `ret`: nothing was called
    .cfi_endproc
    .size sonde_entry_full, . - sonde_entry_full

    .balign 64
    .globl sonde_entry
    .hidden sonde_entry
    .type sonde_entry, @function
sonde_entry:
    .cfi_startproc simple
    .cfi_def_cfa %rsp, 144
    probed_function_called_us
    push %rax
    .cfi_def_cfa_offset 152
    .cfi_offset %rax, -152
    lahf
    seto %al
    push %rax
    .cfi_def_cfa_offset 160
    push %rcx
    .cfi_def_cfa_offset 168
    .cfi_offset %rcx, -168
    push %rdx
    .cfi_def_cfa_offset 176
    .cfi_offset %rdx, -176
    push %rsi
    .cfi_def_cfa_offset 184
    .cfi_offset %rsi, -184
    push %rdi
    .cfi_def_cfa_offset 192
    .cfi_offset %rdi, -192

    mov sonde_agent_control + CONTROL_SESSION(%rip), %rdx
    mov SITE(%rsp), %ecx
    test %rdx, %rdx
    jz .Lfull
    cmpl $RECORDING, SESSION_STATE(%rdx)
    jne .Lfull
    mov %ecx, %eax
    shl $SITE_BYTES_LOG2, %rax
    cmpl $USUAL, SESSION_SITES + SITE_FLAGS(%rdx, %rax)
    jne .Lfull
    // find_thread()
    rdfsbase %rsi
    movabs $THREAD_HASH, %rdx
    imul %rsi, %rdx
    shr $THREAD_HASH_SHIFT, %rdx
    shl $THREAD_BYTES_LOG2, %rdx
    add sonde_agent_control + CONTROL_THREADS(%rip), %rdx
    cmp %rsi, THREAD_USUAL(%rdx)
    jne .Lfull
    mov THREAD_TID_WORD(%rdx), %rsi
    mov (%rsi), %esi
    cmp %esi, THREAD_TID_VALUE(%rdx)
    jne .Lfull
    cmpq $0, THREAD_GUARD(%rdx)
    jne .Lfull
    mov SLOT(%rsp), %rsi
    lea sonde_trampolines(%rip), %rdi
    sub %rdi, %rsi
    cmp $TRAMPOLINES * TRAMPOLINE_STRIDE, %rsi
    jb .Lfull
    mov %rsp, THREAD_GUARD(%rdx)
    // entry_take(): T, the trampoline of the list's first entry, to rdi
1:  mov THREAD_FREE(%rdx), %rax
    mov %rax, %rdi
    shr $32, %rdi
    jz .Lnone_free
    lea sonde_trampolines - TRAMPOLINE_STRIDE(%rip), %rsi
    add %rsi, %rdi
    mov CALLS_DISTANCE + CALL_LINK(%rdi), %esi
    shl $32, %rsi
    add %rax, %rsi
    cmpxchg %rsi, THREAD_FREE(%rdx)
    jne 1b
    // record_begin(), begin_activation()
    mov THREAD_RING(%rdx), %rax
    addq $1, RING_CALLS(%rax)
    mov SLOT(%rsp), %rsi
    mov %rsi, ENTRIES_DISTANCE + ENTRY_REAL(%rdi)
    lea SLOT(%rsp), %rsi
    mov %rsi, ENTRIES_DISTANCE + ENTRY_SLOT(%rdi)
    mov %rcx, CALLS_DISTANCE + CALL_SITE(%rdi)      // and no link
    mov THREAD_TID_IN_USE(%rdx), %rax
    mov %rdx, OWNERS_DISTANCE + OWNER_USUAL(%rdi)
    mov %rax, OWNERS_DISTANCE + OWNER_TID_STATE(%rdi)
    mov %rdx, %rsi
    rdtsc
    shl $32, %rdx
    or %rdx, %rax
    mov %rax, CALLS_DISTANCE + CALL_TICKS(%rdi)
    mov RETURN_POINT(%rsp), %rax
    add $RESUME_BEHIND_RETURN, %rax
    mov %rax, TARGETS_DISTANCE(%rdi)
    sub $TRAMPOLINE_CALL, %rdi
    mov %rdi, SLOT(%rsp)           // everything is complete before the slot names it
    movq $0, THREAD_GUARD(%rsi)
.Lthrough:                         // into the function by the trampoline's call, see trampolines.S
    restore_usual
    lea 152(%rsp), %rsp            // S + 8, as if the function had returned already
    .cfi_endproc
    .size sonde_entry, . - sonde_entry

    .globl sonde_through
    .hidden sonde_through
    .type sonde_through, @function
sonde_through:
    .cfi_startproc simple
    .cfi_def_cfa %rsp, 0
    CFI_RETURN_ADDRESS_OF_TRAMPOLINE
    jmp *-8(%rsp)
    .cfi_endproc
    .size sonde_through, . - sonde_through

// A hit on _Unwind_Backtrace returns here instead of to the detour (core/probe/backtrace.h): sp = S - 136, where the
// site's number was stands the address of the displaced instructions. rdi and rsi are the program's arguments; rdx is
// free at the entry of a function of two.
    .balign 16
    .globl sonde_backtrace_stub
    .hidden sonde_backtrace_stub
    .type sonde_backtrace_stub, @function
sonde_backtrace_stub:
    .cfi_startproc
    .cfi_def_cfa_offset 144
    mov (%rsp), %rdx
    lea 136(%rsp), %rsp
    .cfi_def_cfa_offset 8
    jmp sonde_backtrace
    .cfi_endproc
    .size sonde_backtrace_stub, . - sonde_backtrace_stub

    .section .note.GNU-stack, "", @progbits
