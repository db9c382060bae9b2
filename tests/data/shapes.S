# Functions of known shape for the golden dumps. What the unwind tables must say follows from the instructions by hand.
# link: -nostdlib -shared -Wl,--build-id=none -Wl,-Ttext=0x1000

    .text
    .type plain, @function
plain:                          # cfa = rsp+8 throughout, but for the push
    .cfi_startproc
    push %rbx
    .cfi_adjust_cfa_offset 8
    .cfi_offset %rbx, -16
    call framed
    pop %rbx
    .cfi_adjust_cfa_offset -8
    .cfi_restore %rbx
    ret
    .cfi_endproc
    .size plain, . - plain

    .type framed, @function
framed:                         # a frame pointer, two saved registers, two exits
    .cfi_startproc
    push %rbp
    .cfi_def_cfa_offset 16
    .cfi_offset %rbp, -16
    mov %rsp, %rbp
    .cfi_def_cfa_register %rbp
    push %r12
    .cfi_offset %r12, -24
    test %edi, %edi
    je 1f
    .cfi_remember_state
    pop %r12
    leave
    .cfi_def_cfa %rsp, 8
    ret
    .cfi_restore_state
1:  ud2
    .cfi_endproc
    .size framed, . - framed

    .type realigned, @function
realigned:                      # as gcc realigns: the frame address is kept in r10, then in memory
    .cfi_startproc
    lea 8(%rsp), %r10
    .cfi_def_cfa %r10, 0
    and $-32, %rsp
    push -8(%r10)
    push %rbp
    .cfi_escape 0x10, 6, 2, 0x76, 0      # rbp at *(rbp + 0)
    mov %rsp, %rbp
    push %r10
    .cfi_escape 0x0f, 3, 0x76, 0x78, 0x06  # cfa = *(rbp - 8)
    nop
    mov -8(%rbp), %r10
    .cfi_def_cfa %r10, 0
    leave
    lea -8(%r10), %rsp
    .cfi_def_cfa %rsp, 8
    ret
    .cfi_endproc
    .size realigned, . - realigned

    .type expression, @function
expression:                     # cfa = *(rsp + 40) + 8
    .cfi_startproc
    .cfi_escape 0x0f, 5, 0x77, 40, 0x06, 0x23, 8
    nop
    ret
    .cfi_endproc
    .size expression, . - expression

    .type signal_return, @function
signal_return:
    .cfi_startproc
    .cfi_signal_frame
    .cfi_undefined %rip
    mov $15, %eax
    syscall
    .cfi_endproc
    .size signal_return, . - signal_return

    .type uncovered, @function
uncovered:                      # nothing is known here
    nop
    ret
    .size uncovered, . - uncovered

    .type split, @function
split:                          # covered again behind the gap
    .cfi_startproc
    ret
    .cfi_endproc
    .size split, . - split

    .section .note.GNU-stack, "", @progbits
