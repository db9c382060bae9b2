# Programs that a recorder could easily change, each of which once was.
load common
bats_require_minimum_version 1.5.0

@test "a vfork child that exits does not count its parent's calls again" {
  cat >parent.c <<'C'
#include <sys/wait.h>
#include <unistd.h>
__attribute__((noinline)) int inner(void) { pid_t p = vfork(); if (p == 0) _exit(3); int s; waitpid(p, &s, 0); return s; }
int main(void) { int r = inner(); __asm__ volatile(""); return r >> 8; }
C
  gcc -O1 parent.c -o parent
  same_as_untraced -- ./parent
  [ "$(calls_of main)" -eq 1 ]
  [ "$(calls_of inner)" -eq 1 ]
}

@test "a program that forbids itself the agent's system calls lives, with a stack per hit" {
  cat >sandbox.c <<'C'
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>
#define ALLOW(nr) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, nr, 0, 1), BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)
static struct sock_filter code[] = {
  BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
  ALLOW(SYS_write), ALLOW(SYS_exit_group), BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS)};
__attribute__((noinline)) int big(int n) { volatile char pad[70000]; pad[0] = (char)n; return n ? big(n - 1) + pad[0] : 0; }
int main(int argc, char **argv) {
  struct sock_fprog program = {sizeof code / sizeof code[0], code};
  prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
  if (argc > 1 ? syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program) : prctl(PR_SET_SECCOMP, 2, &program)) return 9;
  int r = big(5);
  write(1, "alive\n", 6);
  return r;
}
C
  gcc -O1 sandbox.c -o sandbox
  same_as_untraced -s -- ./sandbox
  grep -q alive traced.out
  same_as_untraced -s -- ./sandbox by-syscall
  [ "$(calls_of big)" -eq 6 ]
}

@test "a stack of 64 KiB is enough" {
  status=0
  (ulimit -s 64 && "$SONDE" record -q -o trace -- sh -c 'exit 6') || status=$?
  [ "$status" -eq 6 ]
}

@test "code that the loader changes is left alone" {
  cat >app.c <<'CODE'
#include <stdio.h>
int value = 5;
__asm__(".globl moved\n.type moved,@function\nmoved: movabs $value,%rax\n mov (%rax),%eax\n ret\n.size moved,.-moved\n");
int moved(void);
__attribute__((noinline)) int other(void) { return moved() + 1; }
int main(void) { return printf("%d\n", other()) != 2; }
CODE
  gcc -O1 -w -Wl,-z,notext -o app app.c
  same_as_untraced -- ./app
  [ "$(calls_of other)" -eq 1 ]
  "$SONDE" report trace | grep -q 'refused: 1 the code in memory differs from the file'
}

@test "a jump off a small alternate stack, with every function of every image probed" {
  gcc -O1 -pthread -Wl,-z,now -fno-optimize-sibling-calls \
    "$BATS_TEST_DIRNAME/../cases/115-jump-off-a-small-alternate-stack/case.c" -o jumps
  same_as_untraced -f '*:*' -- ./jumps 200 jump
  same_as_untraced -f '*:*' -- ./jumps 200 return
  same_as_untraced -s -f '*:*' -- ./jumps 200 jump
  same_as_untraced -s -f '*:*' -- ./jumps 200 return
  same_as_untraced --sum -f '*:*' -- ./jumps 200 jump
}

@test "a stack per hit does not overflow a small alternate stack" {
  gcc -O1 -pthread "$BATS_TEST_DIRNAME/../cases/113-small-alternate-stack/case.c" -o small
  same_as_untraced -s -- ./small
  grep -q '0 wrong' traced.out
  ! grep -q '[1-9][0-9]* wrong' traced.out
}

@test "a landing pad in the first bytes of a cold part is reached when an exception ends in noexcept" {
  cat >app.cc <<'CODE'
#include <exception>
#include <stdexcept>
#include <unistd.h>
[[gnu::noinline]] void inner() noexcept { throw std::runtime_error("not caught"); }
int main() {
  std::set_terminate([] { _exit(7); });
  inner();
}
CODE
  g++ -O1 -w -o app app.cc
  for pattern in 'libstdc++.so.6:*' '*:*'; do same_as_untraced -f "$pattern" -- ./app; done
}

