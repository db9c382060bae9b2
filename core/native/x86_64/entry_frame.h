// The frame of the entry trampoline, whose picture is in entry.S: its unwind rules, and the way back out of it. For assembly.
#pragma once

    // DW_CFA_val_expression rip: const1u 144 minus deref (return point) lit30 minus deref (patch address) plus_uconst 1
    .macro probed_function_called_us
    .cfi_escape 0x16, 16, 9, 0x08, 144, 0x1c, 0x06, 0x4e, 0x1c, 0x06, 0x23, 1
    .endm

    .macro saved_usual             // the rules when rdi has been pushed
    .cfi_def_cfa %rsp, 192
    probed_function_called_us
    .cfi_offset %rax, -152
    .cfi_offset %rcx, -168
    .cfi_offset %rdx, -176
    .cfi_offset %rsi, -184
    .cfi_offset %rdi, -192
    .endm

    .macro restore_usual
    pop %rdi
    .cfi_def_cfa_offset 184
    .cfi_same_value %rdi
    pop %rsi
    .cfi_def_cfa_offset 176
    .cfi_same_value %rsi
    pop %rdx
    .cfi_def_cfa_offset 168
    .cfi_same_value %rdx
    pop %rcx
    .cfi_def_cfa_offset 160
    .cfi_same_value %rcx
    pop %rax
    .cfi_def_cfa_offset 152
    add $127, %al                  // OF = (al was 1)
    sahf                           // SF ZF AF PF CF
    pop %rax
    .cfi_def_cfa_offset 144
    .cfi_same_value %rax
    .endm
