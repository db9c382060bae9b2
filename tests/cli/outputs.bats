# Where a trace goes with -o: only plain files are emptied, what else has a name is written to as it is or refused.
load common
bats_require_minimum_version 1.5.0

# The device's own number, so that a plain file in its place is noticed.
device() { stat -c '%F %t:%T' "$1"; }

@test "devices stay devices" {
  [ "$(id -u)" = 0 ] || skip "only root may make devices"
  mknod null c 1 3 && mknod full c 1 7 || skip "no devices permitted here"
  null=$(device null) full=$(device full)
  ln -s null link
  for output in null link; do
    run -3 "$SONDE" record -o $output -- sh -c 'exit 3'
    [[ "$output" != *"sonde report"* ]]
    [ "$(device null)" = "$null" ]
    [ -L link ]
  done
  run -1 "$SONDE" record -o full -- touch ran
  [[ "$output" == "sonde: write the trace to full: No space left on device" ]]
  [ "$(device full)" = "$full" ]
  [ ! -e ran ]
  "$SONDE" record -q -o trace -- true
  for view in report 'report --stats' 'report --calls --json'; do
    "$SONDE" $view trace >null
    status=0
    "$SONDE" $view trace >full 2>err || status=$?
    [ "$status" -eq 1 ]
    grep -q '^sonde: ' err
  done
  run -1 "$SONDE" report null
  [ "$(device null)" = "$null" ]
  [ "$(device full)" = "$full" ]
}

@test "a disk is refused" {
  [ "$(id -u)" = 0 ] || skip "only root may make devices"
  mknod disk b 7 250 || skip "no devices permitted here"
  run -1 "$SONDE" record -o disk -- touch ran
  [[ "$output" == "sonde: "* ]] && [[ "$output" != *$'\n'* ]]
  [ -b disk ]
  [ ! -e ran ]
}

@test "a pipe by name gets the whole trace" {
  mkfifo pipe
  cat pipe >trace &
  "$SONDE" record -q -o pipe -- sh -c 'exit 0'
  wait $!
  [ -p pipe ]
  "$SONDE" report trace | grep -q '^lost: none'
}

@test "a link is followed, not replaced" {
  ln -s target link
  echo 'much longer than a header' >target
  inode=$(stat -c %i target)
  for i in 1 2; do
    "$SONDE" record -q -o link -- true
    [ -L link ]
    [ "$(stat -c %i target)" = "$inode" ]
    "$SONDE" report target | grep -q '^lost: none'
    rm -f other && ln target other  # another name of the file stays one
  done
  cmp target other
}

@test "a folder as output is said to be one" {
  mkdir folder
  run -1 "$SONDE" record -o folder -- touch ran
  [ "$output" = "sonde: folder is a folder: choose a file with -o" ]
  [ ! -e ran ]
}

@test "a folder that is not there is named" {
  run -1 "$SONDE" record -o no/folder/trace -- touch ran
  [ "$output" = "sonde: write the trace to no/folder/trace: there is no folder no/folder/; make it first: mkdir -p no/folder/" ]
  [ ! -e ran ]
}

@test "two recordings do not write to one file" {
  "$SONDE" record -q -o trace -- sh -c 'echo >started; while [ ! -e stop ]; do sleep 0.05; done; exit 4' &
  first=$!
  until [ -e started ]; do kill -0 $first; sleep 0.05; done
  run -1 "$SONDE" record -o trace -- touch ran
  [ "$output" = "sonde: another recording is being written to trace: choose another file with -o" ]
  [ ! -e ran ]
  touch stop
  status=0
  wait $first || status=$?
  [ "$status" -eq 4 ]
  "$SONDE" report trace | grep -q '; the program ended with exit status 4'
  "$SONDE" record -q -o trace -- sh -c 'exit 0'
}

@test "descriptors that are closed stay the program's, and no message goes where they were" {
  cat >which.c <<'CODE'
#include <fcntl.h>
#include <stdio.h>
int main(void) {
  int open_ones = 0;
  for (int fd = 0; fd < 3; fd++) open_ones |= (fcntl(fd, F_GETFD) >= 0) << fd;
  return 10 + open_ones;
}
CODE
  gcc -O1 -o which which.c
  for closed in '<&-' '>&-' '2>&-' '<&- >&-' '<&- >&- 2>&-'; do
    expected=0 status=0
    eval "./which $closed" || expected=$?
    eval "timeout -k 2 20 '$SONDE' record -o trace -- ./which $closed" || status=$?
    [ "$status" -eq "$expected" ]
    [ "$(calls_of main)" -eq 1 ]
  done
  # A child that goes on is told of on standard error: not in the recorder's own memory.
  "$SONDE" record -o trace -- bash -c '(sleep 1; f() { :; }; for i in {1..300}; do f; done; echo late) & echo first' 2>&- >/dev/null
  [ "$(calls_of execute_command_internal)" -gt 300 ]
  "$SONDE" report trace | grep -q '^lost: none'
  for view in 'report trace' 'report --json trace' 'list ./which' 'nonsense'; do
    status=0
    "$SONDE" $view <&- >&- 2>&- || status=$?
    [ "$status" -ge 1 ] && [ "$status" -le 2 ]
  done
}
