# `sonde stack`: what a user sees of a process and of a core file, and what the exit status says.
load common
bats_require_minimum_version 1.5.0

teardown() {
  [ -z "$target" ] || kill "$target" 2>/dev/null || true
}

sleeper() {
  sleep 60 3>&- &
  target=$!
  until [ "$(cat /proc/$target/comm)" = sleep ] && grep -q '^State:.*S' /proc/$target/status; do :; done
}

@test "a sleeping process: from the system call to _start, exit status 0, and it runs on" {
  sleeper
  run --separate-stderr "$SONDE" stack --reliable -p "$target"
  [ "$status" -eq 0 ]
  [[ "${lines[0]}" == "thread $target (sleep): reliable" ]]
  [[ "${lines[1]}" =~ ^\#0\ +0x[0-9a-f]{16}\ .*nanosleep.*\ \(libc\.so\.6\)\ \[P\]$ ]]
  [[ "$output" == *" __libc_start_main+"* ]]
  [ "${#lines[@]}" -ge 5 ]
  kill -0 "$target"
}

@test "JSON says the same" {
  sleeper
  "$SONDE" stack --json -p "$target" >stack.json
  python3 - "$target" <<'CHECK'
import json, sys
out = json.load(open("stack.json"))
(thread,) = out["threads"]
assert out["pid"] == thread["tid"] == int(sys.argv[1]), out
assert thread["reliable"] and thread["reason"] == "end" and out["problems"] == []
assert all(f["reliable"] and f["file"] for f in thread["frames"])
assert [f["is_return"] for f in thread["frames"]] == [False] + [True] * (len(thread["frames"]) - 1)
assert thread["frames"][-1]["reason"] == "end"
CHECK
}

@test "a core file; a cut stack is not reliable: exit status 3" {
  sleeper
  gcore -o core "$target" >/dev/null 2>&1 || skip "gcore (gdb) is not installed"
  "$SONDE" stack -p "$target" >live
  "$SONDE" stack "core.$target" >dead
  diff live dead
  run --separate-stderr -3 "$SONDE" stack --reliable --max-frames 2 "core.$target"
  [[ "${lines[0]}" == *"not reliable: depth-limit at #1" ]]
  run --separate-stderr -0 "$SONDE" stack --max-frames 2 "core.$target"
}

@test "what cannot be done is said in one line" {
  run -1 "$SONDE" stack -p 4194303
  [ "$output" = "sonde: no process with id 4194303" ]
  run -1 "$SONDE" stack "$SONDE"
  [[ "$output" == *"not a core file"* ]]
  run -2 "$SONDE" stack
  [[ "$output" == *"-p PID"* ]]
  sleeper
  strace -qq -o /dev/null -p "$target" 3>&- &
  tracer=$!
  until ! grep -q 'TracerPid:[[:space:]]0' /proc/$target/status; do kill -0 $tracer || skip "strace is not installed"; done
  run -1 "$SONDE" stack -p "$target"
  kill $tracer
  [[ "$output" == "sonde: process $target (sleep) is already traced by process $tracer (strace)"* ]]
}

@test "help has examples" {
  run -0 "$SONDE" stack --help
  [[ "$output" == *"Examples:"*"sonde stack -p 4711"* ]]
}
