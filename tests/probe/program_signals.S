// System calls with every register and flag known before and after: call_plain, call_by_jump and call_by_trap are the same code,
// the instruction of the second and third is hooked. And functions whose first instructions fault or are displaced.
    .text
    .macro round name
    .globl \name
    .type \name, @function
\name:
    push %rbx
    push %rbp
    push %r12
    push %r13
    push %r14
    push %r15
    pushq call_before+8*15(%rip)
    popfq
    mov call_before(%rip), %rax
    mov call_before+8(%rip), %rbx
    mov call_before+16(%rip), %rcx
    mov call_before+24(%rip), %rdx
    mov call_before+32(%rip), %rsi
    mov call_before+40(%rip), %rdi
    mov call_before+48(%rip), %rbp
    mov call_before+56(%rip), %r8
    mov call_before+64(%rip), %r9
    mov call_before+72(%rip), %r10
    mov call_before+80(%rip), %r11
    mov call_before+88(%rip), %r12
    mov call_before+96(%rip), %r13
    mov call_before+104(%rip), %r14
    mov call_before+112(%rip), %r15
    movq $0x1234567, -8(%rsp)      // the red zone
    movq $0x7654321, -128(%rsp)
    .globl \name\()_site
\name\()_site:
    syscall
    nopl (%rax)
    mov %rax, call_after(%rip)
    mov %rbx, call_after+8(%rip)
    mov %rcx, call_after+16(%rip)
    mov %rdx, call_after+24(%rip)
    mov %rsi, call_after+32(%rip)
    mov %rdi, call_after+40(%rip)
    mov %rbp, call_after+48(%rip)
    mov %r8, call_after+56(%rip)
    mov %r9, call_after+64(%rip)
    mov %r10, call_after+72(%rip)
    mov %r11, call_after+80(%rip)
    mov %r12, call_after+88(%rip)
    mov %r13, call_after+96(%rip)
    mov %r14, call_after+104(%rip)
    mov %r15, call_after+112(%rip)
    mov -8(%rsp), %rcx
    mov %rcx, call_red_zone(%rip)
    mov -128(%rsp), %rcx
    mov %rcx, call_red_zone+8(%rip)
    pushfq
    popq call_after+8*15(%rip)
    cld
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbp
    pop %rbx
    ret
    .size \name, . - \name
    .endm

    round call_plain
    round call_by_jump
    round call_by_trap

    .globl stores_first            // movl $1,(%rdi) is its first instruction
    .type stores_first, @function
stores_first:
    .cfi_startproc
    movl $1, (%rdi)
    mov $7, %eax
    ret
    .cfi_endproc
    .size stores_first, . - stores_first

    .globl dies_third              // push, pop, ud2 displaced
    .type dies_third, @function
dies_third:
    .cfi_startproc
    push %rbx
    .cfi_adjust_cfa_offset 8
    .cfi_rel_offset %rbx, 0
    mov %edi, %ebx
    .globl dies_third_ud2
dies_third_ud2:
    ud2
    lea 1(%rbx), %eax
    pop %rbx
    .cfi_adjust_cfa_offset -8
    .cfi_restore %rbx
    ret
    .cfi_endproc
    .size dies_third, . - dies_third

    .globl counts_up               // all of its work is displaced
    .type counts_up, @function
counts_up:
    .cfi_startproc
    lea 1(%rdi), %rax
    imul $3, %rax, %rax
    xor %rdi, %rax
    ret
    .cfi_endproc
    .size counts_up, . - counts_up

    .bss
    .balign 8
    .globl call_before
call_before:
    .skip 8 * 16
    .globl call_after
call_after:
    .skip 8 * 16
    .globl call_red_zone
call_red_zone:
    .skip 16

    .section .note.GNU-stack, "", @progbits
