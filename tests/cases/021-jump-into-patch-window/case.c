// branch targets 1..4 bytes after a function's entry: loops that come back into the prologue, other functions jumping in,
// a jump table pointing there, and a computed goto
#include <stdio.h>
#if !defined(__x86_64__)
#error x86-64 only
#endif
__asm__(".text\n"
".globl loop3\n.type loop3,@function\nloop3:\n xor %eax,%eax\n1: inc %eax\n dec %edi\n jnz 1b\n ret\n.size loop3,.-loop3\n"              // target entry+2
".globl loop1\n.type loop1,@function\nloop1:\n push %rdi\n2: add $3,%esi\n dec %edi\n jnz 2b\n mov %esi,%eax\n pop %rdi\n ret\n.size loop1,.-loop1\n"   // entry+1
".globl mid\n.type mid,@function\nmid:\n mov %edi,%eax\nmid_in: add %eax,%eax\n add $1,%eax\n ret\n.size mid,.-mid\n"                      // entry+2 ...
".globl outsider\n.type outsider,@function\noutsider:\n mov $100,%eax\n jmp mid_in\n.size outsider,.-outsider\n"                        // ... reached from another function
".globl tab\n.type tab,@function\ntab:\n nop\n3: nop\n4: nop\n5: lea (%rdi,%rsi),%eax\n ret\n.size tab,.-tab\n"
".globl viatab\n.type viatab,@function\nviatab:\n lea jt(%rip),%rcx\n movslq %edi,%rdx\n movslq (%rcx,%rdx,4),%rdx\n add %rcx,%rdx\n jmp *%rdx\n.size viatab,.-viatab\n"
".section .rodata\n.balign 4\njt: .long tab-jt, 3b-jt, 4b-jt, 5b-jt\n.text\n"
".globl rec\n.type rec,@function\nrec:\n test %edi,%edi\n jz 6f\n dec %edi\n call rec\n inc %eax\n ret\n6: xor %eax,%eax\n ret\n.size rec,.-rec\n");
int loop3(int, int), loop1(int, int), mid(int, int), outsider(int, int), viatab(int, int), rec(int);
int main(void) {
  long s = 0;
  for (int i = 1; i < 3000; i++) s += loop3(i % 50 + 1, 0) + loop1(i % 9 + 1, i) + mid(i, 0) + outsider(0, 0) + viatab(i & 3, i) + rec(i % 20);
  printf("%ld\nok\n", s);
}
