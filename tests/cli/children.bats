# Processes that the program starts and that go on when it has ended: they are recorded to their ends, or it is said that
# they are not.
load common
bats_require_minimum_version 1.5.0

# ./daemon WHAT: 100 calls, and 1000 in a daemon that it starts. Its number is in ./pid, and when it is done ./done.
make_daemon() {
  cat >daemon.c <<'C'
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
__attribute__((noinline)) int call(int x) { __asm__ volatile(""); return x + 1; }
__attribute__((noinline)) void many(int n) { int x = 0; for (int i = 0; i < n; i++) x = call(x); if (x != n) _exit(77); }
__attribute__((noinline)) void pause_here(void) { while (access("go", F_OK)) usleep(1000); }
static void put(const char* name) {
  char text[32];
  int fd = open("new", O_CREAT | O_TRUNC | O_WRONLY, 0666), n = snprintf(text, sizeof text, "%d", getpid());
  if (write(fd, text, n) == n && !close(fd)) rename("new", name);
}
int main(int argc, char** argv) {
  const char* what = argc > 1 ? argv[1] : "";
  many(100);
  if (!strcmp(what, "closes")) close_range(0, ~0u, 0);
  if (fork()) {
    if (!strcmp(what, "stays")) pause();
    _exit(7);
  }
  if (!strcmp(what, "stays")) signal(SIGTERM, SIG_IGN), signal(SIGINT, SIG_IGN);
  setsid();
  if (fork()) _exit(0);
  umask(0);
  put("pid");
  if (!strcmp(what, "sleeps")) usleep(700000);
  if (!strcmp(what, "execs")) execlp("sleep", "sleep", "30", (char*)0);
  if (!strcmp(what, "stays") || !strcmp(what, "waits")) pause_here();
  if (!strcmp(what, "loads") && (usleep(100000), !dlopen("libz.so.1", RTLD_NOW))) return 1;
  many(1000);
  put("done");
  return 0;
}
C
  gcc -O1 daemon.c -o daemon -ldl
}

teardown() { [ ! -e pid ] || kill -9 "$(cat pid)" 2>/dev/null || true; }

is_daemon() { [ "$(cat /proc/"$(cat pid)"/comm 2>/dev/null)" = "$1" ]; }
wait_for() { for _ in $(seq 600); do [ -e "$1" ] && return; sleep 0.05; done; false; }

@test "a daemon is recorded to its end; the exit status is the program's" {
  make_daemon
  for what in quick closes sleeps; do
    rm -f done
    run -7 timeout 60 "$SONDE" record -o trace -- ./daemon $what
    [ -e done ]  # sonde ended last
    [[ "$output" == *" 0 lost"* ]]
    [ "$(calls_of call)" -eq 1100 ]
    [ "$(calls_of many)" -eq 2 ]
    ! "$SONDE" report trace | grep 'still ran' || return 1
  done
  [ "$(grep -c 'sonde: ./daemon has ended; 1 process it started is still recorded (Ctrl-C ends the recording)' <<<"$output")" -eq 1 ]
  run -7 timeout 60 "$SONDE" record -q -o trace -- ./daemon sleeps
  [ -z "$output" ]
}

@test "a daemon is recorded to its end with --sum" {
  make_daemon
  run -7 timeout 60 "$SONDE" record --sum -o trace -- ./daemon sleeps
  [ -e done ]
  [ "$(calls_of call)" -eq 1100 ]
}

@test "a daemon that loads a library is not held up, and who became another program is not waited for" {
  make_daemon
  run -7 timeout 60 "$SONDE" record -o trace -- ./daemon loads
  [ -e done ]
  [ "$(calls_of call)" -eq 1100 ]
  run -7 timeout 20 "$SONDE" record -o trace -- ./daemon execs
  is_daemon sleep
  [ "$(calls_of call)" -eq 100 ]
}

@test "a daemon that does not end: Ctrl-C or SIGTERM ends the recording and not the daemon" {
  make_daemon
  for signal in INT TERM; do
    rm -f go done
    # A background job of a shell has SIGINT ignored.
    python3 -c 'import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execvp(sys.argv[1], sys.argv[1:])' \
      "$SONDE" record -o trace -- ./daemon waits >out 2>&1 &
    recorder=$!
    for _ in $(seq 600); do grep -q 'still recorded' out && break; sleep 0.05; done
    is_daemon daemon
    kill -$signal $recorder
    status=0
    wait $recorder || status=$?
    [ "$status" -eq 7 ]
    grep -qx 'sonde: note: 1 process still ran when the recording ended' out
    "$SONDE" report trace >report.out
    grep -qx 'note: 1 process still ran when the recording ended' report.out
    grep -q '^calls still running at the end: ' report.out
    [ "$(calls_of call)" -eq 100 ]
    [ "$(calls_of pause_here)" -eq 1 ]  # in which it was
    is_daemon daemon
    touch go
    wait_for done
  done
}

@test "who ends the program by a signal to sonde need not ask twice" {
  make_daemon
  "$SONDE" record -o trace -- ./daemon stays >out 2>&1 &
  recorder=$!
  wait_for pid
  kill -TERM $recorder
  status=0
  wait $recorder || status=$?
  [ "$status" -eq 143 ]
  is_daemon daemon
  grep -q '^sonde: note: 1 process still ran when the recording ended' out
  touch go
  wait_for done
}
