// Functions that leave by a jump: their activations share one return slot (tails_test.cc).
    .text
    .macro hookable name
    .globl \name
    .type \name, @function
\name:
    .cfi_startproc
    .fill 5, 1, 0x90
    .endm
    .macro finish name
    .cfi_endproc
    .size \name, . - \name
    .endm

    hookable tail_third            // edi + 3
    lea 3(%rdi), %eax
    ret
    finish tail_third

    hookable tail_second
    add $20, %edi
    jmp tail_third
    finish tail_second

    hookable tail_first
    add $100, %edi
    jmp tail_second
    finish tail_first

    // eax = number of jumps: tail_even(n) and tail_odd(n) call each other n times in all, on one slot
    hookable tail_even
    mov $0, %eax
    test %edi, %edi
    je 1f
    dec %edi
    jmp tail_odd
1:  ret
    finish tail_even

    hookable tail_odd
    mov $1, %eax
    test %edi, %edi
    je 1f
    dec %edi
    jmp tail_even
1:  ret
    finish tail_odd

    // Calls the function in rsi with edi, then tail-calls tail_third: the leaf looks at the stack with the slot shared.
    hookable tail_looks
    jmp *%rsi
    finish tail_looks

    .section .note.GNU-stack, "", @progbits
