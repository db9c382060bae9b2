# record -p: into a program that runs, and out of it again.
load common
load attach
bats_require_minimum_version 1.5.0

# Four threads that throw through hooked functions and recurse, until the file `stop` is there; prints what went wrong.
build_busy() {
  cat >busy.cc <<'CODE'
#include <dlfcn.h>
#include <unistd.h>
#include <atomic>
#include <cstdio>
#include <stdexcept>
#include <thread>
#include <vector>
std::atomic<bool> stop;
std::atomic<long> wrong;
#define APART __attribute__((noinline, noclone))
APART int leaf(int x) {
  if (x % 97 == 0) throw std::runtime_error("97");
  asm volatile("" : "+r"(x));
  return x * 2;
}
APART int outer(int x) {
  try {
    int r = leaf(x);
    return r + 1;
  } catch (std::exception &) {
    return -1;
  }
}
APART int deep(int n) {
  if (n == 0) return usleep(50);
  int r = deep(n - 1);
  asm volatile("" : "+r"(r));
  return r + 1;
}
void work() {
  for (int i = 1; !stop; i++) {
    if (outer(i) != (i % 97 ? 2 * i + 1 : -1)) wrong++;
    if (i % 500 == 0 && deep(40) != 40) wrong++;
  }
}
int main(int argc, char **argv) {
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; i++) threads.emplace_back(work);
  puts("runs"), fflush(stdout);
  while (access("stop", F_OK) != 0) {
    usleep(1000);
    if (argc > 1 && access("load", F_OK) == 0) {
      void *library = dlopen(argv[1], RTLD_NOW);
      auto late = library ? (int (*)(int))dlsym(library, "late") : nullptr;
      if (!late || late(20) != 21) wrong++;
    }
  }
  stop = true;
  for (auto &thread : threads) thread.join();
  printf("%ld wrong\n", wrong.load());
}
CODE
  g++ -O2 -pthread -o busy busy.cc
}

@test "attach: calls of a program that runs are counted, and it is left as it was, again and again" {
  build_busy
  start ./busy
  state >before
  for i in {1..5}; do
    "$SONDE" record -q -o trace -s -p $pid -- sleep 0.3
    [ "$(calls_of leaf)" -gt 100 ]
    [ "$(calls_of deep)" -gt 40 ]
    "$SONDE" report trace | grep -q '^unreliable stacks: 0.0 %'
    state >after
    diff before after
  done
  ends_well
}

@test "attach: every function of every library, under sums and drops too" {
  build_busy
  start ./busy
  state >before
  for options in '' --sum --drop; do
    "$SONDE" record -q -o trace $options -f '*:*' -p $pid -- sleep 0.3
    [ "$(calls_of leaf)" -gt 10 ]
    [ "$(calls_of usleep)" -gt 0 ]
    state >after
    diff before after
  done
  ends_well
}

@test "attach: a library that is loaded meanwhile is armed, and taken back" {
  build_busy
  echo 'int late(int x) { return x + 1; }' >late.c
  gcc -O1 -shared -fPIC -o late.so late.c
  start ./busy ./late.so
  "$SONDE" record -q -o trace -f ./late.so:late -f leaf -p $pid -- sh -c 'touch load; sleep 0.5'
  [ "$(calls_of late)" -gt 10 ]
  ! grep sonde /proc/$pid/maps
  ends_well
}

@test "attach: Ctrl-C ends it, and so does the program's end" {
  build_busy
  start ./busy
  env --default-signal=INT "$SONDE" record -o trace -p $pid 2>said &
  recorder=$!
  for i in {1..500}; do grep -q 'recording process' said && break; sleep 0.01; done
  kill -INT $recorder
  wait $recorder
  grep -q ' calls of ' said
  "$SONDE" record -o trace -p $pid 2>said &
  recorder=$!
  for i in {1..500}; do grep -q 'recording process' said && break; sleep 0.01; done
  ends_well
  wait $recorder
  "$SONDE" report trace | grep -q '^note: process .* ended while it was recorded'
}

