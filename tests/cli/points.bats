# Probes at instructions: `record --at`. How often one is reached is counted by gdb.
load common
bats_require_minimum_version 1.5.0

build_loops() {
  cat >loops.c <<'C'
#include <stdio.h>
__attribute__((noinline)) long work(long n) {
  long s = 0;
  for (long i = 0; i < n; i++) {
    if (i % 3 == 0)
      s += i;
    else
      s ^= i;
  }
  return s;
}
__attribute__((noinline)) static int leaf(int x) { return x * 3 + 1; }
__attribute__((noinline)) long pick(int x) {
  switch (x % 6) {
    case 0: return leaf(1) + x;
    case 1: return leaf(x) * 2;
    case 2: return leaf(x) - 7;
    case 3: return -x;
    case 4: return leaf(leaf(x));
    default: return work(x);
  }
}
int main(void) {
  long t = 0;
  for (int i = 0; i < 12; i++) t += pick(i) + work(i);
  return printf("%ld\n", t) < 0;
}
C
  gcc -g "$@" loops.c -o loops
}

# "SYMBOL+0xN" of each instruction of the functions named, as objdump tells them apart.
instructions_of() {
  python3 - "$@" <<'PY'
import re, subprocess, sys
for symbol in sys.argv[2:]:
    text = subprocess.run(["objdump", "-d", "--no-show-raw-insn", f"--disassemble={symbol}", sys.argv[1]], text=True,
                          capture_output=True, check=True).stdout
    addresses = [int(a, 16) for a in re.findall(r"^ +([0-9a-f]+):", text, re.M)]
    start = int(re.search(r"^([0-9a-f]+) <", text, re.M).group(1), 16)
    for address in addresses:
        print(f"{symbol}+{address - start:#x}")
PY
}

# "NAME HITS" of each row of ./trace, sorted.
hits() {
  "$SONDE" report --stats --json trace | python3 -c '
import json, sys
for row in json.load(sys.stdin)["functions"]:
    print(row["name"], row["calls"])' | sort
}

# Those that gdb counts, of the places in ./places; one that is never reached is left out, as in a report.
counted_by_gdb() {
  local at
  while read -r at; do echo "break *($at)"; done <places | sed 's/+/ + /' >commands
  for ((i = 1; i <= $(wc -l <places); i++)); do echo "ignore $i 1000000"; done >>commands
  printf 'run\ninfo breakpoints\n' >>commands
  gdb -q -batch -ex 'set breakpoint pending on' -x commands ./loops >gdb.out 2>gdb.err
  python3 - <<'PY' | sort
import re
places = open("places").read().split()
text = open("gdb.out").read()
for number, hits in re.findall(r"^(\d+) +breakpoint .*\n(?:\tbreakpoint already hit (\d+) times?)?", text, re.M):
    if hits:
        print(places[int(number) - 1], hits)
PY
}

@test "at every instruction of four functions: hits are those that gdb counts, and the program is as untraced" {
  for flags in -O0 -O1 '-O2 -fcf-protection=none' '-O2 -fno-jump-tables'; do
    build_loops $flags
    instructions_of loops work leaf pick main >places
    counted_by_gdb >expected
    [ "$(wc -l <expected)" -gt 60 ]
    options=()
    while read -r at; do options+=(--at "$at"); done <places
    for method in '' --force-trap; do
      same_as_untraced $method "${options[@]}" -- ./loops
      ! grep 'is not probed' traced.err.all || return 1
      hits >found
      diff expected found || { echo "$flags $method"; return 1; }
    done
  done
}

@test "functions and instructions of them at once: calls are as without, and an instruction stands within its call" {
  build_loops -O1
  "$SONDE" record -q -f '*' -o trace -- ./loops >/dev/null
  hits | grep -v 'work+' >expected
  instructions_of loops work | grep -v '+0x0$' >places
  options=()
  while read -r at; do options+=(--at "$at"); done <places
  same_as_untraced -f '*' "${options[@]}" -- ./loops
  hits | grep -v 'work+' >found
  diff expected found
  "$SONDE" report --json trace | python3 -c '
import json, sys
def walk(node, above):
    if node["name"].startswith("work+"):
        assert above == "work", (node["name"], above)
        walk.seen += 1
        assert not node["children"]
    for child in node["children"]:
        walk(child, node["name"])
walk.seen = 0
for tree in json.load(sys.stdin)["trees"]:
    for root in tree["roots"]:
        walk(root, None)
assert walk.seen > 10, walk.seen'
}

