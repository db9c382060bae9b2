# What is typed wrong, and programs that cannot be recorded: one line that names it and says what to do.
load common
bats_require_minimum_version 1.5.0

# One line, from sonde.
one_error() { [[ "$output" == "sonde: "* ]] && [[ "$output" != *$'\n'* ]]; }

@test "a word that is no command: exit 2, the word, what is near, usage" {
  run -2 "$SONDE" recrod ./app
  [[ "${lines[0]}" == "sonde: 'recrod' is no command; did you mean record?" ]]
  [[ "$output" == *"usage: sonde record|report|"* ]]
  run -2 "$SONDE" foo
  [[ "${lines[0]}" == "sonde: 'foo' is no command" ]]
  touch app
  run -2 "$SONDE" app
  [[ "${lines[0]}" == *"to record a program: sonde record app" ]]
  run -2 "$SONDE"
  [[ "${lines[0]}" == "sonde: "* ]] && [[ "$output" == *record*report*list* ]]
}

@test "every error of the command line begins with sonde:" {
  for command in 'report --bogus' 'record' 'list' 'stack -p x' '--bogus' 'report --limit many' 'record --sum -s true' \
                 'report nowhere' 'check nowhere' 'dump nothing' 'stack -p 999999999'; do
    status=0
    "$SONDE" $command >out 2>&1 || status=$?
    [ "$status" -ne 0 ]
    [[ "$(head -1 out)" == "sonde: "* ]] || { echo "$command"; cat out; return 1; }
  done
}

@test "no word is swallowed" {
  for command in '--version extra' '--version report' '--help extra' 'check true extra' \
                 'dump table true extra' 'stack -p 1 core' 'stack core program extra' 'report trace extra' \
                 'report -f a trace extra' 'report --tid 1 2 3' 'report --json=maybe' \
                 'dump table --stats --at 0x10 true' 'dump extra'; do
    run "$SONDE" $command
    [ "$status" -eq 2 ] || { echo "$command: $status $output"; return 1; }
    [[ "${lines[0]}" == "sonde: "* ]]
  done
  run -0 "$SONDE" --version
  run -0 "$SONDE" --help
  run -0 "$SONDE" --help report
  [ "$output" = "$("$SONDE" report --help)" ]
}

@test "./dev build names its presets, and how to choose the number of compilers" {
  dev=$BATS_TEST_DIRNAME/../../dev
  presets=$(cd "$(dirname "$dev")" && cmake --list-presets | sed -n 's/^  "\(.*\)" .*/\1/p' | paste -sd, | sed 's/,/, /g')
  run -1 "$dev" build -j2
  [ "$output" = "dev: build: '-j2' is no preset; there are: $presets. So many compilers at once: SONDE_JOBS=2 ./dev build" ]
  run -1 "$dev" build gcc -j2
  [[ "$output" == *"not also '-j2'"*SONDE_JOBS* ]]
}

@test "a word that is missing is named, with what it may be" {
  run -2 "$SONDE" record -o trace
  [ "${lines[0]}" = "sonde: PROGRAM or -p PID is required" ]
  [ "${lines[1]}" = "sonde record --help says more" ]
  run -2 "$SONDE" dump
  [ "${lines[0]}" = "sonde: sonde dump wants one of: table" ]
}

@test "what is no program is said to be what it is" {
  mkdir folder
  run -126 "$SONDE" record ./folder
  one_error && [[ "$output" == *"it is a folder"* ]]
  echo data >file
  run -126 "$SONDE" record ./file
  one_error && [[ "$output" == *"not executable"*"chmod +x ./file"* ]]
  run -127 "$SONDE" record ./nowhere
  one_error && [[ "$output" == *"No such file"* ]]
  run -127 "$SONDE" record no-such-program
  one_error && [[ "$output" == *"PATH"* ]]
  printf '#! /no/such/shell -e\n' >script
  printf '#!/bin/sh\r\n' >windows
  printf '#!%s\n' "$PWD/file" >plain
  chmod +x script windows plain
  run -127 "$SONDE" record ./script
  one_error && [[ "$output" == *"interpreter /no/such/shell of script './script' does not exist"* ]]
  run -127 "$SONDE" record ./windows
  one_error && [[ "$output" == *"carriage return"* ]]
  run -126 "$SONDE" record ./plain
  one_error && [[ "$output" == *"interpreter $PWD/file of script './plain' is not executable"* ]]
}

@test "a program that is cut off: refused, or the signal that exec ends it by, with the status of the untraced one" {
  echo 'int main(void) { return 0; }' >app.c
  gcc app.c -o app
  for size in 64 600; do
    head -c $size app >cut && chmod +x cut
    run -126 timeout 20 "$SONDE" record ./cut
    [ "$output" = "sonde: './cut' is cut off: no program" ]
  done
  head -c 4096 app >cut
  untraced=0
  ./cut || untraced=$?
  [ "$untraced" -eq 139 ]
  run -139 timeout 20 "$SONDE" record ./cut
  one_error && [[ "$output" == "sonde: cannot run './cut': the kernel ended it by signal 11 (Segmentation fault) before its first instruction"* ]]
  head -c $(($(stat -c %s app) - 1)) app >cut
  run -1 timeout 20 "$SONDE" record ./cut
  [ "$output" = "sonde: $PWD/cut is cut off: its section headers at $(readelf -h app | sed -n 's/.*Start of section headers: *\([0-9]*\).*/\1/p' | xargs printf '%#x') lie beyond its end" ]
}

