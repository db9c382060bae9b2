# Two threads that do nothing but call a probed function: who loses records, and who says so.
load common

setup() {
  cd "$BATS_TEST_TMPDIR" || exit 1
  cat >two.c <<'C'
#include <pthread.h>
#include <stdio.h>
__attribute__((noinline)) void leaf(long x) { __asm__ volatile("" ::"r"(x)); }
static void* work(void* a) {
  for (long i = 0; i < CALLS; i++) leaf(i);
  return a;
}
int main(void) {
  pthread_t t[THREADS];
  for (int i = 0; i < THREADS; i++) pthread_create(&t[i], 0, work, 0);
  for (int i = 0; i < THREADS; i++) pthread_join(t[i], 0);
  puts("done");
  return 3;
}
C
  gcc -O2 -DCALLS=5000000 -DTHREADS=2 two.c -o two -pthread
}

# The recorder's last words ($1) and the report name the same number of events that the file lacks, and why ($2); neither
# says beside it that nothing was lost. Leaves the number in $left_out.
check_left_out() {
  "$SONDE" report trace >report.out
  left_out=$(sed -n "s/^not written: \([0-9,]*\) events ($2).*/\1/p" report.out | tr -d ,)
  [ "$left_out" -gt 0 ]
  grep -q "^sonde: .* $left_out not written ($2)" "$1" || { cat "$1"; return 1; }
  ! grep -E '[^0-9]0 lost|lost: none' "$1" report.out || return 1
}

@test "two threads at full speed: the default loses nothing and says how long it waited" {
  same_as_untraced -f leaf -- ./two
  [ "$(calls_of leaf)" = 10000000 ]
  grep -q '10000000 calls of 1 function (0 refused), 0 lost, waited [0-9.]* s' traced.err.all
}

@test "while every processor is busy the recorder goes from one to the next, so that no thread alone makes way for it" {
  allowed=$(taskset -cp $$ | sed 's/.*: //')
  [ "$(nproc)" -gt 1 ] || skip "one processor"
  gcc -O2 -DCALLS=60000000 -DTHREADS="$(nproc)" two.c -o many -pthread
  "$SONDE" record -o trace -f leaf -- ./many >out 2>err 3>&- &
  recorder=$!
  sleep 1
  grep -q nr_migrations "/proc/$recorder/sched" || { kill $recorder; skip "this kernel does not count migrations"; }
  before=$(sed -n 's/.*nr_migrations.*: *//p' "/proc/$recorder/sched")
  sleep 0.5
  moves=$(($(sed -n 's/.*nr_migrations.*: *//p' "/proc/$recorder/sched") - before))
  # While it moves it allows itself one alone.
  for _ in $(seq 20); do
    after=$(taskset -cp $recorder | sed 's/.*: //')
    [ "$after" != "$allowed" ] || break
    sleep 0.01
  done
  kill $(pgrep -P $recorder)
  wait $recorder || true
  echo "$moves moves in half a second"
  [ "$moves" -gt 10 ]
  [ "$after" = "$allowed" ]
}

@test "two threads at full speed: --drop counts every record that it drops" {
  same_as_untraced --drop -f leaf -- ./two
  lost=$(grep -o '[0-9]* lost' traced.err.all | cut -d' ' -f1)
  [ $(($(calls_of leaf) + lost)) = 10000000 ]
}

@test "--max-size stops the writing, not the program, and counts what it left out" {
  same_as_untraced --max-size 100K -f leaf -- ./two
  [ "$(stat -c %s trace)" -lt 400000 ]
  check_left_out traced.err.all 'the size given with --max-size is reached'
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
  check_left_out err 'No space left on device'
  [ $(($(calls_of leaf) + left_out)) = 10000000 ]
}

@test "--sum counts what its file lacks for want of space" {
  same_as_untraced --sum --max-size 100 -f leaf -- ./two
  check_left_out traced.err.all 'the size given with --max-size is reached'
  [ $(($(calls_of leaf) + left_out)) = 10000000 ]
  [ "$(id -u)" = 0 ] || skip "only root may mount a small disk"
  mkdir disk
  mount -t tmpfs -o size=64k none disk || skip "no mount permitted here"
  status=0
  head -c 64k /dev/zero >disk/filler || true
  truncate -s -8k disk/filler
  "$SONDE" record --sum -o disk/trace -f leaf -- ./two >out 2>err || status=$?
  cp disk/trace trace
  umount disk
  [ "$status" = 3 ]
  check_left_out err 'No space left on device'
  [ $(($(calls_of leaf) + left_out)) = 10000000 ]
}
