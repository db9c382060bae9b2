// Loads a whole register state, calls a hooked function, and stores what arrives on both ways (state_test.cc).
//
// State, offsets in bytes: 0 rax rbx rcx rdx rsi rdi rbp r8-r15 (15 words), 120 flags, 192 xsave area (4096 bytes)
    .equ FLAGS, 120
    .equ XSAVE, 192
    .equ RED_ZONE, 128

    .bss
    .balign 64
    .macro buffer name, size
    .globl \name
    .balign 64
\name: .skip \size
    .endm
    buffer state_before, 192 + 4096        // set by the caller before the call
    buffer state_at_entry, 192 + 4096      // as the hooked function finds it
    buffer state_at_exit, 192 + 4096       // set by the hooked function before it returns
    buffer state_after, 192 + 4096         // as the caller finds it after the call
    buffer red_zone_before, 128
    buffer red_zone_at_entry, 128
    buffer state_sp_shift, 8
    buffer state_mask, 8
    buffer state_kept_sp, 8
    buffer state_sp_before, 8
    buffer state_sp_at_entry, 8
    buffer state_sp_after, 8

    .text
    .macro load_state from
    mov state_mask(%rip), %eax
    xor %edx, %edx
    xrstor64 \from+XSAVE(%rip)
    push \from+FLAGS(%rip)
    popfq
    mov \from+0(%rip), %rax
    mov \from+8(%rip), %rbx
    mov \from+16(%rip), %rcx
    mov \from+24(%rip), %rdx
    mov \from+32(%rip), %rsi
    mov \from+40(%rip), %rdi
    mov \from+48(%rip), %rbp
    mov \from+56(%rip), %r8
    mov \from+64(%rip), %r9
    mov \from+72(%rip), %r10
    mov \from+80(%rip), %r11
    mov \from+88(%rip), %r12
    mov \from+96(%rip), %r13
    mov \from+104(%rip), %r14
    mov \from+112(%rip), %r15
    .endm

    .macro store_general to
    mov %rax, \to+0(%rip)
    mov %rbx, \to+8(%rip)
    mov %rcx, \to+16(%rip)
    mov %rdx, \to+24(%rip)
    mov %rsi, \to+32(%rip)
    mov %rdi, \to+40(%rip)
    mov %rbp, \to+48(%rip)
    mov %r8, \to+56(%rip)
    mov %r9, \to+64(%rip)
    mov %r10, \to+72(%rip)
    mov %r11, \to+80(%rip)
    mov %r12, \to+88(%rip)
    mov %r13, \to+96(%rip)
    mov %r14, \to+104(%rip)
    mov %r15, \to+112(%rip)
    .endm

    .macro store_rest to
    pushfq
    pop \to+FLAGS(%rip)
    cld
    mov state_mask(%rip), %eax
    xor %edx, %edx
    xsave64 \to+XSAVE(%rip)
    .endm

    // Copies the 128 bytes below rsp, general registers being free.
    .macro copy_red_zone to
    .set offset, 0
    .rept 16
    mov -128+offset(%rsp), %rax
    mov %rax, \to+offset(%rip)
    .set offset, offset+8
    .endr
    .endm

    .globl state_hooked
    .type state_hooked, @function
state_hooked:
    .cfi_startproc
    .fill 5, 1, 0x90
    mov %rsp, state_sp_at_entry(%rip)
    store_general state_at_entry
    copy_red_zone red_zone_at_entry
    store_rest state_at_entry
    load_state state_at_exit
    ret
    .cfi_endproc
    .size state_hooked, . - state_hooked

    .globl state_round
    .type state_round, @function
state_round:
    .cfi_startproc
    push %rbp
    .cfi_def_cfa_offset 16
    .cfi_offset %rbp, -16
    mov %rsp, %rbp
    .cfi_def_cfa_register %rbp
    push %rbx
    push %r12
    push %r13
    push %r14
    push %r15
    sub $8, %rsp
    mov %rsp, state_kept_sp(%rip)
    sub state_sp_shift(%rip), %rsp
    mov %rsp, state_sp_before(%rip)
    .set offset, 0
    .rept 16                                       // as seen from the function's sp
    mov red_zone_before+offset(%rip), %rax
    mov %rax, -136+offset(%rsp)
    .set offset, offset+8
    .endr
    sub $256, %rsp                                 // popfq's push must not hit it
    load_state state_before
    lea 256(%rsp), %rsp
    call state_hooked
    mov %rsp, state_sp_after(%rip)
    store_general state_after
    mov state_kept_sp(%rip), %rsp
    store_rest state_after
    add $8, %rsp
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbx
    pop %rbp
    .cfi_def_cfa %rsp, 8
    ret
    .cfi_endproc
    .size state_round, . - state_round

    .section .note.GNU-stack, "", @progbits
