# What surrounds a recording goes wrong: nobody reads its messages, no file may grow, a size makes no sense. The program
# and its exit status must not feel it.
load common

@test "a reader that went away does not change the exit status" {
  mkfifo messages
  exec 7<>messages
  exec 8>messages
  exec 7<&-
  status=0
  "$SONDE" record -o trace -- sh -c 'exit 7' 2>&8 || status=$?
  exec 8>&-
  [ "$status" -eq 7 ]
}

@test "a trace written to a pipe that closes leaves the program alone" {
  "$SONDE" record -q -o /dev/stdout -- sh -c 'sleep 0.2; echo done >ran; exit 5' | head -c 1 >/dev/null
  [ "$(cat ran)" = done ]
}

@test "messages that cannot be written do not change the exit status" {
  status=0
  "$SONDE" record -o trace -- sh -c 'exit 7' 2>/dev/full || status=$?
  [ "$status" -eq 7 ]
}

@test "a list that cannot be written is an error" {
  status=0
  "$SONDE" list /bin/true >/dev/full || status=$?
  [ "$status" -eq 1 ]
}

@test "a limit on file sizes that leaves no room for the rings is told" {
  status=0
  (ulimit -f 0; exec "$SONDE" record -o trace -- touch ran) 2>&1 | cat >err || true
  grep -q 'File too large' err
  [ ! -e ran ]
}

@test "under a limit on file sizes or address space the rings leave room for the program" {
  status=0
  (ulimit -f $((1 << 20)); exec "$SONDE" record -q -o trace -- sh -c 'exit 5') || status=$?
  [ "$status" -eq 5 ]
  cat >wants.c <<'C'
#include <stdlib.h>
int main(void) { return malloc(1500UL << 20) ? 6 : 1; }
C
  gcc wants.c -o wants
  (ulimit -v $((5 << 19)); ./wants) || status=$?
  [ "$status" -eq 6 ]
  status=0
  (ulimit -v $((5 << 19)); exec "$SONDE" record -q -o trace -- ./wants) || status=$?
  [ "$status" -eq 6 ]
}

@test "the program does not inherit the signals sonde ignores" {
  grep SigIgn /proc/self/status >untraced.out
  "$SONDE" record -q -o trace -- grep SigIgn /proc/self/status >traced.out
  diff untraced.out traced.out
}

@test "a size that is none is refused before the program runs" {
  for size in -5 0 99999999T 18446744073709551616 5X; do
    status=0
    "$SONDE" record -o trace --max-size "$size" -- touch ran 2>err || status=$?
    [ "$status" -eq 2 ]
    grep -q 'is not a size' err
    [ ! -e ran ]
  done
}
