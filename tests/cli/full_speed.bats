# Two threads that do nothing but call a probed function: who loses records, and who says so.
load common

setup() {
  cd "$BATS_TEST_TMPDIR" || exit 1
  cat >two.c <<'C'
#include <pthread.h>
#include <stdio.h>
__attribute__((noinline)) void leaf(long x) { __asm__ volatile("" ::"r"(x)); }
static void* work(void* a) {
  for (long i = 0; i < 5000000; i++) leaf(i);
  return a;
}
int main(void) {
  pthread_t t[2];
  for (int i = 0; i < 2; i++) pthread_create(&t[i], 0, work, 0);
  for (int i = 0; i < 2; i++) pthread_join(t[i], 0);
  puts("done");
  return 3;
}
C
  gcc -O2 two.c -o two -pthread
}

@test "two threads at full speed: the default loses nothing and says how long it waited" {
  same_as_untraced -f leaf -- ./two
  [ "$(calls_of leaf)" = 10000000 ]
  grep -q '10000000 calls of 1 functions (0 refused), 0 lost, waited [0-9.]* s' traced.err.all
}

@test "two threads at full speed: --drop counts every record that it drops" {
  same_as_untraced --drop -f leaf -- ./two
  lost=$(grep -o '[0-9]* lost' traced.err.all | cut -d' ' -f1)
  [ $(($(calls_of leaf) + lost)) = 10000000 ]
}

@test "--max-size stops the writing, not the program, and counts what it left out" {
  same_as_untraced --max-size 100K -f leaf -- ./two
  [ "$(stat -c %s trace)" -lt 400000 ]
  grep -q ' 0 lost' traced.err.all || { cat traced.err.all; return 1; }
  "$SONDE" report trace >report.out
  left_out=$(sed -n 's/.*note: \([0-9]*\) records could not be written: .*--max-size.*/\1/p' report.out)
  [ $(($(calls_of leaf) + left_out)) = 10000000 ]
}

@test "a full disk stops the writing, not the program, and the file says so" {
  [ "$(id -u)" = 0 ] || skip "only root may mount a small disk"
  mkdir disk
  mount -t tmpfs -o size=2m none disk || skip "no mount permitted here"
  status=0
  "$SONDE" record -o disk/trace -f leaf -- ./two >out 2>err || status=$?
  cp disk/trace trace
  umount disk
  [ "$status" = 3 ]
  [ "$(cat out)" = done ]
  grep -q 'No space left on device' err
  "$SONDE" report trace >report.out
  left_out=$(sed -n 's/.*note: \([0-9]*\) records could not be written: No space.*/\1/p' report.out)
  [ $(($(calls_of leaf) + left_out)) = 10000000 ]
}
