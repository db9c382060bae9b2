# `record --sum`: the same counts as a full recording has, kept as a tree in the program, and errors where single calls
# are asked for.
load common
bats_require_minimum_version 1.5.0

# "CALLS NAME" of every function in a trace, sorted.
counts() {
  "$SONDE" report --stats --json "$1" | python3 -c '
import json, sys
for r in sorted(json.load(sys.stdin)["functions"], key=lambda r: (r["name"], r["address"])): print(r["calls"], r["name"])'
}

# Records the command both ways, at the same addresses; the counts must be equal and nothing lost.
same_counts() {
  local options=()
  while [ "$1" != -- ]; do options+=("$1"); shift; done
  shift
  setarch -R "$SONDE" record -q -o full "${options[@]}" -- "$@" >full.out || true
  setarch -R "$SONDE" record -q -o sums --sum "${options[@]}" -- "$@" >sums.out || true
  diff full.out sums.out || return 1
  counts full >full.counts
  counts sums >sums.counts
  [ "$(wc -l <full.counts)" -ge 3 ] || return 1
  diff full.counts sums.counts || return 1
  "$SONDE" report sums | grep -q '^lost: none' || return 1
}

@test "counts of sqlite3 are those of a full recording" {
  same_counts -f 'libsqlite3.so.0:sqlite3*' -- \
    sqlite3 :memory: 'create table t(x); insert into t values(1),(2),(3); select sum(x) from t;'
}

@test "counts of python3 are those of a full recording" {
  export PYTHONHASHSEED=0
  same_counts -f 'Py*' -- /usr/bin/python3 -I -S -c 'print(sum(len(str(i)) for i in range(20000)))'
}

@test "counts of threads, recursion, exceptions and longjmp are those of a full recording" {
  cat >many.cc <<'C'
#include <pthread.h>
#include <setjmp.h>
#include <stdio.h>
#define PROBED extern "C" __attribute__((noinline, noclone))
PROBED long fib(long n) { asm volatile(""); return n < 2 ? n : fib(n - 1) + fib(n - 2); }
PROBED long deep(long n) { asm volatile(""); return n ? 1 + deep(n - 1) : 0; }
PROBED void thrower(int i) { if (i % 3 == 0) throw i; }
PROBED void passes(int i) { thrower(i); asm volatile(""); }
static __thread jmp_buf back;
PROBED void jumps(int i) { if (i % 2) longjmp(back, 1); asm volatile(""); }
PROBED void before(int i) { jumps(i); asm volatile(""); }
PROBED void* work(void*) {
  fib(15);
  deep(3000);
  for (int i = 0; i < 300; i++) try { passes(i); } catch (int) {}
  for (volatile int i = 0; i < 100; i++) if (!setjmp(back)) before(i);
  return 0;
}
int main() {
  pthread_t t[4];
  for (auto& x : t) pthread_create(&x, 0, work, 0);
  for (auto& x : t) pthread_join(x, 0);
  puts("done");
}
C
  g++ -g -O1 -fno-optimize-sibling-calls -fno-inline many.cc -o many -lpthread
  same_counts -- ./many
  "$SONDE" report --stats --json sums >stats
  python3 - <<'P'
import json
rows = {r["name"].split("(")[0]: r for r in json.load(open("stats"))["functions"]}
assert rows["fib"]["calls"] == 4 * 1973, rows["fib"]
assert rows["deep"]["calls"] == 4 * 3001, rows["deep"]
assert rows["thrower"]["unwound"] == 4 * 100 and rows["thrower"]["returned"] == 4 * 200, rows["thrower"]
assert rows["jumps"]["abandoned"] == 4 * 50 and rows["before"]["abandoned"] == 4 * 50, rows["jumps"]
assert rows["deep"]["max_ns"] <= rows["work"]["max_ns"] <= rows["main"]["max_ns"]
assert rows["fib"]["total_ns"] <= rows["work"]["total_ns"]
assert rows["fib"]["p99_ns"] is None
P
  # 3001 levels, 512 of the tree: the rest is counted, and said to be, with an outer call.
  "$SONDE" report sums | grep -q 'calls too deep for the tree (more than 512 levels): 9,'
}

@test "the tree is that of a full recording" {
  cat >tree.c <<'C'
#define PROBED __attribute__((noinline, noclone))
PROBED void leaf(void) { static volatile int n; n = n + 1; n = n - 1; }
PROBED void left(int n) { for (int i = 0; i < n; i++) leaf(); asm volatile(""); }
PROBED void right(int n) { left(n); leaf(); asm volatile(""); }
int main(void) { for (int i = 0; i < 10; i++) { left(2); right(3); } return 0; }
C
  gcc -g -O1 -fno-optimize-sibling-calls -fno-inline tree.c -o tree
  "$SONDE" record -q -o full -- ./tree
  "$SONDE" record -q -o sums --sum -- ./tree
  "$SONDE" report --folded --counts full | sort >full.folded
  "$SONDE" report --folded --counts sums | sort >sums.folded
  diff full.folded sums.folded
  grep -qx 'main;right;left;leaf 30' sums.folded
  "$SONDE" report --folded --counts -f leaf sums | grep -qx 'leaf 60'
}

@test "single calls cannot be shown, and that is said" {
  "$SONDE" record -q -o sums --sum -- "$SONDE" --version
  run -2 "$SONDE" report --calls sums
  [[ "$output" == *"recorded with --sum"* ]]
  "$SONDE" report sums | grep -q 'an aggregated recording (--sum)'
  "$SONDE" report --stats sums | grep -q ' - '
}

@test "options that need single calls are refused before the program runs" {
  run -2 "$SONDE" record --sum -s -- touch ran
  [[ "$output" == *"--sum"* ]]
  run -2 "$SONDE" record --sum --drop -- touch ran
  [ ! -e ran ]
}

@test "a program that is killed leaves its tree, with the calls that were running" {
  cat >killed.c <<'C'
#include <signal.h>
__attribute__((noinline)) void leaf(void) { static volatile int n; n = n + 1; n = n - 1; }
__attribute__((noinline)) void last(void) { for (int i = 0; i < 1000; i++) leaf(); raise(SIGKILL); }
int main(void) { last(); return 0; }
C
  gcc -g -O1 killed.c -o killed
  "$SONDE" record -q -o sums --sum -- ./killed || true
  [ "$(counts sums | grep -cx '1000 leaf')" -eq 1 ]
  [ "$(counts sums | grep -cx '1 last')" -eq 1 ]
  "$SONDE" report sums | grep -q 'calls still running at the end: [12]'
}

@test "a forked child has a tree of its own below the calls it inherited" {
  cat >forks.c <<'C'
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>
__attribute__((noinline)) void leaf(void) { static volatile int n; n = n + 1; n = n - 1; }
__attribute__((noinline)) int child(void) { for (int i = 0; i < 7; i++) leaf(); return 3; }
__attribute__((noinline)) int forks(void) { if (!fork()) return child(); wait(0); return 4; }
int main(void) { int r = forks(); leaf(); return r; }
C
  gcc -g -O1 -fno-inline forks.c -o forks
  same_counts -- ./forks
  "$SONDE" report --folded --counts sums >folded
  grep -qx 'main;forks;child;leaf 7' folded
  grep -qx 'main;leaf 2' folded
}
