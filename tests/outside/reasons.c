// Makes the stack that is not reliable for one reason: `reasons REASON [wait]`. Each ends in shown(), which waits there or ends
// the program: nothing could return along these stacks. reasons.py says what must be seen of each.
#define _GNU_SOURCE
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "sonde/special.h"

#define NOINLINE __attribute__((noinline, noclone, used))

static int waits;
NOINLINE void shown(void) {
  while (waits) pause();
  _exit(0);
}

// A function whose frame is found by a register, as its table says truly. The record there is {that register, return
// address}. by_rbx(sp, rbx), by_rbp(sp, rbp); by_rbx_in_signal is the same and is interrupted in place of calling.
#define BY_REGISTER(name, reg, insn)                                                                                       \
  __asm__(".text\n.globl " #name "\n.type " #name ",@function\n" #name ":\n.cfi_startproc\n mov %rdi,%rsp\n mov %rsi,%" #reg \
          "\n.cfi_def_cfa %" #reg ",16\n.cfi_offset %" #reg ",-16\n " insn "\n.globl behind_" #name "\nbehind_" #name        \
          ": hlt\n.cfi_endproc\n.size " #name ",.-" #name "\n");
BY_REGISTER(by_rbx, rbx, "call shown")
BY_REGISTER(by_rbp, rbp, "call shown")
BY_REGISTER(by_rbx_in_signal, rbx, "ud2")
void by_rbx(void *sp, void *rbx), by_rbp(void *sp, void *rbp), by_rbx_in_signal(void *sp, void *rbx);

// declared: known by the program's own word. without_row: no table at all, calling or interrupted. pushed: a return address that
// no call has pushed. copied: its own return address, or the trampoline in its place, once more further down. undescribed: its
// table leaves out a push.
__asm__(
    ".text\n"
    ".globl declared\n.type declared,@function\ndeclared:\n.cfi_startproc\n sub $8,%rsp\n.cfi_def_cfa_offset 16\n call shown\n"
    " hlt\n.cfi_endproc\n.size declared,.-declared\ndeclared_end:\n"
    ".globl without_row\n.type without_row,@function\nwithout_row: sub $8,%rsp\n call shown\n hlt\n.size without_row,.-without_row\n"
    " nop\n nop\n"
    ".globl interrupted_without_row\n.type interrupted_without_row,@function\ninterrupted_without_row: sub $8,%rsp\n ud2\n hlt\n"
    ".size interrupted_without_row,.-interrupted_without_row\n nop\n nop\n"
    ".globl pushed\n.type pushed,@function\npushed:\n.cfi_startproc\n lea behind_push(%rip),%rax\n push %rax\n"
    ".cfi_adjust_cfa_offset 8\n jmp shown\n nop\n nop\n nop\n nop\n nop\n nop\n nop\n nop\nbehind_push: hlt\n.cfi_endproc\n"
    ".size pushed,.-pushed\n"
    ".globl copied\n.type copied,@function\ncopied:\n.cfi_startproc\n mov %rsp,%rdi\n sub $24,%rsp\n.cfi_def_cfa_offset 32\n"
    " call word_at\n push %rax\n.cfi_def_cfa_offset 40\n jmp shown\n.cfi_endproc\n.size copied,.-copied\n"
    ".globl undescribed\n.type undescribed,@function\nundescribed:\n.cfi_startproc\n push %rbx\n call shown\n pop %rbx\n ret\n"
    ".cfi_endproc\n.size undescribed,.-undescribed\n");
void declared(void), without_row(void), interrupted_without_row(void), pushed(void), copied(void), undescribed(void);
SONDE_SPECIAL(declared, declared_end, SONDE_SPECIAL_UNRELIABLE)

NOINLINE uint64_t word_at(const uint64_t *at) { return *at; }

static char alternate[1 << 16] __attribute__((aligned(4096)));
NOINLINE void handler(int n) {
  (void)n;
  shown();
  __asm__ volatile("");
}
static void handle(int number) {
  stack_t stack = {.ss_sp = alternate, .ss_size = sizeof alternate};
  struct sigaction action = {.sa_handler = handler, .sa_flags = SA_ONSTACK};
  sigaltstack(&stack, 0);
  sigaction(number, &action, 0);
}

enum { kMiddle = (1 << 15) / 8 };  // of what pages() gives
static uint64_t *pages(void) { return mmap(0, 1 << 16, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0); }

NOINLINE int deep(int n) {
  if (n == 0) shown();
  return deep(n - 1) + 1;
}

NOINLINE void generated(void) {
  // sub $8,%rsp; mov $shown,%rax; call *%rax; hlt
  unsigned char code[] = {0x48, 0x83, 0xec, 8, 0x48, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xd0, 0xf4};
  void *target = (void *)shown, *at = mmap(0, 4096, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  memcpy(code + 6, &target, 8);
  memcpy(at, code, sizeof code);
  ((void (*)(void))at)();
  __asm__ volatile("");
}

NOINLINE void through_null(void) {
  void (*volatile none)(void) = 0;
  handle(SIGSEGV);
  none();
  __asm__ volatile("");
}

static int is(const char *a, const char *b) { return !strcmp(a, b); }

NOINLINE int make(const char *reason) {
  if (is(reason, "reliable") || is(reason, "end")) shown();
  if (is(reason, "unknown-code")) generated();
  if (is(reason, "special-code")) declared();
  if (is(reason, "boundary-next")) handle(SIGILL), interrupted_without_row();
  if (is(reason, "no-table-row")) without_row();
  if (is(reason, "fp-mismatch")) by_rbp(pages() + kMiddle, (void *)0x1234567);
  if (is(reason, "ra-not-after-call")) pushed();
  if (is(reason, "recovery-failed")) copied();
  if (is(reason, "stack-out-of-range")) {  // the record straddles the end of the stack
    uint64_t *end = pages() + (1 << 16) / 8;
    mprotect((char *)end - 4096, 4096, PROT_NONE);
    by_rbx(end - 600, (char *)end - 4096 - 8);
  }
  if (is(reason, "non-progress")) {  // the frame would end below where it begins
    uint64_t *stack = pages() + kMiddle;
    by_rbx(stack, stack - 3);
  }
  if (is(reason, "foreign-stack")) {  // interrupted at a frame that lies on the handler's stack
    handle(SIGILL);
    by_rbx_in_signal(__builtin_frame_address(0) - 4096, alternate + sizeof alternate - 64);
  }
  if (is(reason, "depth-limit") || is(reason, "buffer-full")) deep(200000);
  if (is(reason, "null-pc")) through_null();
  if (is(reason, "row-refuted")) undescribed();
  fprintf(stderr, "no stack for %s\n", reason);
  return 1;
}

int main(int argc, char **argv) {
  waits = argc > 2;
  return argc > 1 ? make(argv[1]) : 2;
}
