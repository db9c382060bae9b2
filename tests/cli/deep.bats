# Deep recursion: reports stay as long as there are calls, and say what they left out of the indentation.
load common

setup() {
  cd "$BATS_TEST_TMPDIR" || exit 1
  cat >deep.c <<'C'
#include <stdlib.h>
__attribute__((noinline)) long down(long n) { __asm__ volatile(""); return n ? 1 + down(n - 1) : 0; }
int main(int argc, char** argv) { return down(atol(argv[argc - 1])) < 0; }
C
  gcc -g -O1 -fno-optimize-sibling-calls deep.c -o deep
}

@test "a recursion 20,000 deep makes a report of ordinary size" {
  (ulimit -s 65536; "$SONDE" record -q -o trace -- ./deep 20000)
  timeout 60 "$SONDE" report trace >tree
  timeout 60 "$SONDE" report --calls trace >calls
  for text in tree calls; do
    [ "$(grep -c 'down' "$text")" -ge 20001 ]
    [ "$(stat -c %s "$text")" -lt 4000000 ]
    grep -qE ' \[20001\] down' "$text"
    grep -q '^\[N\]: N levels below the outermost function, the deepest here 20001' "$text"
  done
  grep -q -e '--depth N shows' tree
  timeout 60 "$SONDE" report --json trace >json
  [ "$(stat -c %s json)" -lt 12000000 ]
  python3 -c '
text = open("json").read()
assert text.count("\"name\":\"down\"") == 20001, text.count("\"name\":\"down\"")
assert text.count("[") == text.count("]") and text.count("{") == text.count("}")'
  timeout 60 "$SONDE" report --depth 10 trace >short
  [ "$(grep -c down short)" -le 15 ]
  timeout 60 "$SONDE" report --folded --counts trace >folded
  [ "$(stat -c %s folded)" -lt 4000000 ]
  grep -q '^main;down;.*;down;\[deeper\] 19002$' folded
  [ "$(grep '^main' folded | awk '{ n += $NF } END { print n }')" -eq 20002 ]
}

@test "a shallow tree has no numbers" {
  "$SONDE" record -q -o trace -- ./deep 30
  "$SONDE" report trace >tree
  [ "$(grep -c ' down' tree)" -ge 31 ]
  ! grep -q '\[N\]\|\[3' tree
}