# A function whose landing pad is its second instruction, and one whose exception table is not to be read.
landing_pads() {
  cat >pads.s <<'CODE'
 .text
 .globl catches
 .type catches,@function
catches: .cfi_startproc
 .cfi_personality 0x9b,DW.ref.__gxx_personality_v0
 .cfi_lsda 0x1b,.Larea
 xor %eax,%eax
.Lpad: mov %rax,%rdi
 test %rdi,%rdi
 jne .Lcaught
 sub $8,%rsp
 .cfi_def_cfa_offset 16
.Lbegin: call thrower
.Lend:
.Lcaught: call __cxa_begin_catch
 call __cxa_end_catch
 mov $42,%eax
 add $8,%rsp
 .cfi_def_cfa_offset 8
 ret
 .cfi_endproc
 .size catches,.-catches
 .globl unknown
 .type unknown,@function
unknown: .cfi_startproc
 .cfi_personality 0x9b,DW.ref.__gxx_personality_v0
 .cfi_lsda 0x1b,.Lgarbled
 xor %eax,%eax
 mov %rdi,%rax
 add $1,%rax
 ret
 .cfi_endproc
 .size unknown,.-unknown
 .section .gcc_except_table,"a",@progbits
.Larea: .byte 0xff, 0x9b
 .uleb128 .Ltypes-.Ltypes_from
.Ltypes_from: .byte 1
 .uleb128 .Lsites_end-.Lsites
.Lsites: .uleb128 .Lbegin-catches, .Lend-.Lbegin, .Lpad-catches, 1
.Lsites_end: .byte 1, 0
 .balign 4
 .long 0
.Ltypes:
.Lgarbled: .byte 0xff, 0xff, 1, 0xff, 0xff, 0xff, 0x7f
 .section .data.rel.local.DW.ref.__gxx_personality_v0,"awG",@progbits,DW.ref.__gxx_personality_v0,comdat
 .hidden DW.ref.__gxx_personality_v0
 .weak DW.ref.__gxx_personality_v0
 .balign 8
DW.ref.__gxx_personality_v0: .quad __gxx_personality_v0
 .section .note.GNU-stack,"",@progbits
CODE
  cat >pads.cc <<'CODE'
#include <cstdio>
extern "C" int catches();
extern "C" long unknown(long);
extern "C" void thrower() { throw 7; }
int main() {
  for (int i = 0; i < 3; i++) std::printf("%d %ld\n", catches(), unknown(i));
}
CODE
  g++ -O1 pads.cc pads.s -o pads "$@"
}

@test "a landing pad in a function's first bytes is reached by an exception" {
  for how in -pie -no-pie; do
    landing_pads $how
    [ "$(./pads)" = $'42 1\n42 2\n42 3' ]
    same_as_untraced --no-trap -- ./pads
    same_as_untraced -- ./pads
    [ "$(calls_of catches)" -eq 3 ]
    [ "$(calls_of unknown)" -eq 3 ]
  done
}

# _Unwind_GetIP compiled otherwise: mov 0x98(%rdi),%rax; ret; nopl becomes lea 0x98(%rdi),%rax; mov (%rax),%rax; ret; nop.
in_other_words() {
  python3 - "$1" <<'PY'
import sys
code = open(sys.argv[1], "rb").read()
usual = bytes.fromhex("488b8798000000c30f1f4000")
assert usual in code
open(sys.argv[1], "wb").write(code.replace(usual, bytes.fromhex("488d8798000000488b00c390")))
PY
}

# Some calls of ./trace ended by an exception.
unwound() {
  "$SONDE" report --stats --json trace | python3 -c '
import json, sys
assert sum(f["unwound"] for f in json.load(sys.stdin)["functions"]) > 0'
}