@test "a stack of an instruction begins there, wherever its frame stands" {
  build_loops -O0
  instructions_of loops leaf >places
  options=()
  while read -r at; do options+=(--at "$at"); done <places
  same_as_untraced -s "${options[@]}" -- ./loops
  "$SONDE" report --calls --json trace | python3 -c '
import json, sys
from collections import Counter
first = Counter()
for call in json.load(sys.stdin)["calls"]:
    frames = call["frames"]
    assert call["name"] == "leaf+" + hex(frames[0]["offset"]), (call["name"], frames[0])
    assert [f["function"] for f in frames[:3]] == ["leaf", "pick", "main"], frames
    assert call["verdict"] == "reliable", call
    first[call["name"]] += 1
assert len(first) > 5 and set(first.values()) == {10}, first'
}

@test "places: symbol, offset in hex and decimal, source line, file offset, address of the process" {
  build_loops -O0 -no-pie
  at=$(nm loops | awk '$3 == "leaf" { print $1 }')
  offset=$(printf '0x%x' $((0x$at - $(readelf -lW loops | awk '/LOAD.*R E/ { print $3 - $2 }' | head -1 | sed 's/^$/0/;s/^0$/0x400000/'))))
  line=$(grep -n 'int leaf' loops.c | cut -d: -f1)
  for place in leaf leaf+0 leaf+0x0 loops:leaf ./loops:leaf "loops.c:$line" "loops:loops.c:$line" "0x$at" "loops:$offset"; do
    "$SONDE" record -q -o trace --at "$place" -- ./loops >/dev/null || { echo "$place"; return 1; }
    [ "$(hits)" = 'leaf+0x0 10' ] || { echo "$place: $(hits)"; return 1; }
  done
  second=$(instructions_of loops leaf | sed -n 2p)
  "$SONDE" record -q -o trace --at "leaf+$((${second#leaf+}))" -- ./loops >/dev/null
  [ "$(hits)" = "$second 10" ]
}

@test "a library's instruction, also of one that is opened later" {
  cat >later.c <<'C'
int twice(int x) { return 2 * x; }
C
  cat >opens.c <<'C'
#include <dlfcn.h>
int main(void) {
  void *library = dlopen("./liblater.so", RTLD_NOW);
  int (*twice)(int) = (int (*)(int))dlsym(library, "twice");
  return twice(1) + twice(2) + twice(3) != 12;
}
C
  gcc -O1 -shared -fPIC -o liblater.so later.c
  gcc -o opens opens.c
  place=$(instructions_of liblater.so twice | tail -1)
  same_as_untraced --at "./liblater.so:$place" --at libc.so.6:exit -- ./opens
  [ "$(hits)" = "$(printf 'exit+0x0 1\n%s 3' "$place")" ]
}

@test "what is no place is an error that says why, before the program has run" {
  build_loops -O1
  refuses() {
    run -2 --separate-stderr "$SONDE" record -o none --at "$1" -- ./loops
    [ -z "$output" ] && [[ $stderr = *"$2"* ]] && [ "$(wc -l <<<"$stderr")" = 1 ] || { echo "$1: $stderr"; return 1; }
  }
  refuses work+1 'work+1 is inside an instruction; instructions begin at work+0x0 and work+0x'
  refuses work+0x999 'work+0x999 is outside of work, which has '
  refuses wrok 'no function is called wrok; nearest: work'
  refuses 'w*' 'wildcard'
  refuses work+x 'no number behind its +: write work+0x12'
  refuses loops.c:999 'loops.c has no code from that line on'
  refuses other.c:3 'no debug information of a loaded file knows other.c'
  refuses lops:work 'no loaded file is called lops; nearest: loops'
  refuses loops:0x1 'no code lies at that offset of'
  refuses 0x10 'no code of a file lies at that address'
  refuses 0xzz 'is no number'
  [ ! -e none ]
}

