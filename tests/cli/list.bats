# What `sonde list` says of a file, held against nm.
load common
bats_require_minimum_version 1.5.0

build_app() {
  cat >app.cc <<'CODE'
namespace net { __attribute__((noinline)) int send(int x) { return x * 3; } }
__attribute__((noinline)) static int hidden(int x) { return net::send(x) + 1; }
int main(int argc, char **) { return hidden(argc) == 0; }
CODE
  g++ -O1 -o app app.cc
}

@test "list: each function of a program, with nm's address" {
  build_app
  "$SONDE" list --json ./app >list.json
  nm ./app | python3 -c '
import json, sys
listed = {f["symbol"]: f for f in json.load(open("list.json"))["functions"]}
symbols = {p[2]: int(p[0], 16) for p in map(str.split, sys.stdin) if len(p) == 3 and p[1] in "tT"}
assert symbols.keys() == listed.keys(), symbols.keys() ^ listed.keys()
for name, address in symbols.items():
    assert listed[name]["address"] == address, name
assert listed["_ZN3net4sendEi"]["name"] == "net::send(int)"
assert listed["main"]["method"] in ("jump", "nops"), listed["main"]
assert listed["_start"]["entry_only"] == "returns elsewhere"'
}

@test "list: the summary counts the lines" {
  for file in sqlite3 /usr/lib/x86_64-linux-gnu/libsqlite3.so.0; do
    "$SONDE" list "$file" >out
    refused=$(grep -c '^0x[0-9a-f]* *[0-9]*  refused ' out) || true
    all=$(grep -c '^0x' out)
    grep -q "^$((all - refused)) of $all functions can be probed" out
    [ "$(sed -n 's/^ *\([0-9]*\)  \(by\|refused:\) .*/\1/p' out | awk '{ n += $1 } END { print n }')" -eq "$all" ]
  done
}

@test "list: patterns choose, as in record" {
  build_app
  run -0 "$SONDE" list ./app 'net::*'
  [[ "$output" == *"net::send(int)"* && "$output" != *main* ]]
  run -0 "$SONDE" list ./app '!net::*'
  [[ "$output" != *"net::send"* && "$output" == *main* ]]
  run -2 "$SONDE" list ./app 'net::sent'
  [[ "$output" == "sonde: no function matches 'net::sent'; nearest: net::send, "* ]]
}

@test "list: a stripped program by its unwind tables" {
  build_app
  strip -o bare app
  main=$(nm app | sed -n 's/^0*\([0-9a-f]*\) T main$/\1/p')
  run -0 "$SONDE" list ./bare
  [[ "$output" == *"bare+0x$main"* ]]
}

@test "list: what is no program" {
  echo hello >text
  run -1 "$SONDE" list ./text
  [ "$output" = "sonde: ./text is not an ELF file" ]
  run -1 "$SONDE" list ./missing
  [ "$output" = "sonde: ./missing cannot be opened: No such file or directory" ]
  run -2 "$SONDE" list
}

@test "list: help has examples" {
  run -0 "$SONDE" list --help
  [[ "$output" == *"Examples:"*"sonde list"* ]]
}

@test "list --at: of a place how it would be probed, in text and in JSON, and nothing else" {
  build_app
  main=$((0x$(nm app | sed -n 's/ T main$//p')))
  run -0 "$SONDE" list ./app --at main
  [[ "${lines[1]}" =~ ^0x0*$(printf %x $main)\ +-\ +(jump|nops)\ +main\+0x0$ ]] || { echo "$output"; return 1; }
  [ "${lines[2]}" = '1 of 1 instruction can be probed (100.0 %)' ]
  run -0 "$SONDE" list ./app --at main+1
  [[ "${lines[1]}" == *"  refused      main+0x1  -- inside an instruction; instructions begin at main+0x0 and main+0x"* ]]
  "$SONDE" list --json ./app --at main+1 --at main >list.json
  main=$main python3 - <<'PY'
import json, os
listed = json.load(open("list.json"))
main = int(os.environ["main"])
first, second = listed["instructions"]
assert not listed["functions"] and (first["address"], second["address"]) == (main, main + 1), listed
assert first["method"] in ("jump", "nops") and "refused" not in first, first
assert second["method"] == "refused" and second["refused"] == "inside an instruction" and second["offset"] == 1, second
assert second["instructions"][0] == main < main + 1 < second["instructions"][1], second
assert listed["summary"]["instructions"] == 2 and listed["summary"]["refusals"] == {"inside an instruction": 1}, listed
PY
  run -0 "$SONDE" list ./app main --at 'net::send+0'
  [[ "$output" == *' main'*'net::send(int)+0x0'*'2 of 2 places can be probed'* ]] || { echo "$output"; return 1; }
}

