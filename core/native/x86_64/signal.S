// The entrances that the kernel is given in place of the program's signal handlers (core/probe/handlers.h), and the way out of a
// site on a system call that the agent has carried out (x86-64). Kernel ABI: a handler is entered as if called by its
// restorer: (sp) = the restorer, rdi, rsi, rdx = signal, siginfo, ucontext, rax = 0; ucontext at sp + 8.

#include "core/native/x86_64/entry_frame.h"

    .equ ENTRANCES, 1024           // kHandlers
    .equ STATUS_FLAGS, 0x8d5       // OF SF ZF AF PF CF

    .text
    .balign 64
    .globl sonde_handlers
    .hidden sonde_handlers
    .type sonde_handlers, @function
sonde_handlers:
    .cfi_startproc
    .set entrance, 0
    .rept ENTRANCES
    endbr64
    mov $entrance, %r11d           // 41 bb: 6 bytes
    .byte 0xe9
    .long handler_common - . - 4
    .byte 0x90
    .set entrance, entrance + 1
    .endr

// No frame is left behind: what the handler finds on its stack and in its registers is what the kernel put there, but for r11.
handler_common:
    push %rdi
    .cfi_def_cfa_offset 16
    push %rsi
    .cfi_def_cfa_offset 24
    push %rdx
    .cfi_def_cfa_offset 32
    mov %r11, %rdi                 // sonde_on_signal(handler, info, context, slot)
    lea 24(%rsp), %rcx
    call sonde_on_signal
    pop %rdx
    .cfi_def_cfa_offset 24
    pop %rsi
    .cfi_def_cfa_offset 16
    pop %rdi
    .cfi_def_cfa_offset 8
    mov %rax, %r11
    xor %eax, %eax
    jmp *%r11
    .cfi_endproc
    .size sonde_handlers, . - sonde_handlers

// sonde_leave_system_call(EntryFrame*, rbp, rbx, r12, r13, r14, r15): instead of returning to sonde_entry and the detour, on with
// the program behind its system call. Picture and arguments are entry.S's; where the site's number was stands the address to
// go on at. The return point
// stays in place for the unwind information, also in the last instruction, when it lies below sp: nothing writes within
// 128 bytes there. One instruction leaves the frame, so no signal finds it half left.
    .balign 16
    .globl sonde_leave_system_call
    .hidden sonde_leave_system_call
    .type sonde_leave_system_call, @function
sonde_leave_system_call:
    .cfi_startproc simple
    .cfi_def_cfa %rdi, 224
    probed_function_called_us
    .cfi_register %rbp, %rsi
    .cfi_register %rbx, %rdx
    .cfi_register %r12, %rcx
    .cfi_register %r13, %r8
    .cfi_register %r14, %r9
    .cfi_offset %r15, -232         // the seventh argument where entry.S has put it
    mov 8(%rsp), %r15
    .cfi_same_value %r15
    mov %r9, %r14
    .cfi_same_value %r14
    mov %r8, %r13
    .cfi_same_value %r13
    mov %rcx, %r12
    .cfi_same_value %r12
    mov %rdx, %rbx
    .cfi_same_value %rbx
    mov %rsi, %rbp
    .cfi_same_value %rbp
    mov %rdi, %rsp
    .cfi_def_cfa %rsp, 224
    .cfi_offset %rax, -152
    .cfi_offset %rcx, -168
    .cfi_offset %rdx, -176
    .cfi_offset %rsi, -184
    .cfi_offset %rdi, -192
    .cfi_offset %r8, -200
    .cfi_offset %r9, -208
    .cfi_offset %r10, -216
    .cfi_offset %r11, -224
    // r11 holds the status flags of the site; the others are what they were there.
    pushfq
    .cfi_def_cfa_offset 232
    pop %rax
    .cfi_def_cfa_offset 224
    and $~STATUS_FLAGS, %eax
    or %rax, (%rsp)
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
    restore_usual
    lea 8(%rsp), %rsp
    .cfi_def_cfa_offset 136
    ret $128
    .cfi_endproc
    .size sonde_leave_system_call, . - sonde_leave_system_call

    .section .note.GNU-stack, "", @progbits
