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