@test "list --at: each instruction of what a glob matches is objdump's, also by a file of places, of names and addresses" {
  build_app
  "$SONDE" list --json ./app --at 'net::*+*' --at 'hidden+*' >list.json
  for symbol in _ZN3net4sendEi _ZL6hiddeni; do
    objdump -d --no-show-raw-insn "--disassemble=$symbol" app | sed -n 's/^ *\([0-9a-f]*\):\t.*/\1/p'
  done | sort -u >expected
  python3 -c '
import json
for i in json.load(open("list.json"))["instructions"]: print("%x" % i["address"])' | sort -u | diff expected -
  { echo '# those of two functions'; sed 's/^/  0x/; s/$/  # one/' expected; echo; } >places
  "$SONDE" list --json ./app --at @places | diff list.json -
  "$SONDE" list --json ./app --at @places | python3 -c '
import json, sys
for i in json.load(sys.stdin)["instructions"]: print(i["name"])' >names
  "$SONDE" list --json ./app --at @names | diff list.json -
  strip -o bare app
  "$SONDE" list --json ./bare --at @places | python3 -c '
import json, sys
for i in json.load(sys.stdin)["instructions"]: print(i["name"])' >names
  grep -q '^bare+0x' names
  "$SONDE" list --json ./bare --at @names | grep '"address"' | diff <(grep '"address"' list.json) -
}

@test "list --at: neighbours shorten each other's jumps, and one that is gone gives way again" {
  cat >app.s <<'S'
  .globl main, work
  .type work, @function
work:
  push %rbx
  push %r12
  push %r13
  pop %r13
  pop %r12
  pop %rbx
  ret
  .size work, . - work
  .type main, @function
main:
  xor %eax, %eax
  call work
  xor %eax, %eax
  ret
  .size main, . - main
  .section .note.GNU-stack, "", @progbits
S
  gcc -o app app.s
  method() { "$SONDE" list --json ./app "$@" | python3 -c '
import json, sys
print(json.load(sys.stdin)["instructions"][0]["method"])'; }
  [ "$(method --at work)" = jump ]
  [ "$(method --at work --at work+1)" = trap ]
  [ "$(method --at work --at work+5)" = jump ]  # the last byte of the jump is in front of it
  "$SONDE" list --no-trap --json ./app --at work --at work+1 | grep -q '"refused": "a branch leads into the bytes'
  [ "$(method --at work)" = jump ]
}

@test "list --at: what is no place, and what is near" {
  build_app
  refuses() {
    run -2 --separate-stderr "$SONDE" list ./app --at "$1"
    [ -z "$output" ] && [[ $stderr = *"$2"* ]] && [ "$(wc -l <<<"$stderr")" = 1 ] || { echo "$1: $stderr"; return 1; }
  }
  refuses maim 'no function is called maim; nearest: main'
  refuses 'ned::*+*' 'no function is called ned::*; nearest: '
  refuses main+0x999 'is outside of main, which has '
  refuses 'ma*' 'write GLOB+* for every one'
  refuses @none 'the file of places none cannot be read'
  printf 'main\n\nma*n # typo\n' >places
  refuses @places "places:3: place 'ma*n' has a wildcard"
  refuses 0x3 'no code of a file lies at that address'
}

@test "list --at: of libc's instructions only watched system calls and landing pads are refused" {
  library=/usr/lib/x86_64-linux-gnu/libc.so.6
  "$SONDE" list --json $library --at '*+*' >list.json
  python3 - $library <<'PY'
import json, re, subprocess, sys
listed = json.load(open("list.json"))
image = open(sys.argv[1], "rb").read()
headers = subprocess.run(["readelf", "-lW", sys.argv[1]], stdout=subprocess.PIPE, text=True, check=True).stdout
segments = [[int(n, 16) for n in load] for load in re.findall(r"LOAD +(0x\w+) (0x\w+) 0x\w+ (0x\w+) ", headers)]
def bytes_at(address):
    return next(image[address - a + o:][:4] for o, a, size in segments if a <= address < a + size)
calls = pads = 0
for i in listed["instructions"]:
    code = bytes_at(i["address"])
    if "refused" not in i:
        continue
    if code[:2] == b"\x0f\x05":
        assert i["refused"] == "a system call that sonde watches is or begins there", i
        calls += 1
    else:
        assert code == b"\xf3\x0f\x1e\xfa" and i["refused"].startswith("a landing pad"), i
        pads += 1
assert len(listed["instructions"]) > 300000 and 40 < calls <= listed["summary"]["system_calls"], (calls, pads)
PY
}

@test "list --at: nothing of sonde itself" {
  agent=$(find "$(dirname "$SONDE")" -name libsonde-agent.so | head -1)
  run -0 "$SONDE" list "$agent" --at sonde_entry
  [[ "${lines[1]}" == *'refused      sonde_entry+0x0  -- part of sonde'* ]] || { echo "$output"; return 1; }
  run -0 "$SONDE" list "$agent" --at '*+*'
  [[ "$output" == *$'\n0 of '* ]]
}
