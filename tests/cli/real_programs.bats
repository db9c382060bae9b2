# Programs nobody here wrote behave under `sonde record` as they do alone, and the counts are right.
load common
bats_require_minimum_version 1.5.0

@test "sqlite3 with its library's functions probed, a stack for each hit" {
  same_as_untraced -f 'libsqlite3.so.0:sqlite3_*' -s -- \
    sqlite3 :memory: 'create table t(x); insert into t values(1),(2); select sum(x) from t;'
  [ "$(calls_of sqlite3_prepare_v2)" -ge 3 ]
  "$SONDE" report --stats trace | grep -q 'unreliable stacks'
}

@test "python3 with its C interface probed" {
  same_as_untraced -f 'Py*' -- /usr/bin/python3 -c 'print(sum(range(10**5)))'
}

@test "sonde itself" {
  same_as_untraced -- "$SONDE" --version
}

@test "cmake" {
  same_as_untraced -- cmake --version
}

@test "gcc compiles the same object: stripped, functions from .eh_frame" {
  echo 'int twice(int x) { return 2 * x; }' >small.c
  gcc -c small.c -o alone.o
  "$SONDE" record -o trace -- gcc -c small.c -o traced.o
  cmp alone.o traced.o
}

@test "the environment is the program's own" {
  same_as_untraced -- env -u _  # which the shell sets to the command it starts
}

@test "the descriptors are the program's own" {
  # The folder that ls opens is the lowest free one: any descriptor of ours would show as a number.
  ls /proc/self/fd >untraced.out
  "$SONDE" record -o trace -- ls /proc/self/fd >traced.out
  diff untraced.out traced.out
}

@test "a program under AddressSanitizer" {
  cat >asan.c <<'C'
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
__attribute__((noinline)) int use(char *p) { return p[3]; }
int main(void) { char *p = malloc(8); strcpy(p, "abcdefg"); int r = use(p); free(p); printf("%d\n", r); return 3; }
C
  gcc -g -O1 -fsanitize=address asan.c -o asan
  same_as_untraced -- ./asan
  [ "$(calls_of use)" -eq 1 ]
}

@test "sanitizers report and suppress what they do untraced, with the same stacks" {
  cat >bad.c <<'C'
#include <stdlib.h>
#define NI __attribute__((noinline))
NI char *make(int n) { char *p = malloc(n); p[0] = 1; return p; }
NI char *outer(int n) { char *p = make(n); __asm__ volatile(""); return p; }
NI int use(char *p) { return p[8]; }
NI void third_party(void) { char *volatile leak = outer(7); leak = 0; }
const char *__lsan_default_suppressions(void) { return "leak:third_party"; }
int main(int c, char **v) { third_party(); char *volatile p = outer(8); int r = 0; if (c > 1) r = use(p), free(p), r += p[0]; else free(p); return r; }
C
  frames() { grep -E '^ +#[0-9]|ERROR' "$1" | sed -E 's/0x[0-9a-f]+//g; s/==[0-9]+==//; s/ \(.*//'; }
  for kind in address leak; do
    gcc -g -O1 -fno-omit-frame-pointer -fsanitize=$kind bad.c -o bad
    same_as_untraced -- ./bad
    [ "$(calls_of outer)" -eq 2 ]
  done
  for halt in 1 0; do
    gcc -g -O1 -fno-omit-frame-pointer -fsanitize=address -fsanitize-recover=address bad.c -o bad
    untraced=0 traced=0
    ASAN_OPTIONS=halt_on_error=$halt ./bad now 2>untraced.err || untraced=$?
    ASAN_OPTIONS=halt_on_error=$halt "$SONDE" record -q -f '*:*' -o trace -- ./bad now 2>traced.err || traced=$?
    [ $traced -eq $untraced ]
    grep -q heap-buffer-overflow untraced.err
    frames untraced.err >untraced.frames
    frames traced.err >traced.frames
    [ "$(grep -c ' in outer' untraced.frames)" -ge 1 ]
    diff untraced.frames traced.frames
  done
  "$SONDE" report trace | grep -q 'returns not hooked: .*program under a sanitizer'
}

