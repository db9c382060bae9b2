// The least that a timed entry and return can cost: two time stamps, the return address replaced, one indirect jump
// back. Nothing is recorded, no register that the C code keeps over a call is touched.
    .text
    .globl floor_work
    .type floor_work, @function
floor_work:
    rdtsc
    shl $32, %rdx
    or %rdx, %rax
    mov %rax, %fs:floor_entry@tpoff
    mov (%rsp), %rax
    mov %rax, %fs:floor_real@tpoff
    lea floor_return(%rip), %rax
    mov %rax, (%rsp)
    jmp work
    .size floor_work, .-floor_work

floor_return:
    mov %rax, %rcx
    rdtsc
    shl $32, %rdx
    or %rdx, %rax
    mov %rax, %fs:floor_exit@tpoff
    mov %rcx, %rax
    jmp *%fs:floor_real@tpoff

    .section .tbss, "awT", @nobits
    .balign 8
floor_entry: .zero 8
floor_exit: .zero 8
floor_real: .zero 8
    .section .note.GNU-stack, "", @progbits