@test "an instruction of a real program: each of sqlite3_step's is hit as by traps, and the answer is the same" {
  library=/usr/lib/x86_64-linux-gnu/libsqlite3.so.0
  options=()
  while read -r at; do options+=(--at "libsqlite3.so.0:$at"); done < <(instructions_of $library sqlite3_step sqlite3_finalize sqlite3_prepare_v2)
  [ ${#options[@]} -gt 100 ]
  query=(sqlite3 :memory: 'create table t(x); insert into t values(1),(2),(3); select sum(x), group_concat(x) from t;')
  same_as_untraced --force-trap "${options[@]}" -- "${query[@]}"
  hits >by_traps
  same_as_untraced "${options[@]}" -- "${query[@]}"
  hits | diff by_traps -
  [ "$(wc -l <by_traps)" -gt 30 ]
}

@test "record --json: one line for scripts" {
  build_loops -O1
  "$SONDE" record --json -o trace -f work --at leaf -- ./loops 2>said >/dev/null
  python3 - <<'PY'
import json
said = json.load(open("said"))
assert said["functions"] == 1 and said["instructions"] == 1 and said["calls"] == 24, said
assert said["output"] == "trace" and said["lost"] == 0 and said["notes"] == [], said
PY
}

@test "each instruction of what a glob matches, and places from a file: as one by one" {
  build_loops -O1
  options=()
  while read -r at; do options+=(--at "$at"); done < <(instructions_of loops work leaf)
  same_as_untraced "${options[@]}" -- ./loops
  hits >expected
  same_as_untraced --at 'work+*' --at 'lea?+*' -- ./loops
  hits | diff expected -
  instructions_of loops work leaf >places
  same_as_untraced --at @places -- ./loops
  hits | diff expected -
  run -2 "$SONDE" record -o none --at 'wor?' -- ./loops
  [[ "$output" == *'write GLOB+* for every one'* ]]
}

@test "nops beside each other are each their own place" {
  cat >nops.s <<'S'
  .globl main
  .type main, @function
main:
  mov $3, %ecx
1:
  .byte 0x66, 0x66, 0x2e, 0x0f, 0x1f, 0x84, 0, 0, 0, 0, 0
  .byte 0x66, 0x66, 0x2e, 0x0f, 0x1f, 0x84, 0, 0, 0, 0, 0
  nopl (%rax)
  dec %ecx
  jnz 1b
  xor %eax, %eax
  ret
  .size main, . - main
  .section .note.GNU-stack, "", @progbits
S
  gcc -o nops nops.s
  same_as_untraced --at main+5 --at main+16 --at main+27 -- ./nops
  [ "$(hits)" = "$(printf 'main+0x10 3\nmain+0x1b 3\nmain+0x5 3')" ] || { hits; return 1; }
}

@test "a landing pad and the instruction behind it are one place, which is named as asked for" {
  build_loops -O1 -fcf-protection=full
  objdump -d --disassemble=pick loops | grep -q endbr64
  for place in pick pick+4; do
    same_as_untraced --at $place -- ./loops
    [ "$(hits)" = "pick+$([ $place = pick ] && echo 0x0 || echo 0x4) 12" ] || { hits; return 1; }
  done
  same_as_untraced --at pick --at pick+4 -- ./loops
  [ "$(hits)" = 'pick+0x4 12' ]
}

@test "behind a watched system call, and where sonde itself watches a function" {
  cat >masks.c <<'C'
#define _GNU_SOURCE
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>
int main(void) {
  sigset_t set;
  sigfillset(&set);
  for (int i = 0; i < 5; i++) sigprocmask(i % 2 ? SIG_UNBLOCK : SIG_BLOCK, &set, 0);
  for (int i = 0; i < 4; i++) syscall(SYS_getpid);
  return 0;
}
C
  gcc -O1 -o masks masks.c
  library=/usr/lib/x86_64-linux-gnu/libc.so.6
  behind=$("$SONDE" list --json $library --at 'pthread_sigmask+*' | python3 -c '
import json, sys
listed = json.load(sys.stdin)["instructions"]
calls = [n for n, i in enumerate(listed) if i.get("refused", "").startswith("a system call")]
assert calls, listed
for n in calls: print(listed[n + 1]["name"])')
  options=(--at libc.so.6:syscall)
  for at in $behind; do options+=(--at "libc.so.6:$at"); done
  same_as_untraced "${options[@]}" -- ./masks
  ! grep 'not probed' traced.err.all || return 1
  hits >found
  grep -qx 'syscall+0x0 4' found
  [ "$(awk '/sigmask/ { n += $2 } END { print n }' found)" -ge 5 ] || { cat found; return 1; }
}

@test "a fault of a displaced instruction is the program's own: its pc, its address, its registers" {
  cat >faults.c <<'C'
#define _GNU_SOURCE
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <ucontext.h>
#define FAULTS(X) X(load) X(store) X(divide) X(illegal) X(vector) X(wide) X(call) X(jump) X(repeated) X(pushed)
#define X(name) extern char name[], name##_at[];
FAULTS(X)
#undef X
asm(".text\n"
    "load: nop\n load_at: mov (%rdi), %eax\n ret\n .size load, . - load\n"
    "store: lea 8(%rdi), %rax\n store_at: movq $1, -8(%rax)\n ret\n .size store, . - store\n"
    "divide: xor %ecx, %ecx\n xor %edx, %edx\n divide_at: div %ecx\n ret\n .size divide, . - divide\n"
    "illegal: mov $7, %eax\n illegal_at: ud2\n .size illegal, . - illegal\n"
    "vector: pxor %xmm0, %xmm0\n vector_at: movaps (%rdi), %xmm1\n ret\n .size vector, . - vector\n"
    "wide: nop\n wide_at: vmovdqu (%rdi), %ymm1\n vzeroupper\n ret\n .size wide, . - wide\n"
    "call: sub $8, %rsp\n call_at: call *16(%rdi)\n add $8, %rsp\n ret\n .size call, . - call\n"
    "jump: nop\n jump_at: jmp *16(%rdi)\n .size jump, . - jump\n"
    "repeated: mov $3, %ecx\n repeated_at: rep stosb\n ret\n .size repeated, . - repeated\n"
    "pushed: push %rbx\n pushed_at: push (%rdi)\n pop %rax\n pop %rbx\n ret\n .size pushed, . - pushed\n"
#define X(name) ".type " #name ", @function\n"
    FAULTS(X)
#undef X
);
static sigjmp_buf back;
static char* frame;
static void on_fault(int signal, siginfo_t* info, void* context) {
  greg_t* regs = ((ucontext_t*)context)->uc_mcontext.gregs;
  const char* name = "elsewhere";
#define X(n) if ((char*)regs[REG_RIP] == n##_at) name = #n;
  FAULTS(X)
#undef X
  printf("signal %d at %s, address %p, rcx %lld, rdi %lld, sp %ld\n", signal, name, signal == SIGSEGV ? info->si_addr : 0,
         (char*)regs[REG_RIP] == repeated_at ? (long long)regs[REG_RCX] : 0, (long long)regs[REG_RDI], (long)(frame - (char*)regs[REG_RSP]));
  siglongjmp(back, 1);
}
static void __attribute__((noinline)) attempt(char* function, char* argument) {
  frame = __builtin_frame_address(0);
  if (!sigsetjmp(back, 1)) ((void (*)(char*))function)(argument);
}
int main(void) {
  struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO};
  for (int i = 0; i < 32; i++)
    if (i == SIGSEGV || i == SIGFPE || i == SIGILL || i == SIGBUS) sigaction(i, &action, 0);
  for (int i = 0; i < 3; i++) {
#define X(name) attempt(name, (char*)(long)i);
    FAULTS(X)
#undef X
  }
}
C
  gcc -O1 -o faults faults.c
  functions=(load store divide illegal vector wide call jump repeated pushed)
  options=()
  for f in "${functions[@]}"; do options+=(--at "$f+*"); done
  same_as_untraced "${options[@]}" -- ./faults
  [ "$(grep -c ' at elsewhere' untraced.out)" = 0 ] && [ "$(wc -l <untraced.out)" -ge 25 ]
  same_as_untraced --force-trap "${options[@]}" -- ./faults
  for f in "${functions[@]}"; do
    # Alone, and displaced by the patch of the one in front of it.
    at=$((0x$(nm faults | awk -v n="${f}_at" '$3 == n { print $1 }') - 0x$(nm faults | awk -v n="$f" '$3 == n { print $1 }')))
    same_as_untraced --at "$f+$at" -- ./faults
    same_as_untraced --at "$f" -- ./faults
  done
}
