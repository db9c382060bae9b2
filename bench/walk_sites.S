// Code for the bench of walkers: 16,000 functions with one call site each, twice, once with frame pointers and once
// without. A function calls what the array in rdi says, and hands on the rest of the array; so any sequence of them is a
// stack. Frames have sizes of eight kinds, and every second function saves a register.
//
//   bench_sites_fp, bench_sites_bare: 16,000 times {function, return address of its call}
        .set    SITES, 16000

        .macro  one_bare
        .balign 16
        .cfi_startproc
1:
        .if     n & 1
        push    %rbx
        .cfi_adjust_cfa_offset 8
        .cfi_offset rbx, -16
        .endif
        sub     $(8 * (n & 1) + 16 * (n / 2 % 8) + 8), %rsp
        .cfi_adjust_cfa_offset 8 * (n & 1) + 16 * (n / 2 % 8) + 8
        mov     (%rdi), %rax
        add     $8, %rdi
        call    *%rax
2:      add     $(8 * (n & 1) + 16 * (n / 2 % 8) + 8), %rsp
        .cfi_adjust_cfa_offset -(8 * (n & 1) + 16 * (n / 2 % 8) + 8)
        .if     n & 1
        pop     %rbx
        .cfi_adjust_cfa_offset -8
        .cfi_restore rbx
        .endif
        ret
        .cfi_endproc
        .pushsection .data.rel.ro.bench_bare, "aw"
        .quad   1b, 2b
        .popsection
        .endm

        .macro  one_fp
        .balign 16
        .cfi_startproc
1:      push    %rbp
        .cfi_def_cfa_offset 16
        .cfi_offset rbp, -16
        mov     %rsp, %rbp
        .cfi_def_cfa_register rbp
        .if     n & 1
        push    %rbx
        .cfi_offset rbx, -24
        .endif
        sub     $(8 * (n & 1) + 16 * (n / 2 % 8)), %rsp
        mov     (%rdi), %rax
        add     $8, %rdi
        call    *%rax
2:
        .if     n & 1
        mov     -8(%rbp), %rbx
        .endif
        leave
        .cfi_def_cfa rsp, 8
        ret
        .cfi_endproc
        .pushsection .data.rel.ro.bench_fp, "aw"
        .quad   1b, 2b
        .popsection
        .endm

        .pushsection .data.rel.ro.bench_bare, "aw"
        .balign 8
        .globl  bench_sites_bare
        .hidden bench_sites_bare
bench_sites_bare:
        .popsection
        .pushsection .data.rel.ro.bench_fp, "aw"
        .balign 8
        .globl  bench_sites_fp
        .hidden bench_sites_fp
bench_sites_fp:
        .popsection

        .text
        .balign 16
        .set    n, 0
        .rept   SITES
        one_bare
        .set    n, n + 1
        .endr
        .set    n, 0
        .rept   SITES
        one_fp
        .set    n, n + 1
        .endr

// unsigned bench_enter(const uint64_t* path): calls path[0] with rdi behind it, as the functions above do.
        .globl  bench_enter
        .hidden bench_enter
        .type   bench_enter, @function
bench_enter:
        .cfi_startproc
        push    %rbp
        .cfi_def_cfa_offset 16
        .cfi_offset rbp, -16
        mov     %rsp, %rbp
        .cfi_def_cfa_register rbp
        mov     (%rdi), %rax
        add     $8, %rdi
        call    *%rax
        leave
        .cfi_def_cfa rsp, 8
        ret
        .cfi_endproc
        .size   bench_enter, . - bench_enter
        .section .note.GNU-stack, "", @progbits