@test "an exception of an unwinder that nobody can find passes probed functions of other images" {
  cat >thrower.cc <<'CODE'
#include <cstdio>
#include <cstdlib>
#include <dlfcn.h>
extern "C" int compare(const void *, const void *) { throw 77; }
extern "C" int throws(void) {
  int values[] = {5, 3, 1};
  try {
    qsort(values, 3, 4, compare);
  } catch (int x) {
    return printf("caught %d\n", x);
  }
  return 0;
}
CODE
  echo 'extern "C" int throws(void); int main() { throws(); }' >throws.cc
  own='-static-libgcc -static-libstdc++ -s'
  g++ -O2 -w $own -o throws thrower.cc throws.cc
  same_as_untraced -f '*:*' -- ./throws
  unwound # its unwinder is found by its code
  in_other_words throws
  same_as_untraced -f '*:*' -- ./throws
  "$SONDE" report trace | grep -q 'program with an unwinder that nobody can find'
  # The unwinder alone: who reads the tables is in the shared libstdc++.
  cat >cleans.cc <<'CODE'
#include <cstdio>
struct Cleanup {
  ~Cleanup() { puts("cleanup"); }
};
__attribute__((noinline)) void throws(int n) {
  Cleanup here;
  if (n == 0) throw 5;
  throws(n - 1);
}
int main() {
  try {
    throws(3);
  } catch (int x) {
    return printf("caught %d\n", x) != 9;
  }
  return 1;
}
CODE
  g++ -O1 -static-libgcc -s -o cleans cleans.cc
  same_as_untraced -f '*:*' -- ./cleans
  unwound
  in_other_words cleans
  same_as_untraced -f '*:*' -- ./cleans
  "$SONDE" report trace | grep -q 'program with an unwinder that nobody can find'
  # Loaded when functions of others are hooked already.
  g++ -O2 -w $own -shared -fPIC -o libthrower.so thrower.cc
  in_other_words libthrower.so
  cat >loads.c <<'CODE'
#include <dlfcn.h>
#include <stdlib.h>
static int less(const void *a, const void *b) { return *(const char *)a - *(const char *)b; }
int main(void) {
  char text[] = "hooked";
  qsort(text, 6, 1, less);
  void *library = dlopen("./libthrower.so", RTLD_NOW);
  return ((int (*)(void))dlsym(library, "throws"))() != 10;
}
CODE
  gcc -O2 -o loads loads.c
  same_as_untraced -f '*:*' -- ./loads
  [ "$(calls_of qsort)" -ge 2 ]
}

@test "a function whose exception table cannot be read gets a trap or is refused, with the reason" {
  landing_pads
  "$SONDE" list ./pads | grep -q ' trap *unknown'
  "$SONDE" record -q --no-trap -o trace -- ./pads >/dev/null
  "$SONDE" report trace | grep -q 'refused: 1 its exception table cannot be read'
}

@test "a stack per hit does not overflow a coroutine's small stack: it is left out, and counted where nothing of it is recorded" {
  gcc -O1 "$BATS_TEST_DIRNAME/../cases/116-small-coroutine-stacks/case.c" -o coroutine
  for bytes in 512 1024 2048; do
    same_as_untraced -s -f leaf -- ./coroutine $bytes
    [ "$(calls_of leaf)" -eq 3 ]
    stacks=$("$SONDE" report trace --json | python3 -c 'import json,sys; f=json.load(sys.stdin)["footer"]; print(f["stacks"] + sum(f["lost"].values()))')
    [ "$stacks" -eq 3 ]
  done
  same_as_untraced -s -f leaf -- ./coroutine 16384
  "$SONDE" report trace --json | python3 -c '
import json, sys
footer = json.load(sys.stdin)["footer"]
assert footer["stacks"] == 3 and not footer["lost"] and footer["unreliable_stacks"] == 0, footer'
}

@test "a runtime whose stacks have no room, as Go's: no walks there, and sums are refused" {
  cat >like_go.c <<'C'
__attribute__((section(".gopclntab"))) const char table[16] = "go";
__attribute__((noinline)) int leaf(int x) { return x + 1; }
int main(int argc, char **argv) { return leaf(argc) + leaf(2) != 5; }
C
  gcc -O1 -o like_go like_go.c
  same_as_untraced -s -f leaf -- ./like_go
  [ "$("$SONDE" report trace --json | python3 -c 'import json,sys; f=json.load(sys.stdin)["footer"]; print(f["calls"], f["stacks"])')" = '2 0' ]
  "$SONDE" report trace | grep -q 'like_go are recorded without stacks: theirs have no room for a walk'
  same_as_untraced --sum -f leaf -- ./like_go
  "$SONDE" report trace | grep -q 'functions refused: 1 its stacks have no room for sums'
}

@test "a program that has the processor refuse unaligned accesses: the agent's own are not its faults" {
  cat >aligned.c <<'C'
__attribute__((noinline)) long leaf(long x) { return x * 3 + 1; }
__attribute__((noinline)) long checked(long x) {
  long r;
  __asm__ volatile("pushfq; orl $0x40000, (%rsp); popfq");
  r = leaf(x) + leaf(x + 1);
  unsigned long flags;
  __asm__ volatile("pushfq; popq %0" : "=r"(flags));
  __asm__ volatile("pushfq; andl $~0x40000, (%rsp); popfq");
  return flags & 0x40000 ? r : -1;
}
int main(void) {
  for (long i = 0; i < 10; i++)
    if (checked(i) != 6 * i + 5) return 1;
  return 0;
}
C
  gcc -O1 -mno-red-zone -o aligned aligned.c
  for options in '' -s --sum --force-trap; do
    same_as_untraced $options -f leaf -- ./aligned
    [ "$(calls_of leaf)" = 20 ]
  done
}
