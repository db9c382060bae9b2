# `report --calls`: how its lines and its JSON belong to each other, and to the other views.
load common

# Ten calls of chosen functions with their stacks: work and leaf of a program that is stripped to its unwind ranges.
make_nested() {
  cat >nested.c <<'C'
#include <unistd.h>
static __attribute__((noinline)) int leaf(int x) { usleep(1000); return x + 1; }
static __attribute__((noinline)) int work(int x) { return leaf(x) + leaf(x + 1) + 1; }
int main(void) { volatile int s = 0; for (int i = 0; i < 3; i++) s += work(i); return 0; }
C
  gcc -O1 -g nested.c -o nested
}

@test "the JSON of calls has the stacks that the text has, frame by frame as sonde stack writes them" {
  make_nested
  "$SONDE" record -q -s -f work -f leaf -o trace ./nested
  "$SONDE" report --calls trace >text
  "$SONDE" report --calls --json trace >json
  nm nested >symbols
  python3 - <<'CHECK'
import json, re
calls = json.load(open("json"))["calls"]
assert [c["name"] for c in calls] == ["work", "leaf", "leaf"] * 3, calls
text, at = [], {}
for line in open("text"):
    if frame := re.match(r" +#\d+ +(\S+)\+(0x[0-9a-f]+)", line):
        text[-1].append((frame[1], int(frame[2], 16)))
    elif re.match(r" +[0-9.]+ us ", line):
        text.append([])
for address, _, name in (line.split() for line in open("symbols") if len(line.split()) == 3):
    at[name] = int(address, 16)
for call, lines in zip(calls, text, strict=True):
    frames = call["frames"]
    assert (call["verdict"], call["reason"]) == ("reliable", "end"), call
    assert [(f["function"], f["offset"]) for f in frames] == lines, (frames, lines)
    assert frames[0]["function"] == call["name"] and frames[0]["offset"] == 0 and not frames[0]["is_return"]
    names = [f["function"] for f in frames]
    wanted = ["leaf", "work", "main"] if call["name"] == "leaf" else ["work", "main"]
    assert names[:len(wanted)] == wanted and names[-1] == "_start", names
    own = [f for f in frames if f["file"].endswith("/nested")]
    assert len({f["build_id"] for f in own}) == 1 and len(own[0]["build_id"]) == 40, own
    bias = {int(f["pc"], 16) - f["offset"] - at[f["function"]] for f in own}
    assert len(bias) == 1 and bias.pop() % 4096 == 0, own
    assert all(f["verdict"] == "reliable" and f["flags"] in ([], ["recovered_return"]) for f in frames), frames
    assert frames[-1]["reason"] == "end" and frames[1]["is_return"], frames
# Each leaf lies in the work before it.
assert [c["parent"] for c in calls] == [None, 0, 0, None, 3, 3, None, 6, 6], calls
CHECK
  # A call that the view leaves out takes its stack with it.
  python3 -c '
import json
times = sorted(c["duration_ns"] for c in json.load(open("json"))["calls"])
print((times[3] + times[4]) / 2e3)' >between
  "$SONDE" report --calls --min-time "$(cat between)" trace | grep -E ' us .* (work|leaf)$|#0 ' >longer
  [ "$(grep -c ' us ' longer)" = 5 ]
  [ "$(sed -E 's/.* us //; s/.*#0 +//; s/\+0x0//; s/.* //' longer | uniq -c | awk '$1 % 2' | wc -l)" = 0 ]
  [ "$(grep -c '#0 ' longer)" = 5 ]
  # What was recorded without stacks has no such keys.
  "$SONDE" record -q -f work -o trace ./nested
  "$SONDE" report --calls --json trace | python3 -c '
import json, sys
for call in json.load(sys.stdin)["calls"]: assert "frames" not in call and "verdict" not in call, call'
}

@test "frames of a stripped program are named as its calls are" {
  make_nested
  strip nested
  "$SONDE" record -q -s -o trace ./nested
  "$SONDE" report --calls --json trace | python3 -c '
import json, sys
calls = [c for c in json.load(sys.stdin)["calls"] if c["name"].startswith("nested+0x")]
assert len(calls) >= 10, calls
names = {c["name"] for c in calls}
for call in calls:
    assert call["frames"][0]["function"] == call["name"] and call["frames"][0]["offset"] == 0, call
    if call["parent"] is not None and call["depth"] > 1:
        assert call["frames"][1]["function"] in names and 0 < call["frames"][1]["offset"] < 4096, call'
  "$SONDE" report --calls trace | grep -qE '#1 +nested\+0x[0-9a-f]+\+0x[0-9a-f]+$'
}

