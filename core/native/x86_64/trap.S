// Signal return, and calling a handler of the program on its alternate stack (x86-64). Kernel ABI: arch/x86/include/uapi/
// asm/sigcontext.h, ucontext.h. When the restorer runs, sp is the address of struct ucontext.
//
// Unwinders tell a restorer by its bytes (mov $15,%rax; syscall) or by its rules; both are as in glibc's.

    .text
    .macro saved reg, offset       // DW_CFA_expression reg: at sp + offset
    .cfi_escape 0x10, \reg, 3, 0x77, (\offset & 0x7f) | 0x80, \offset >> 7
    .endm

    .balign 16
    .cfi_startproc simple
    .cfi_signal_frame
    .cfi_escape 0x0f, 4, 0x77, 0xa0, 0x01, 0x06    // DW_CFA_def_cfa_expression: *(sp + 160), the interrupted sp
    saved 8, 40
    saved 9, 48
    saved 10, 56
    saved 11, 64
    saved 12, 72
    saved 13, 80
    saved 14, 88
    saved 15, 96
    saved 5, 104                   // rdi
    saved 4, 112                   // rsi
    saved 6, 120                   // rbp
    saved 3, 128                   // rbx
    saved 1, 136                   // rdx
    saved 0, 144                   // rax
    saved 2, 152                   // rcx
    saved 7, 160                   // rsp
    saved 16, 168                  // rip
    nop                            // unwinders look up pc-1
    .globl sonde_restorer
    .hidden sonde_restorer
    .type sonde_restorer, @function
sonde_restorer:
    mov $15, %rax                  // rt_sigreturn
    syscall
    .cfi_endproc
    .size sonde_restorer, . - sonde_restorer

// sonde_call_on_stack(handler, signal, info, context, top of the stack)
    .balign 16
    .globl sonde_call_on_stack
    .hidden sonde_call_on_stack
    .type sonde_call_on_stack, @function
sonde_call_on_stack:
    .cfi_startproc
    push %rbp
    .cfi_def_cfa_offset 16
    .cfi_offset %rbp, -16
    mov %rsp, %rbp
    .cfi_def_cfa_register %rbp
    mov %r8, %rsp
    and $-16, %rsp
    mov %rdi, %rax
    mov %esi, %edi
    mov %rdx, %rsi
    mov %rcx, %rdx
    call *%rax
    mov %rbp, %rsp
    pop %rbp
    .cfi_def_cfa %rsp, 8
    ret
    .cfi_endproc
    .size sonde_call_on_stack, . - sonde_call_on_stack

    .section .note.GNU-stack, "", @progbits
