// Calls a handler, which is ordinary compiled code, from the hit path, which keeps every register (core/probe/hit_handler.h).
//
// sonde_call_handler(hit, handler): flags and the direction flag, x87, MXCSR and vector registers are saved here; general ones
// are the hit path's own business. The stack is aligned as the psABI wants it (3.2.2), the save area as XSAVE wants it (64).
    .equ SAVE_BYTES, 2752          // XSAVE's standard form with AVX-512; the part of AMX is not asked for
    .equ SAVED, 0xe7               // x87, SSE, AVX, opmask, ZMM_Hi256, Hi16_ZMM
    .equ HEADER, 512

    .text
    .balign 16
    .globl sonde_call_handler
    .hidden sonde_call_handler
    .type sonde_call_handler, @function
sonde_call_handler:
    .cfi_startproc
    endbr64
    push %rbp
    .cfi_def_cfa_offset 16
    .cfi_offset %rbp, -16
    mov %rsp, %rbp
    .cfi_def_cfa_register %rbp
    pushfq
    cld
    sub $SAVE_BYTES, %rsp
    and $-64, %rsp
    mov %rsi, %r8
    xor %ecx, %ecx
1:  movq $0, HEADER(%rsp,%rcx)     // XRSTOR wants its reserved words zero
    add $8, %ecx
    cmp $64, %ecx
    jne 1b
    mov $SAVED, %eax
    xor %edx, %edx
    xsave64 (%rsp)
    call *%r8
    mov $SAVED, %eax
    xor %edx, %edx
    xrstor64 (%rsp)
    lea -8(%rbp), %rsp
    popfq
    pop %rbp
    .cfi_def_cfa %rsp, 8
    .cfi_same_value %rbp
    ret
    .cfi_endproc
    .size sonde_call_handler, . - sonde_call_handler

// sonde_stack_here(frames, room): the caller's registers are what they will be when this returns.
    .balign 16
    .globl sonde_stack_here
    .hidden sonde_stack_here
    .type sonde_stack_here, @function
sonde_stack_here:
    .cfi_startproc
    endbr64
    mov (%rsp), %rax
    lea 8(%rsp), %rcx
    push %r15                      // SiteRegs, from its end
    .cfi_def_cfa_offset 16
    push %r14
    .cfi_def_cfa_offset 24
    push %r13
    .cfi_def_cfa_offset 32
    push %r12
    .cfi_def_cfa_offset 40
    push %rbx
    .cfi_def_cfa_offset 48
    push %rbp
    .cfi_def_cfa_offset 56
    push %rcx
    .cfi_def_cfa_offset 64
    push %rax
    .cfi_def_cfa_offset 72
    mov %esi, %ecx
    mov %rdi, %rdx
    mov $1, %esi
    mov %rsp, %rdi
    call sonde_stack_of
    lea 64(%rsp), %rsp
    .cfi_def_cfa_offset 8
    ret
    .cfi_endproc
    .size sonde_stack_here, . - sonde_stack_here

    .section .note.GNU-stack, "", @progbits