@test "programs of other kinds are refused with their kind" {
  echo 'int main(void) { return 0; }' >app.c
  gcc -static -o static app.c
  gcc -static-pie -o static-pie app.c
  gcc -Wl,--dynamic-linker=/no/such/loader -o loader app.c
  cp static other && printf '\xb7' | dd of=other bs=1 seek=18 conv=notrunc 2>/dev/null  # e_machine: AArch64
  for program in static static-pie; do
    run -126 "$SONDE" record ./$program
    one_error && [[ "$output" == *"statically linked"* ]]
  done
  run -127 "$SONDE" record ./loader
  one_error && [[ "$output" == *"loader /no/such/loader of program './loader' does not exist"* ]]
  run -126 "$SONDE" record ./other
  one_error && [[ "$output" == *"not an x86-64 program"* ]]
}

@test "a program whose loader is another C library's is refused" {
  # The loader is glibc's, but does not begin as it does.
  cp "$(readlink -f /lib64/ld-linux-x86-64.so.2)" loader
  python3 - <<'P'
import struct
with open("loader", "r+b") as f:
    head = f.read(64)
    entry, headers = struct.unpack_from("<QQ", head, 24)
    for i in range(struct.unpack_from("<H", head, 56)[0]):
        f.seek(headers + 56 * i)
        kind, flags, offset, address, _, size = struct.unpack("<IIQQQQ", f.read(40))
        if kind == 1 and address <= entry < address + size:
            f.seek(offset + entry - address)
            assert f.read(4) == b"\x48\x89\xe7\xe8"
            f.seek(offset + entry - address)
            f.write(b"\x31\xed\x48\x89\xe7\x90\x90\x90")
P
  echo 'int main(void) { return 0; }' >app.c
  gcc -Wl,--dynamic-linker="$PWD/loader" -o app app.c
  status=0
  timeout 20 "$SONDE" record ./app >out 2>&1 || status=$?
  [ "$status" -eq 1 ]
  grep -q "^sonde: the program's loader is not glibc's" out
  [ "$(wc -l <out)" -eq 1 ]
}

@test "a program that becomes another one: the command that records that one" {
  cat >script <<'P'
#!/usr/bin/env python3
import time
time.sleep(0.3)
print("done")
P
  chmod +x script
  PATH=/usr/bin:/bin run -0 "$SONDE" record -o trace -- ./script 'an argument'
  [[ "$output" == *"became another one by exec ($(readlink -f /usr/bin/python3))"* ]]
  [[ "$output" == *"sonde record -- python3 ./script 'an argument'"* ]]
  "$SONDE" report trace | grep -q '^note: the program became another one by exec'
  run -5 "$SONDE" record -o trace -- sh -c 'exec sh -c "exit 5"'
  run -0 "$SONDE" record -o trace -- sh -c 'exec true'
  [[ "$output" == *"became another one by exec (true)"* ]] || [[ "$output" == *"became another one by exec ("*"/true)"* ]]
  cat >again <<'P'
#!/bin/sh
[ -z "$AGAIN" ] && AGAIN=1 exec "$0" "$@"
sleep 0.3
P
  chmod +x again
  run -0 "$SONDE" record -o trace -- ./again
  [[ "$output" == *"became another one by exec ($(readlink -f /bin/sh))"*"sonde record -- /bin/sh ./again"* ]]
  # One that ends as what it was, also under another name.
  run -0 "$SONDE" record -o trace -- /usr/bin/python3 -c 'import time; open("/proc/self/comm", "w").write("renamed"); time.sleep(0.1)'
  [[ "$output" != *"became another"* ]]
  cat >renamed.c <<'C'
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>
int main(int argc, char** argv) {
  (void)argv;
  prctl(PR_SET_NAME, "renamed");
  if (argc == 2) raise(SIGKILL);
  if (argc == 3) _exit(0);
  return 0;
}
C
  gcc renamed.c -o renamed
  for arguments in '' kill 'exit now'; do
    "$SONDE" record -o trace -- ./renamed $arguments >renamed.out 2>&1 || true
    ! grep 'became another' renamed.out || return 1
  done
  run -0 "$SONDE" record -o trace -- bash -c '(exec true); true'
  [[ "$output" != *"became another"* ]]
}

@test "the man page and its template have no warnings" {
  command -v groff >/dev/null || skip "groff is not installed"
  for page in "$(dirname "$SONDE")/sonde.1" "$BATS_TEST_DIRNAME/../../docs/sonde.1.in"; do
    groff -man -Tutf8 -ww "$page" 2>&1 >/dev/null | tee warnings
    [ ! -s warnings ]
  done
}

@test "a library of the folder that is opened later: the error shows the pattern that works, and it does" {
  echo 'int run(int x) { return x + 1; }' >pl.c
  printf '#include <dlfcn.h>\nint main(void) { void *d = dlopen("./pl.so", RTLD_NOW); return ((int (*)(int))dlsym(d, "run"))(4); }\n' >opens.c
  gcc -shared -fPIC pl.c -o pl.so
  gcc opens.c -o opens
  run -2 "$SONDE" record -q -o trace -f pl.so:run ./opens
  [[ "$output" == *"a library that is loaded later is named by its path: -f './pl.so:run'"* ]]
  run -5 "$SONDE" record -q -o trace -f './pl.so:run' ./opens
  [ "$(calls_of run)" = 1 ]
}

@test "dump says by examples what it can print" {
  run -0 "$SONDE" dump --help
  [[ "$output" == *"sonde dump table ./app --at 0x1139"* ]]
}
