# What goes wrong is said in one line that helps, and never harms the program.
load common
bats_require_minimum_version 1.5.0

@test "a pattern that matches nothing: exit 2 and the nearest names" {
  run -2 "$SONDE" record -o trace -f 'sqlite3_prepar' -- sqlite3 :memory: 'select 1'
  [[ "$output" == *"no function matches"*"nearest:"*"sqlite3_prepare"* ]]
  [[ "$output" != *$'\n'* ]]
}

@test "the nearest names are those that list gives; libraries' come behind" {
  cat >near.c <<'C'
__attribute__((noinline)) int forc(int x) { __asm__ volatile(""); return x; }
int main(void) { return forc(0); }
C
  gcc -O1 near.c -o near
  run -2 "$SONDE" list ./near frok
  listed=$output
  run -2 "$SONDE" record -o trace -f frok -- ./near
  [[ "$listed" == "sonde: no function matches 'frok'; nearest: forc, "* ]]
  [[ "$output" == "$listed; in libraries: "* ]]
  run -2 "$SONDE" record -o trace -f forcc -- ./near
  listed=$output
  run -2 "$SONDE" list ./near forcc
  [[ "$listed" == "$output"* ]]
}

@test "a pattern that matches nothing in a script: what was searched" {
  printf '#!/bin/sh\necho no\n' >script
  chmod +x script
  run -2 "$SONDE" record -o trace -f my_function -- ./script
  [[ "$output" == "sonde: no function matches 'my_function'"*"; ./script is a script: its interpreter /bin/sh and the libraries of that were searched" ]]
  [[ "$output" != *$'\n'* ]]
  run -2 "$SONDE" record -o trace -f my_function -- sh -c 'exit 0'
  [[ "$output" != *script* ]]
}

@test "a static program is refused with its reason" {
  echo 'int main(void) { return 0; }' >static.c
  gcc -static static.c -o static
  run -126 "$SONDE" record -o trace -- ./static
  [[ "$output" == *"statically linked"* ]]
}

@test "a trace cut anywhere is read to its last whole chunk" {
  echo 'int f(int x) { return x + 1; } int main(void) { int s = 0; for (int i = 0; i < 100; i++) s = f(s); return 0; }' >small.c
  gcc -O0 small.c -o small
  "$SONDE" record -q -o trace -- ./small
  size=$(stat -c %s trace)
  for at in $(seq 0 37 $((size - 1))) $((size - 1)); do
    head -c "$at" trace >cut
    status=0
    timeout 20 "$SONDE" report cut >cut.out 2>&1 || status=$?
    # From the first whole chunk on there is something to show.
    case $status in
      0) grep -q 'note: ' cut.out ;;
      1) [ "$(wc -l <cut.out)" -eq 1 ] && grep -qE '^sonde: .*(not a trace|nothing of it can be read)' cut.out ;;
      *) false ;;
    esac || { echo "cut at $at: status $status"; cat cut.out; return 1; }
    [ "$status" -le "${last:-1}" ] || { echo "cut at $at: less than before"; return 1; }
    last=$status
    [ "$status" -ne 0 ] || "$SONDE" report --folded cut 2>&1 >/dev/null | grep -q '^sonde: note: '
  done
  [ "$status" -eq 0 ]
  head -c 100 trace >cut
  run -1 "$SONDE" report cut
  [[ "$output" == "sonde: cut: nothing of it can be read: its 100 bytes hold "* ]] && [[ "$output" != *$'\n'* ]]
}

@test "a full disk does not harm the program" {
  status=0
  "$SONDE" record -o /dev/full -- sh -c 'exit 4' >out 2>&1 || status=$?
  [ "$status" -eq 1 ] || [ "$status" -eq 4 ]
  grep -q 'No space left' out
}

@test "report without a trace says what to type" {
  run -1 "$SONDE" report
  [[ "$output" == *"no such file"*"sonde record"* ]]
}

@test "killing the recorder frees a waiting program, which ends as untraced" {
  cat >storm.c <<'C'
#include <stdio.h>
__attribute__((noinline)) int f(int x) { __asm__ volatile(""); return x + 1; }
int main(void) { int s = 0; for (int i = 0; i < 60000000; i++) s = f(s); printf("%d\n", s); return 5; }
C
  gcc -O2 storm.c -o storm
  "$SONDE" record -q -o trace -f f -- ./storm >out &
  recorder=$!
  until target=$(pgrep -P $recorder -x storm); do kill -0 $recorder; done
  until grep -q '^TracerPid:[[:space:]]0' /proc/$target/status; do kill -0 $recorder; done  # launched
  sleep 0.1
  kill -9 $recorder
  for i in $(seq 1200); do  # two seconds of work, on a machine that may have much else to do
    kill -0 "$target" 2>/dev/null || break
    sleep 0.1
  done
  [ "$(cat out)" = 60000000 ]
  "$SONDE" report trace >report.out
  grep -q "end of the recording is missing" report.out
  grep -q "^functions refused: unknown (the end of the recording is missing)" report.out
  grep -q "^lost: unknown (the end of the recording is missing); waited for room in a ring: unknown$" report.out
}