@test "counts equal those of gdb's breakpoints for ten functions" {
  cat >counts.c <<'C'
#include <stdio.h>
#define F(n) __attribute__((noinline)) int f##n(int x) { __asm__ volatile(""); return x + n; }
F(0) F(1) F(2) F(3) F(4) F(5) F(6) F(7) F(8) F(9)
int (*const all[10])(int) = {f0, f1, f2, f3, f4, f5, f6, f7, f8, f9};
int main(void) { int s = 0; for (int i = 0; i < 10; i++) for (int k = 0; k <= i * 7; k++) s = all[i](s); printf("%d\n", s); }
C
  gcc -O2 -g counts.c -o counts
  same_as_untraced -- ./counts
  for i in 0 1 2 3 4 5 6 7 8 9; do echo "break *f$i"; done >script.gdb
  for i in 0 1 2 3 4 5 6 7 8 9; do echo "ignore $((i + 1)) 1000000"; done >>script.gdb
  { echo run; echo 'info breakpoints'; } >>script.gdb
  gdb -q -batch -x script.gdb ./counts >gdb.out 2>&1
  for i in 0 1 2 3 4 5 6 7 8 9; do
    expected=$(grep -A1 -E "in f$i at|<f$i>|in f$i\$" gdb.out | sed -n 's/.*already hit \([0-9]*\) time.*/\1/p' | head -1)
    [ "$(calls_of f$i)" -eq "$expected" ] || { echo "f$i: $(calls_of f$i), gdb $expected"; cat gdb.out; return 1; }
  done
}

@test "gdb and strace attach to a program that is being recorded" {
  cat >slow.c <<'C'
#include <time.h>
#include <unistd.h>
__attribute__((noinline)) void tick(void) { struct timespec t = {0, 20000000}; nanosleep(&t, 0); }
int main(void) { for (int i = 0; i < 150; i++) tick(); return 0; }
C
  gcc -O1 -g slow.c -o slow
  "$SONDE" record -o trace -- ./slow 2>/dev/null &
  recorder=$!
  sleep 0.7
  target=$(pgrep -P $recorder -x slow)
  gdb -q -batch -p "$target" -ex bt >gdb.out 2>&1
  grep -q 'in tick' gdb.out
  grep -q 'in main' gdb.out
  timeout 1 strace -p "$target" 2>strace.out || true
  grep -q nanosleep strace.out
  wait $recorder
  [ "$(calls_of tick)" -eq 150 ]
}

@test "exit status and death by signal are passed through" {
  run "$SONDE" record -o trace -- sh -c 'exit 7'
  [ "$status" -eq 7 ]
  run "$SONDE" record -o trace -- sh -c 'kill -TERM $$'
  [ "$status" -eq 143 ]
  run -127 "$SONDE" record -o trace -- ./does-not-exist
  [[ "$output" == *"does-not-exist"*"No such file"* ]]
}

@test "/bin/true takes under 0.3 s with warm tables" {
  "$SONDE" record -o trace -- /bin/true
  if [ -n "$SONDE_PROOF" ]; then  # ./dev proof: nothing runs beside it
    for i in 1 2 3 4 5; do
      start=$(date +%s%N)
      "$SONDE" record -q -o trace -- /bin/true
      echo $((($(date +%s%N) - start) / 1000000))
    done | sort -n >times
    echo "/bin/true, median of" $(cat times) ms >&3
    [ "$(sed -n 3p times)" -lt 300 ]
  else  # processor time, which waits for nobody
    TIMEFORMAT='%U %S'
    for i in $(seq 5); do
      { time "$SONDE" record -q -o trace -- /bin/true; } 2>times
      awk '{ exit !($1 + $2 < 0.3) }' times && return 0
    done
    return 1
  fi
}