@test "attach: the exit status is the command's" {
  build_busy
  start ./busy
  run -3 "$SONDE" record -q -o trace -p $pid -- sh -c 'exit 3'
  run -127 "$SONDE" record -q -o trace -p $pid -- ./there-is-none
  ! grep sonde /proc/$pid/maps
  ends_well
}

@test "attach: children that are forked meanwhile are recorded and set free" {
  cat >forks.c <<'CODE'
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>
__attribute__((noinline, noclone)) int child_work(int n) { return usleep(1000), n; }
int main(void) {
  puts("runs"), fflush(stdout);
  long wrong = 0;
  while (access("stop", F_OK) != 0) {
    int status;
    pid_t child = fork();
    if (!child) {
      for (int i = 0; i < 300; i++)
        if (child_work(i) != i) _exit(1);
      _exit(0);
    }
    waitpid(child, &status, 0);
    wrong += status != 0;
  }
  printf("%ld wrong\n", wrong);
}
CODE
  gcc -O1 -o forks forks.c
  start ./forks
  for i in {1..4}; do
    "$SONDE" record -q -o trace -p $pid -- sleep 0.5
    [ "$(calls_of child_work)" -gt 10 ]
  done
  ! grep sonde /proc/$pid/maps
  ends_well
}

@test "attach: in another mount namespace, where the agent's file is not" {
  [ "$(id -u)" = 0 ] || skip "only root may make mount namespaces"
  build_busy
  agent=$(dirname "$SONDE")
  rm -f stop
  unshare -m sh -c "mount -t tmpfs none '$agent' && exec ./busy" >out 2>err </dev/null &
  pid=$!
  for i in {1..500}; do [ -s out ] && break; sleep 0.01; done
  [ "$(cat out)" = runs ] || skip "no mount namespaces here"
  [ ! -e "/proc/$pid/root$SONDE" ]
  "$SONDE" record -q -o trace -p $pid -- sleep 0.3
  [ "$(calls_of leaf)" -gt 100 ]
  ! grep -E 'sonde|memfd' /proc/$pid/maps
  ends_well
}

@test "attach: what cannot be recorded is refused with its reason and stays as it is" {
  run -1 "$SONDE" record -o trace -p 4194303
  [[ "$output" == "sonde: no process with id 4194303" ]]
  run -2 "$SONDE" record -o trace -p x
  run -2 "$SONDE" record -o trace --force-trap -p 1
  run -2 "$SONDE" record -o trace
  [[ "$output" == *"-p PID"* ]]
  echo 'int main(void) { for (;;) sleep(1); }' >waits.c
  gcc -w -static -o static waits.c
  gcc -w -o waits waits.c
  refused() {
    "$@" &
    pid=$!
    sleep 0.3
    before=$(cat /proc/$pid/maps)
    run -1 "$SONDE" record -o trace -p $pid -- true
    [[ "$output" == *"process $pid ($(basename "$1"))"* ]]
    [ "$before" = "$(cat /proc/$pid/maps)" ]
    kill $pid
    wait $pid || true
    pid=
    said=$output
  }
  refused ./static
  [[ "$said" == *"statically linked"* ]]
  ./waits &
  pid=$!
  sleep 0.2
  for command in '' '-- true'; do
    # shellcheck disable=SC2086
    run -2 "$SONDE" record -o trace -f no_such_function -p $pid $command
    [[ "$output" == *"no function matches 'no_such_function'"* ]]
    ! grep -E 'sonde|memfd' /proc/$pid/maps || return 1
  done
  "$SONDE" record -q -o first -p $pid -- sleep 2 &
  other=$!
  sleep 1
  run -1 "$SONDE" record -o trace -p $pid -- true
  [[ "$output" == *"is recorded already"* ]]
  wait $other
  gdb -p $pid -batch -ex 'shell sleep 2' >/dev/null 2>&1 &
  other=$!
  sleep 1
  run -1 "$SONDE" record -o trace -p $pid -- true
  [[ "$output" == *"already traced by process"*"(gdb)"* ]]
  wait $other
}