@test "how long a call took that a longjmp left is the same in all views" {
  cat >jumps.c <<'C'
#include <setjmp.h>
#include <unistd.h>
static jmp_buf back;
__attribute__((noinline)) void inner(void) { longjmp(back, 1); }
__attribute__((noinline)) void outer(void) { inner(); __asm__ volatile(""); }
__attribute__((noinline)) void later(void) { usleep(60000); }
int main(void) {
  if (!setjmp(back)) outer();
  usleep(20000);
  later();
  return 0;
}
C
  gcc -O1 jumps.c -o jumps
  "$SONDE" record -q -f main -f outer -f inner -f later -o trace ./jumps
  for view in --calls --stats ""; do "$SONDE" report --json $view trace >view$view; done
  "$SONDE" report --calls trace >text
  python3 - <<'CHECK'
import json, re
calls = {c["name"]: c for c in json.load(open("view--calls"))["calls"]}
stats = {f["name"]: f for f in json.load(open("view--stats"))["functions"]}
tree = {}
def walk(nodes):
    for n in nodes:
        tree[n["name"]] = n
        walk(n["children"])
walk(json.load(open("view"))["trees"][0]["roots"])
assert set(calls) == set(stats) == set(tree) == {"main", "outer", "inner", "later"}
for name, call in calls.items():
    times = call["duration_ns"], stats[name]["total_ns"], tree[name]["total_ns"]
    assert max(times) - min(times) <= 1, (name, times)
    assert stats[name]["abandoned"] == tree[name]["abandoned"] == (call["exit"] == "abandoned") == (name in ("outer", "inner"))
ends = {name: call["at_ns"] + call["duration_ns"] for name, call in calls.items()}
assert abs(ends["outer"] - calls["later"]["at_ns"]) <= 2 and ends["outer"] < ends["main"], ends
shown = re.search(r"us +([0-9.]+) ms +outer  \[abandoned\]", open("text").read())
assert abs(float(shown[1]) - calls["outer"]["duration_ns"] / 1e6) <= 1, shown[0]
CHECK
}

@test "a call below what runs on another stack says whose it is" {
  cat >alternate.c <<'C'
#include <setjmp.h>
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>
static sigjmp_buf back;
__attribute__((noinline)) void handler(int n) { siglongjmp(back, n); }
__attribute__((noinline)) void crash(void) { *(volatile int*)8 = 1; }
__attribute__((noinline)) void later(void) { usleep(20000); }
int main(void) {
  stack_t stack = {.ss_sp = malloc(65536), .ss_size = 65536};
  sigaltstack(&stack, 0);
  struct sigaction action = {.sa_handler = handler, .sa_flags = SA_ONSTACK};
  sigaction(SIGSEGV, &action, 0);
  if (!sigsetjmp(back, 1)) crash();
  later();
  later();
  return 0;
}
C
  gcc -O1 alternate.c -o alternate
  "$SONDE" record -q -f main -f crash -f handler -f later -o trace ./alternate
  "$SONDE" report --calls trace | sed -nE 's/^ *([0-9.]+ us +\S+ [mun]?s)?  ( *\S.*)$/\2/p' | grep -E 'main|crash|handler|later' >lines
  cat lines
  [ "$(sed -E 's/^ +//; s/  \[.*ed\]//' lines | xargs -d '\n' | sed 's/  / /g')" = "main crash handler main [goes on] later later" ]
  "$SONDE" report --calls --json trace | python3 -c '
import json, sys
calls = json.load(sys.stdin)["calls"]
assert [c["name"] for c in calls] == ["main", "crash", "handler", "later", "later"], calls
assert [c["parent"] for c in calls] == [None, 0, None, 0, 0], calls
# It ended when main went on, and not with the program: whatever the call that it interrupted was.
main, crash, handler, later = calls[:4]
assert handler["exit"] == crash["exit"] == "abandoned", calls
for call in handler, crash: assert abs(call["at_ns"] + call["duration_ns"] - later["at_ns"]) <= 2, calls'
  for how in '' --sum; do
    "$SONDE" record -q $how -f main -f handler -f later -o trace ./alternate
    "$SONDE" report --stats --json trace | python3 -c '
import json, sys
stats = {f["name"]: f for f in json.load(sys.stdin)["functions"]}
assert stats["handler"]["abandoned"] == 1 and stats["handler"]["total_ns"] < stats["main"]["total_ns"] / 4, stats'
  done
}
