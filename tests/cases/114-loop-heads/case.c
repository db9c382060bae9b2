// loops whose head is the function's entry, and jumps to entries that are calls all the same
#include <stdio.h>
#if !defined(__x86_64__)
#error x86-64 only
#endif
__asm__(".text\n"
".globl spin\n.type spin,@function\n.balign 16\nspin: add $7,%esi\n dec %edi\n jnz spin\n mov %esi,%eax\n ret\n.size spin,.-spin\n"
".globl padded\n.type padded,@function\n.balign 16\npadded: endbr64\n1: add $5,%esi\n dec %edi\n jnz 1b\n mov %esi,%eax\n ret\n.size padded,.-padded\n"
".globl tight\n.type tight,@function\n.balign 16\ntight: dec %edi\n jnz tight\n mov %esi,%eax\n ret\n.size tight,.-tight\n"
// every round also calls itself, with one less
".globl rounds\n.type rounds,@function\n.balign 16\nrounds: test %edi,%edi\n jz 2f\n dec %edi\n push %rdi\n call rounds_once\n pop %rdi\n jmp rounds\n2: mov %esi,%eax\n ret\n.size rounds,.-rounds\n"
".globl rounds_once\n.type rounds_once,@function\n.balign 16\nrounds_once: xor %edi,%edi\n inc %esi\n call rounds\n ret\n.size rounds_once,.-rounds_once\n"
// ping and pong jump to each other's entries until edi is 0
".globl ping\n.type ping,@function\n.balign 16\nping: add $1,%esi\n dec %edi\n jnz pong\n mov %esi,%eax\n ret\n.size ping,.-ping\n"
".globl pong\n.type pong,@function\n.balign 16\npong: add $2,%esi\n dec %edi\n jnz ping\n mov %esi,%eax\n ret\n.size pong,.-pong\n");
int spin(int, int), padded(int, int), tight(int, int), rounds(int, int), ping(int, int);
int main(void) {
  long s = 0;
  for (int i = 1; i <= 500; i++)
    s += spin(i % 9 + 1, i) + padded(i % 7 + 1, i) + tight(i % 5 + 1, i) + rounds(i % 4, i) + ping(6, i);
  printf("%ld\nok\n", s);
}
