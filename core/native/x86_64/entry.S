// Entry trampoline (x86-64): detours call it with the site's number, it saves what the hit path may touch.
//
// On entry (core/isa/x86_64_detour.h; S = sp at the site, for a function entry the address of the return slot):
//
//   S-128   the program's red zone ends
//   S-136   site number
//   S-144   return point in the detour            <- sp
//   S-152   rax
//   S-160   flags: lahf + seto in ah, al
//   S-168   rcx, rdx, rsi, rdi, r8, r9, r10, r11 (at S-224)
//
// EntryFrame in core/probe/hit.h is this picture in C++. rbx, rbp, r12-r15 are preserved by the hit path itself; vector,
// x87 and MXCSR state and the direction flag by how the agent is compiled (see trampolines.S). For the same reason the
// stack needs no alignment: nothing in the agent relies on more than the 8 bytes that every stack has.
//
// For every unwinder the caller of this frame is the probed function, stopped at its first patched byte: CFA = S, and the
// return address is the patch address plus one (unwinders look up pc-1), read from the detour's header: *(return point - 24) + 1.

    .text
    .balign 64
    .globl sonde_entry
    .hidden sonde_entry
    .type sonde_entry, @function
sonde_entry:
    .cfi_startproc simple
    .cfi_def_cfa %rsp, 144
    // DW_CFA_val_expression rip: const1u 144 minus deref (return point) lit24 minus deref (patch address) plus_uconst 1
    .cfi_escape 0x16, 16, 9, 0x08, 144, 0x1c, 0x06, 0x48, 0x1c, 0x06, 0x23, 1
    push %rax
    .cfi_def_cfa_offset 152
    .cfi_offset %rax, -152
    lahf
    seto %al
    push %rax
    .cfi_def_cfa_offset 160
    push %rcx
    .cfi_def_cfa_offset 168
    .cfi_offset %rcx, -168
    push %rdx
    .cfi_def_cfa_offset 176
    .cfi_offset %rdx, -176
    push %rsi
    .cfi_def_cfa_offset 184
    .cfi_offset %rsi, -184
    push %rdi
    .cfi_def_cfa_offset 192
    .cfi_offset %rdi, -192
    push %r8
    .cfi_def_cfa_offset 200
    .cfi_offset %r8, -200
    push %r9
    .cfi_def_cfa_offset 208
    .cfi_offset %r9, -208
    push %r10
    .cfi_def_cfa_offset 216
    .cfi_offset %r10, -216
    push %r11
    .cfi_def_cfa_offset 224
    .cfi_offset %r11, -224
    mov %rsp, %rdi                 // sonde_on_entry(frame, rbp, rbx, r12, r13, r14, r15): for a walk from the site
    push %r15                      // the seventh argument's place
    .cfi_def_cfa_offset 232
    mov %rbp, %rsi
    mov %rbx, %rdx
    mov %r12, %rcx
    mov %r13, %r8
    mov %r14, %r9
    call sonde_on_entry
    lea 8(%rsp), %rsp
    .cfi_def_cfa_offset 224
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
    ret                            // pairs with the detour's call
    .cfi_endproc
    .size sonde_entry, . - sonde_entry

// A hit on _Unwind_Backtrace returns here instead of to the detour (core/probe/backtrace.h): sp = S - 136, where the
// site's number was stands the address of the displaced instructions. rdi and rsi are the program's arguments; rdx is
// free at the entry of a function of two.
    .balign 16
    .globl sonde_backtrace_stub
    .hidden sonde_backtrace_stub
    .type sonde_backtrace_stub, @function
sonde_backtrace_stub:
    .cfi_startproc
    .cfi_def_cfa_offset 144
    mov (%rsp), %rdx
    lea 136(%rsp), %rsp
    .cfi_def_cfa_offset 8
    jmp sonde_backtrace
    .cfi_endproc
    .size sonde_backtrace_stub, . - sonde_backtrace_stub

    .section .note.GNU-stack, "", @progbits
