# `sonde stack`: what a user sees of a process and of a core file, and what the exit status says.
load common
bats_require_minimum_version 1.5.0

# A folder where another user may go, too, with sonde in it.
in_the_open() {
  open=$(mktemp -d /tmp/sonde-stack.XXXXXX)
  chmod 755 "$open" && cp "$SONDE" "$open/sonde" && chmod 755 "$open/sonde" && cd "$open"
  setpriv --reuid=65534 --clear-groups ./sonde --version >/dev/null 2>&1 || skip "another user cannot run sonde here"
}

teardown() {
  [ -z "$open" ] || rm -rf "$open"
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
  grep -qE '^#0 +0x[0-9a-f]{16} .*nanosleep.* \(libc\.so\.6\)( at \S+:[0-9]+)? \[P\]$' <<<"$output"
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
assert thread["verdict"] == "reliable" and thread["reason"] == "end" and out["problems"] == []
assert all(f["verdict"] == "reliable" and f["file"] and f["flags"] == [] for f in thread["frames"])
assert [f["source"] for f in thread["frames"]] == ["regs_pc"] + ["frame"] * (len(thread["frames"]) - 1)
import subprocess
for f in thread["frames"]:
    notes = subprocess.run(["readelf", "-n", f["file"]], stdout=subprocess.PIPE, text=True).stdout
    assert f["file"] == "[vdso]" or "Build ID: " + f["build_id"] in notes, f
assert 0 < out["longest_pause_us"] < 5e6, out["longest_pause_us"]
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

# A program that stands in an inlined call, in a library call, in a library of its own.
build_inlined() {
  cat >lib.c <<'C'
#include <unistd.h>
__attribute__((noinline)) int lib_wait(int (*then)(int)) {
  int n = then(3);
  __asm__ volatile("");
  return n;
}
C
  cat >app.c <<'C'
#include <unistd.h>
int lib_wait(int (*then)(int));
static inline __attribute__((always_inline)) int inner(int x) {
  int n = pause();
  __asm__ volatile("");
  return n + x;
}
static inline __attribute__((always_inline)) int outer(int x) {
  return inner(x + 1) * 2;
}
static __attribute__((noinline)) int callee(int x) {
  int n = outer(x);
  __asm__ volatile("");
  return n;
}
int main(void) { return lib_wait(callee); }
C
  gcc -O2 -g -shared -fPIC -o libown.so lib.c
  gcc -O2 -g -o app app.c -L. -lown -Wl,-rpath,"$PWD"
}

# start COMMAND...: runs it as $target until it sleeps in pause().
start() {
  "$@" 3>&- >/dev/null 2>&1 &
  target=$!
  until grep -q '^State:.*S' "/proc/$target/status" && [ "$(cut -d' ' -f1 "/proc/$target/syscall")" = 34 ]; do kill -0 $target; done
}

@test "inlined calls are rows of their own, with lines, as eu-stack has them" {
  build_inlined
  start ./app
  "$SONDE" stack -p "$target" | tee out
  grep -qE "^ +inlined +inner at .*/app.c:4$" out
  grep -qE "^ +inlined +outer at .*/app.c:9$" out
  grep -qE "^#[0-9]+ +0x[0-9a-f]+ callee\+0x[0-9a-f]+ \(app\) at .*/app.c:12$" out
  grep -qE "^#[0-9]+ +0x[0-9a-f]+ lib_wait\+0x[0-9a-f]+ \(libown.so\) at .*/lib.c:3$" out
  [ "$(grep -A1 'inlined.*inner' out | tail -1 | grep -c outer)" = 1 ]
  "$SONDE" stack --no-inline -p "$target" >plain
  ! grep inlined plain
  diff <(grep -v ' inlined ' out) plain
  "$SONDE" stack --json -p "$target" >json
  eu-stack -i -s -p "$target" >eu || skip "eu-stack is not installed"
  python3 - <<'CHECK'
import json, re
(thread,) = json.load(open("json"))["threads"]
ours = []
for f in thread["frames"]:
    ours += [(row["function"], row.get("source_line")) for row in f["inlined"]]
    if "source_file" in f:
        ours.append((f["function"], f["source_line"]))
theirs, name = [], None
for line in open("eu"):
    if m := re.match(r"#\d+ +0x[0-9a-f]+(?: - 1)? +(\S+)", line):
        name = m[1]
    elif m := re.match(r" +(/\S+/(?:app|lib)\.c):(\d+)", line):
        theirs.append((name, int(m[2])))
assert [o for o in ours if o[0] in ("inner", "outer", "callee", "main", "lib_wait")] == theirs, (ours, theirs)
assert len(theirs) == 4, theirs
CHECK
}

@test "a program and a library that were deleted, or replaced by others, are read as they were" {
  build_inlined
  start ./app
  "$SONDE" stack --json -p "$target" >before
  rm app
  mv libown.so old.so
  gcc -O0 -g -shared -fPIC -DOTHER -o libown.so lib.c
  "$SONDE" stack --json -p "$target" >after
  python3 - <<'CHECK'
import json
before, after = ([[(f["pc"], f.get("function"), f["build_id"], f.get("source_line"), f["inlined"], f["verdict"])
                   for f in t["frames"]] for t in json.load(open(name))["threads"]] for name in ("before", "after"))
assert before == after, (before, after)
assert all(f[-1] == "reliable" for f in before[0])
CHECK
}

@test "without privileges too, by what is loaded of them" {
  [ "$(id -u)" = 0 ] || skip "only root can become somebody else"
  [ "$(cat /proc/sys/kernel/yama/ptrace_scope 2>/dev/null || echo 0)" = 0 ] || skip "Yama forbids it"
  in_the_open
  build_inlined
  start setpriv --reuid=65534 --clear-groups --inh-caps=-all ./app
  rm app libown.so
  HOME=/nonexistent run --separate-stderr -0 setpriv --reuid=65534 --clear-groups --inh-caps=-all ./sonde stack --reliable -p "$target"
  [[ "$output" == *" lib_wait+0x"*" (libown.so)"*"__libc_start_main"* ]]
  [ -z "$stderr" ]
}

@test "a process in another mount namespace: its files by its own root" {
  [ "$(id -u)" = 0 ] || skip "only root may make namespaces"
  build_inlined
  mkdir inside
  gcc -O2 -g -o plain -x c - <<'C'
#include <unistd.h>
static __attribute__((noipa)) int only_there(int x) { int n = pause(); __asm__ volatile(""); return n + x; }
int main(void) { return only_there(1); }
C
  unshare -m true 2>/dev/null || skip "no namespaces permitted here"
  unshare -m sh -c 'mount -t tmpfs none inside && cp plain inside/ && exec inside/plain' 3>&- >/dev/null 2>&1 &
  target=$!
  until [ "$(cat /proc/$target/comm)" = plain ] && grep -q '^State:.*S' /proc/$target/status; do kill -0 $target; done
  [ ! -e inside/plain ]
  run --separate-stderr -0 "$SONDE" stack --reliable -p "$target"
  [[ "$output" == *" only_there+0x"*" (plain) at "* ]]
  [ -z "$stderr" ]
}

@test "a thread stands still for as long as its own stack needs, however much lies behind it" {
  cat >fiber.c <<'C'
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>
#include <unistd.h>
static ucontext_t own, fiber;
static void inside(void) { for (;;) pause(); }
static void deep(int n) { volatile char room[1 << 16]; room[0] = 1; if (n) deep(n - 1); else inside(); room[1] = 2; }
static void body(void) { deep(100); }
int main(void) {
  // One mapping: the fiber's stack, and 600 MB of data behind it.
  char* all = aligned_alloc(4096, 800u << 20);
  memset(all, 1, 800u << 20);
  getcontext(&fiber);
  fiber.uc_stack.ss_sp = all, fiber.uc_stack.ss_size = 64 << 20, fiber.uc_link = &own;
  makecontext(&fiber, body, 0);
  return swapcontext(&own, &fiber);
}
C
  gcc -O1 -g -o fiber fiber.c
  start ./fiber
  "$SONDE" stack --json --reliable -p "$target" >json || [ $? -eq 3 ]
  python3 - <<'CHECK'
import json
out = json.load(open("json"))
(thread,) = out["threads"]
names = [f.get("function") for f in thread["frames"]]
assert names.count("deep") == 101 and "body" in names, names
assert all(f["verdict"] == "reliable" for f in thread["frames"][:-1])
# 8 MB were needed, 800 MB would take more than this.
assert out["longest_pause_us"] < 100000, out["longest_pause_us"]
CHECK
}

@test "threads that come and go, and a leader that has ended" {
  cat >leader.c <<'C'
#include <pthread.h>
#include <unistd.h>
static void* stay(void* arg) { for (;;) pause(); return arg; }
int main(void) { pthread_t t; pthread_create(&t, 0, stay, 0); pthread_exit(0); }
C
  gcc -O1 -pthread -o leader leader.c
  ./leader 3>&- &
  target=$!
  until grep -q '^State:.*Z' /proc/$target/status && [ "$(ls /proc/$target/task | wc -l)" = 2 ]; do kill -0 $target; done
  run --separate-stderr -0 "$SONDE" stack --reliable -p "$target"
  [[ "$output" == "thread "*" (leader): reliable"*" stay+0x"* ]]
  [ "$(grep -c '^thread ' <<<"$output")" -eq 1 ]
}

@test "what may not be looked into: why, and what to do" {
  sleeper
  kernel=$(for p in /proc/[0-9]*; do [ -z "$(cat $p/cmdline 2>/dev/null)" ] && ! grep -q '^VmSize' $p/status 2>/dev/null && grep -q '^State:.*[SI]' $p/status 2>/dev/null && basename $p; done | head -1)
  if [ -n "$kernel" ]; then
    run -1 "$SONDE" stack -p "$kernel"
    [[ "$output" == "sonde: process $kernel ("*") is a thread of the kernel: it has no stack of a program" ]]
  fi
  bash -c 'sleep 1 & exec sleep 30' 3>&- &  # ends when bash, which would reap it, is no more
  parent=$!
  until zombie=$(pgrep -P $parent -r Z) && [ -n "$zombie" ]; do kill -0 $parent; done
  run -1 "$SONDE" stack -p "$zombie"
  [[ "$output" == "sonde: process $zombie (sleep) has ended: it is a zombie that its parent, process $parent,"* ]]
  kill $parent
  [ "$(id -u)" = 0 ] || skip "only root can become somebody else"
  in_the_open
  run -1 setpriv --reuid=65534 --clear-groups ./sonde stack -p "$target"
  [ "$output" = "sonde: process $target (sleep) may not be looked into: it belongs to user 0; try as that user or as root" ]
  setpriv --reuid=65534 --clear-groups sleep 30 3>&- &
  other=$!
  until grep -q '^Uid:[[:space:]]*65534' /proc/$other/status && [ "$(cat /proc/$other/comm)" = sleep ]; do kill -0 $other; done
  scope=$(cat /proc/sys/kernel/yama/ptrace_scope 2>/dev/null || echo 0)
  run setpriv --reuid=65534 --clear-groups ./sonde stack -p "$other"
  kill $other
  if [ "$scope" = 0 ]; then [ "$status" -eq 0 ]; else [[ "$output" == *"yama/ptrace_scope is $scope"* ]]; fi
}

make_core() {
  command -v gdb >/dev/null || skip "gdb is not installed"
  build_inlined
  start ./app
  gcore -o core "$target" >/dev/null 2>&1
  mv "core.$target" core
  "$SONDE" stack --json core >whole
  python3 -c '
import json
(t,) = json.load(open("whole"))["threads"]
assert t["verdict"] == "reliable" and [f["inlined"] for f in t["frames"] if f.get("function") == "callee"][0]'
}

@test "a core without its program or a library: found by build id, else unknown code, and named once" {
  make_core
  mkdir away
  mv libown.so away/
  "$SONDE" stack --json core >gone 2>err
  cat err;   [ "$(wc -l <err)" -eq 1 ]
  grep -q "^sonde: note: .*/libown.so cannot be opened: No such file or directory, wanted is [0-9a-f]\{40\}; frames in it are unknown code$" err
  python3 - <<'CHECK'
import json
whole, gone = (json.load(open(n))["threads"][0] for n in ("whole", "gone"))
first = [f.get("function") for f in whole["frames"]].index("lib_wait")
assert gone["verdict"] == "unreliable" and gone["reason"] == "unknown-code", gone["reason"]
assert [f["pc"] for f in gone["frames"][:first + 1]] == [f["pc"] for f in whole["frames"][:first + 1]]
assert all(f["verdict"] == "reliable" for f in gone["frames"][:first])
frame = gone["frames"][first]
assert frame["verdict"] == "unreliable" and frame["reason"] == "unknown-code" and frame["file"].endswith("/libown.so"), frame
assert all(f["verdict"] == "guessed" for f in gone["frames"][first + 1:])
CHECK
  run --separate-stderr -3 "$SONDE" stack --reliable core
  # Another build under its name.
  gcc -O0 -g -shared -fPIC -o libown.so lib.c
  "$SONDE" stack core >other 2>err
  cat err;   [ "$(wc -l <err)" -eq 1 ]
  grep -qE "^sonde: note: .*/libown.so is not the file that the process had mapped: its build id is [0-9a-f]{40}, wanted is [0-9a-f]{40}; frames in it are unknown code$" err
  grep -q "^thread .*: not reliable: unknown-code at #" other
  # Kept elsewhere by its build id.
  id=$(readelf -n away/libown.so | awk '/Build ID/{print $3}')
  mkdir -p "kept/.build-id/${id:0:2}"
  mv away/libown.so "kept/.build-id/${id:0:2}/${id:2}"
  "$SONDE" stack --json --debug-dir kept core >found 2>err
  [ ! -s err ]
  diff <(grep -v '"file"' whole) <(grep -v '"file"' found)
  # The program elsewhere, and a wrong one.
  mv app away/
  "$SONDE" stack --json --debug-dir kept core away/app >found
  diff <(grep -v '"file"' whole) <(grep -v '"file"' found)
  "$SONDE" stack --debug-dir kept core /bin/true >found 2>err
  grep -q "^sonde: note: /bin/true is not the file that the process had mapped: .*(for .*/app)" err
}

@test "a core without build ids is matched by the files' headers; without those nothing is believed" {
  command -v gdb >/dev/null || skip "gdb is not installed"
  gcc -O1 -Wl,--build-id=none -o app -x c - <<'C'
#include <unistd.h>
static __attribute__((noipa)) int here(int x) { int n = pause(); __asm__ volatile(""); return n + x; }
int main(void) { return here(1); }
C
  start ./app
  gcore -o core "$target" >/dev/null 2>&1
  mv "core.$target" core
  run --separate-stderr -0 "$SONDE" stack --reliable core
  [[ "$output" == *" here+0x"* ]]
  # The core's copy of the program's headers is taken out.
  python3 - "$PWD/app" <<'P'
import struct, sys
data = bytearray(open("core", "rb").read())
head = open(sys.argv[1], "rb").read(0x400)
offset, count = struct.unpack_from("<Q", data, 32)[0], struct.unpack_from("<H", data, 56)[0]
changed = 0
for i in range(count):
    at = offset + 56 * i
    kind, flags, where, address, _, size, room, align = struct.unpack_from("<IIQQQQQQ", data, at)
    if kind == 1 and size and bytes(data[where:where + 0x400]) == head:
        struct.pack_into("<Q", data, at + 32, 0)
        changed += 1
assert changed == 1, changed
open("bare", "wb").write(data)
P
  run --separate-stderr -3 "$SONDE" stack --reliable bare
  [[ "$stderr" == "sonde: note: $PWD/app: the core has nothing to recognise the file by; it may be another, so frames in it are not believed" ]]
  [[ "${lines[0]}" == *"not reliable: unknown-code at #"* ]]
  run --separate-stderr -0 "$SONDE" stack bare
  [[ "$output" == *" here+0x"*" unknown-code"* ]]
}

@test "a core that is cut off: what is missing; wherever it is cut, no stack is invented" {
  make_core
  # The kernel writes the notes before the memory, gcore behind it.
  mv core core.gcore
  python3 - <<'P'
import struct
data = open("core.gcore", "rb").read()
offset, count = struct.unpack_from("<Q", data, 32)[0], struct.unpack_from("<H", data, 56)[0]
assert offset == 64
end = 64 + 56 * count
headers, notes = [list(struct.unpack_from("<IIQQQQQQ", data, 64 + 56 * i)) for i in range(count)], b""
for h in headers:
    if h[0] == 4:
        h[2], notes = end, data[h[2]:h[2] + h[5]]
for h in headers:
    if h[0] == 1:
        h[2] += len(notes)
open("core", "wb").write(data[:64] + b"".join(struct.pack("<IIQQQQQQ", *h) for h in headers) + notes + data[end:])
P
  "$SONDE" stack --json core | diff whole -
  head -c $(($(stat -c %s core.gcore) / 2)) core.gcore >cut
  run -1 "$SONDE" stack cut
  [[ "$output" == "sonde: cut is cut off: it has "*"; the threads' registers are not among them" ]] && [[ "$output" != *$'\n'* ]]
  size=$(stat -c %s core)
  head -c $((size * 2 / 3)) core >cut
  "$SONDE" stack cut >out 2>err
  grep -qE "^sonde: note: cut is cut off: it has $((size * 2 / 3)) of [0-9]+ bytes, and lacks memory from 0x[0-9a-f]+ on \(of [0-9]+ of its [0-9]+ segments\)$" err
  head -c 300 core >tiny
  run -1 "$SONDE" stack tiny
  [[ "$output" == "sonde: tiny"* ]] && [[ "$output" != *$'\n'* ]]
  for percent in 1 10 30 50 70 90 99; do
    head -c $((size * percent / 100)) core >cut
    status=0
    timeout 20 "$SONDE" stack --json cut >out 2>err || status=$?
    [ "$status" -eq 1 ] || python3 - <<'CHECK'
import json
whole, cut = (json.load(open(n))["threads"][0]["frames"] for n in ("whole", "out"))
for ours, truth in zip(cut, whole):
    if ours["verdict"] != "reliable":
        break
    assert ours["pc"] == truth["pc"], (ours, truth)
CHECK
  done
}

@test "a process whose only thread waits for a vfork child is said to be so, and runs on" {
  gcc -O1 -o waiting -x c - <<'C'
#include <unistd.h>
int main(void) {
  if (vfork() == 0) sleep(8), _exit(0);  // until then the parent's memory is the child's
  return 7;
}
C
  ./waiting 3>&- &
  target=$!
  until grep -q '^State:.*D' /proc/$target/status; do kill -0 $target; done
  run -1 timeout 20 "$SONDE" stack -p "$target"
  [[ "$output" == "sonde: thread $target does not stop: it waits in the kernel for a vfork child or a device "* ]]
  status=0
  wait $target || status=$?
  [ "$status" -eq 7 ]
  target=
}

@test "a core says which signal ended the process" {
  command -v gdb >/dev/null || skip "gdb is not installed"
  gcc -O1 -g -o crash -x c - <<'C'
static __attribute__((noipa)) int bad(int* p) { *p = 1; return *p; }
int main(void) { return bad(0); }
C
  gdb -batch -nx -ex run -ex 'generate-core-file core' ./crash >/dev/null 2>&1 </dev/null
  run -0 "$SONDE" stack core
  [[ "${lines[0]}" =~ ^process\ [0-9]+:\ signal\ 11\ \(Segmentation\ fault\)$ ]]
  [[ "${lines[2]}" == "#0 "*" bad+0x"*" (crash) at "*"[P]" ]]
}

@test "-v says how long a thread stood still" {
  sleeper
  run --separate-stderr -0 "$SONDE" stack -v -p "$target"
  [[ "$stderr" =~ ^sonde:\ 1\ thread\;\ the\ longest\ pause\ of\ one\ was\ [0-9.]+\ us,\ the\ median\ [0-9.]+\ us$ ]]
}

@test "help has examples" {
  run -0 "$SONDE" stack --help
  [[ "$output" == *"Examples:"*"sonde stack -p 4711"* ]]
}

@test "threads that were preempted, between any two instructions: the pc is exact and the stack is certain" {
  cat >busy.c <<'C'
#include <pthread.h>
#include <signal.h>
#include <unistd.h>
static volatile long sum;
__attribute__((noinline)) long leaf(long n) { return n * 3 + sum; }
__attribute__((noinline)) long with_frame(long n) { volatile long room[8]; room[n & 7] = leaf(n); return room[n & 7] + leaf(n + 1); }
__attribute__((noinline)) void work(void) { for (long i = 0;; i++) sum += with_frame(i); }
static void* begin(void* unused) { work(); return unused; }
static void handler(int number) { (void)number; pause(); __asm__ volatile(""); }
int main(void) {
  pthread_t thread;
  signal(SIGUSR1, handler);
  pthread_create(&thread, 0, begin, 0);
  work();
}
C
  gcc -O2 -pthread -o busy busy.c
  ./busy 3>&- &
  target=$!
  until [ "$(ls /proc/$target/task | wc -l)" = 2 ]; do kill -0 $target; done
  for i in $(seq 40); do "$SONDE" stack --reliable --json -p "$target"; done >stacks
  kill -USR1 "$target"
  until [ "$(cut -d' ' -f1 "/proc/$target/syscall")" = 34 ]; do kill -0 $target; done
  "$SONDE" stack --reliable --json -p "$target" >in_handler
  python3 - <<'CHECK'
import json
decoder, text, at, where = json.JSONDecoder(), open("stacks").read(), 0, set()
while at < len(text.rstrip()):
    out, at = decoder.raw_decode(text, at)
    at += 1
    for thread in out["threads"]:
        names = [f.get("function") for f in thread["frames"]]
        assert thread["reason"] == "end" and "work" in names, thread
        first = thread["frames"][0]
        if first["function"] not in ("leaf", "with_frame", "work"):
            continue  # not begun yet
        assert first["source"] == "regs_pc" and not first["is_return"] and first["verdict"] == "reliable", first
        assert names[:names.index("work")] in ([], ["with_frame"], ["leaf", "with_frame"]), names
        where.add(first["pc"])
assert len(where) > 5, where
thread = next(t for t in json.load(open("in_handler"))["threads"] if "handler" in [f.get("function") for f in t["frames"]])
frames = thread["frames"]
at = [f.get("function") for f in frames].index("handler") + 2
assert thread["verdict"] == "reliable" and frames[at]["function"] in ("leaf", "with_frame", "work"), frames
assert frames[at]["source"] == "regs_pc" and not frames[at]["is_return"] and frames[at + 1]["is_return"], frames[at:]
CHECK
}

@test "more open calls than there are return entries: the stack is whole, each address once (S36)" {
  cat >many.c <<'C'
#include <stdlib.h>
#include <unistd.h>
__attribute__((noinline)) long down(long n) { if (!n) pause(); return n ? 1 + down(n - 1) : 0; }
int main(int argc, char** argv) { return argc + down(atol(argv[1])) < 0; }
C
  gcc -O1 -fno-optimize-sibling-calls -o many many.c
  (ulimit -s 65536; exec "$SONDE" record -q -o trace -f down -- ./many 140000) 3>&- &
  recorder=$!
  until target=$(pgrep -P $recorder -x many) && [ "$(cut -d' ' -f1 "/proc/$target/syscall")" = 34 ]; do kill -0 $recorder; sleep 0.1; done
  "$SONDE" stack --reliable --json --max-frames 200000 -p "$target" >json
  python3 - <<'CHECK'
import json
out = json.load(open("json"))
(thread,) = out["threads"]
names = [f.get("function") for f in thread["frames"]]
assert out["longest_pause_us"] < 2e6, out["longest_pause_us"]  # 131072 entries, each by itself, are more than that
assert thread["reason"] == "end" and names.count("down") == 140001 and "main" in names, (thread["reason"], names.count("down"))
hooked = sum("recovered_return" in f["flags"] for f in thread["frames"])
assert 100000 < hooked < 140000, hooked
down = [f for f in thread["frames"] if f.get("function") == "down"]
assert len({f["cfa"] for f in down}) == len(down)
assert len({f["pc"] for f in down}) <= 3
CHECK
}
