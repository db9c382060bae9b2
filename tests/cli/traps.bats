# Traps: where they are used, where not and why, and what takes them away again.
load common
bats_require_minimum_version 1.5.0

# tiny() has one byte and no padding, so nothing but a trap fits; libvm.so looks like a runtime that makes code of its own.
build_tiny() {
  cat >tiny.c <<'CODE'
#include <dlfcn.h>
#include <signal.h>
#include <stdio.h>
__asm__(".globl tiny\n.type tiny,@function\ntiny: ret\n.size tiny,.-tiny\n"
        ".globl next\n.type next,@function\nnext: mov %edi,%eax\n ret\n.size next,.-next\n");
void tiny(void);
static void calls(int n) { while (n--) tiny(); }
int main(int argc, char **argv) {
  calls(10);
  void *library = argc > 1 ? dlopen(argv[1], RTLD_NOW) : 0;
  calls(10);
  sigset_t none, before;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, &before);
  struct sigaction action;
  sigaction(SIGTRAP, 0, &action);
  printf("%d %d %d\n", library != 0, sigismember(&before, SIGTRAP), action.sa_handler == SIG_DFL);
}
CODE
  echo 'void JNI_CreateJavaVM(void) {}' >vm.c
  gcc -O1 -shared -o libvm.so vm.c
  gcc -O1 -o tiny tiny.c
}

@test "traps: a function of one byte is counted" {
  build_tiny
  same_as_untraced -- ./tiny
  [ "$(calls_of tiny)" -eq 20 ]
  "$SONDE" report trace | grep -q ' more by a trap'
  "$SONDE" list ./tiny | grep -q ' trap  *tiny$'
}

@test "traps: --no-trap refuses what only a trap fits" {
  build_tiny
  same_as_untraced --no-trap -- ./tiny
  [ "$(calls_of tiny)" -eq 0 ]
  "$SONDE" report trace | grep -q '^functions refused: .*too small for any jump'
  "$SONDE" list --no-trap ./tiny | grep -q ' refused  *tiny  -- too small for any jump'
}

@test "traps: --force-trap leaves no other method" {
  build_tiny
  same_as_untraced --force-trap -- ./tiny
  [ "$(calls_of main)" -eq 1 ]
  echo 'int printf(const char *, ...); int main(void) { return printf("%x", *(unsigned char *)main) < 0; }' >first.c
  gcc -O1 -w -o first first.c
  [ "$("$SONDE" record -q -o trace --force-trap -- ./first)" = cc ]
  [ "$("$SONDE" record -q -o trace -- ./first)" != cc ]
  run -2 "$SONDE" record --force-trap --no-trap -- ./tiny
}

@test "traps: a program's own backtrace does not show them" {
  cat >depth.cc <<'CODE'
#include <execinfo.h>
#include <stdio.h>
#include <string.h>
static volatile int sum;
__attribute__((noinline, noclone)) int depth(int n) {
  if (n) {
    int r = depth(n - 1);
    sum += r;
    return r;
  }
  void *places[200];
  int count = backtrace(places, 200);
  char **lines = backtrace_symbols(places, count);
  for (int i = 0; i < count; i++) puts(strtok(lines[i], "["));
  return count;
}
int main() { printf("%d\n", depth(5)); }
CODE
  g++ -O1 -rdynamic -o depth depth.cc
  same_as_untraced -- ./depth
  same_as_untraced --force-trap -- ./depth
  same_as_untraced --force-trap -f '*:*' -- ./depth
}

@test "traps: none beside a runtime that makes code" {
  build_tiny
  gcc -O1 -o tiny tiny.c -Wl,--no-as-needed -L. -lvm -Wl,-rpath,"$PWD"
  same_as_untraced -- ./tiny
  [ "$(calls_of tiny)" -eq 0 ]
  "$SONDE" report trace | grep -q 'note: functions that only a trap fits are not probed: .*libvm.so is a runtime'
  run -1 "$SONDE" record -o trace --force-trap -- ./tiny
  [[ "$output" == "sonde: --force-trap: no traps are possible here: "*"libvm.so is a runtime that makes code of its own" ]]
  run -0 "$SONDE" list ./libvm.so
  [[ "$output" == *"no traps in a program with this file: "* ]]
}

@test "traps: a runtime that is loaded later takes them out" {
  build_tiny
  same_as_untraced -- ./tiny ./libvm.so
  [ "$(calls_of tiny)" -eq 10 ]
  "$SONDE" report trace | grep -q 'note: .*taken out while the program ran: .*libvm.so is a runtime'
}

@test "traps: none where the program starts with SIGTRAP blocked" {
  build_tiny
  cat >blocked.c <<'CODE'
#include <signal.h>
#include <unistd.h>
int main(int argc, char **argv) {
  sigset_t trap;
  sigemptyset(&trap);
  sigaddset(&trap, SIGTRAP);
  sigprocmask(SIG_BLOCK, &trap, 0);
  return execvp(argv[1], argv + 1);
}
CODE
  gcc -O1 -o blocked blocked.c
  ./blocked ./tiny >untraced.out
  grep -q '^0 1 1$' untraced.out
  ./blocked "$SONDE" record -q -o trace -- ./tiny >traced.out
  diff untraced.out traced.out
  "$SONDE" report trace | grep -q 'note: .*the program was started with SIGTRAP blocked'
}

@test "traps: a seccomp filter that the program sets takes them out, and the report says so" {
  build_tiny
  cat >sandbox.c <<'CODE'
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stdio.h>
#include <sys/prctl.h>
__asm__(".globl tiny\n.type tiny,@function\ntiny: ret\n.size tiny,.-tiny\n"
        ".globl next\n.type next,@function\nnext: mov %edi,%eax\n ret\n.size next,.-next\n");
void tiny(void);
int main(void) {
  for (int i = 0; i < 10; i++) tiny();
  struct sock_filter allow[] = {BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
  struct sock_fprog program = {1, allow};
  int failed = prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program);
  for (int i = 0; i < 10; i++) tiny();
  return puts(failed ? "failed" : "locked in") < 0;
}
CODE
  gcc -O1 -o sandbox sandbox.c
  same_as_untraced -- ./sandbox
  grep -q 'locked in' traced.out
  [ "$(calls_of tiny)" -eq 10 ]
  "$SONDE" report trace | grep -q 'note: in 1 process the traps were taken out, .*: the program locked itself in with seccomp'
}
