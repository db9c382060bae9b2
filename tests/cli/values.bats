# Options with values that mean nothing: refused with the option, the value and what it may be; never taken for another.
load common
bats_require_minimum_version 1.5.0

make_app() {
  echo '__attribute__((noinline)) int f(void) { __asm__ volatile(""); return 0; } int main(void) { return f(); }' >app.c
  gcc app.c -o app
}

# refused OPTION COMMAND... VALUE
refused() {
  local option=$1 value=${*: -1}
  shift
  run -2 timeout 20 "$SONDE" "$@"
  [[ "${lines[0]}" == "sonde: $option: "* ]] && [[ "$output" == *"'$value'"* || -z "$value" ]] &&
    [[ "$output" != *onvert* ]] || { echo "$*"; echo "$output"; return 1; }
}

@test "values that are none: exit 2, the option and the value, and nothing of the parser's" {
  make_app
  local value
  for value in '' nan inf -1 0 1.5 0x10 many 99999999999999999999 18446744073709551616 1e3; do
    refused --limit report --limit "$value"
    refused --depth report --depth "$value"
    refused --tid report --tid "$value"
    refused --pid stack --pid "$value"
    refused --pid stack -p "$value"
    refused --max-frames stack --max-frames "$value"
    refused --outermost stack --outermost "$value"
  done
  for value in '' nan inf -5 -0.1 1e400 many 5us; do refused --min-time report --min-time "$value"; done
  for value in '' bogus Total; do refused --sort report --stats --sort "$value"; done
  for value in '' /no/such/folder app.c; do refused --debug-dir stack --debug-dir "$value"; done
  refused --function report -f ''
  refused --function record -f ''
  refused --output record -o ''
  refused --max-size record --max-size ''
  refused --at dump table --at ''
  for command in report stack list check 'dump table'; do
    run -2 "$SONDE" $command ''
    [[ "$output" == *"a value is missing: "*" is empty"* ]]
  done
  for value in nan -5 0 1.5G 5X 999999999999T; do
    run -2 "$SONDE" record --max-size $value ./app
    [ "$output" = "sonde: --max-size '$value' is not a size: write 500M or 2G" ]
  done
  for value in x 0x -1 nan 99999999999999999999; do
    run -2 "$SONDE" dump table --at $value app
    [ "$output" = "sonde: --at: \"$value\" is no address; write it as 0x1234" ]
  done
  # At their limits they are values, and the program's own arguments are its own.
  run -0 "$SONDE" record -q -o trace ./app ''
  run -0 "$SONDE" report --min-time 0 --limit 1 --depth 1000000000 trace
}

@test "flags take no value, options one, and a misspelt one is guessed" {
  for command in 'report --json' 'report --stats' 'record --drop' 'stack --json' 'list --json' 'check --json' \
                 'dump table --json'; do
    for value in maybe false 0 7; do
      run -2 "$SONDE" $command=$value
      [ "${lines[0]}" = "sonde: ${command##* } takes no value" ]
    done
  done
  run -2 "$SONDE" --version=3
  [ "${lines[0]}" = "sonde: --version takes no value" ]
  run -2 "$SONDE" report --limit
  [ "${lines[0]}" = "sonde: --limit wants a value: --limit N" ]
  run -2 "$SONDE" report --limit 3 --limit 4
  [ "${lines[0]}" = "sonde: --limit is given 2 times: give it once" ]
  run -2 "$SONDE" report --stast
  [ "${lines[0]}" = "sonde: sonde report has no option --stast; did you mean --stats?" ]
  run -2 "$SONDE" report --bogus
  [ "${lines[0]}" = "sonde: sonde report has no option --bogus" ]
  run -2 "$SONDE" report trace extra
  [ "${lines[0]}" = "sonde: 'extra' is more than sonde report takes" ]
}

@test "an option that means nothing in a view is refused there; what means something does so in JSON too" {
  make_app
  "$SONDE" record -q -o trace ./app
  for options in '--sort self' '--calls --sort self' '--folded --sort self' '--counts' '--stats --counts' \
                 '--stats --depth 2' '--calls --depth 2' '--stats --per-thread' '--calls --per-thread' \
                 '--folded --per-thread' '--folded --limit 2' '--folded --min-time 2' '--folded --json'; do
    run -2 "$SONDE" report $options trace
    [[ "$output" =~ ^"sonde: --"(sort|counts|depth|per-thread|limit|min-time|json)" means something with " ]]
  done
  run -2 "$SONDE" stack trace -v
  [[ "$output" == "sonde: -v says how long threads stood still: with -p PID only"* ]]
  count() { "$SONDE" report --json "$@" trace | grep -o '"tail_calls"' | wc -l; }
  [ "$(count)" -gt 3 ]
  [ "$(count --limit 2)" -eq 2 ]
  [ "$(count --min-time 1000000000000)" -lt "$(count)" ]
  [ "$("$SONDE" report --json trace | grep -c '"name":"f"')" -eq 1 ]
  [ "$("$SONDE" report --json --depth 1 trace | grep -c '"name":"f"')" -eq 0 ]
}

@test "a thread that there was not, and functions that were not recorded" {
  cat >app.c <<'C'
__attribute__((noinline)) int malloy(void) { __asm__ volatile(""); return 0; }
int main(void) { return malloy(); }
C
  gcc app.c -o app
  "$SONDE" record -q -o trace ./app
  tid=$("$SONDE" report --calls trace | sed -n 's/^thread \([0-9]*\) .*/\1/p')
  run -0 "$SONDE" report --tid "$tid" trace
  [[ "$output" == *malloy* ]]
  run -2 "$SONDE" report --tid 4194304 trace
  [ "$output" = "sonde: no thread 4194304 in trace; there is $tid" ]
  # The engine's own sites in libc are none of the recording.
  run -2 "$SONDE" report -f malloc trace
  [[ "$output" == "sonde: no function in trace matches 'malloc'; nearest: malloy, "* ]]
  [[ "$output" != *abort* ]] && [[ "$output" != *clone* ]]
  run -2 "$SONDE" report -f _exit trace
  [[ "$output" == "sonde: no function in trace matches '_exit'; nearest: "* ]]
}

@test "a function that was refused is said to be so" {
  cat >app.c <<'C'
__asm__(".globl tiny\n.type tiny,@function\ntiny: ret\n.size tiny,.-tiny\n.globl next\n.type next,@function\nnext: xor %eax,%eax\n ret\n"
        ".size next,.-next\n .byte 0x90\n");
void tiny(void);
int main(void) { tiny(); return 0; }
C
  gcc -no-pie app.c -o app  # where a jump made of the bytes behind tiny would lead, there is no address
  "$SONDE" record -q --no-trap -o trace ./app
  "$SONDE" report trace | grep -q '^functions refused: .*too small for any jump'
  run -2 "$SONDE" report -f tiny trace
  [[ "$output" == "sonde: 'tiny' was not probed in trace: "* ]]
}

@test "one of a thing is not called many" {
  make_app
  run -0 "$SONDE" record -f main -o trace ./app
  [[ "${lines[0]}" == "sonde: 1 call of 1 function (0 refused), 0 lost"* ]]
  run -0 "$SONDE" report trace
  [[ "$output" == *"1 call of 1 thread; "* ]]
  run -0 "$SONDE" list ./app main
  [[ "$output" == *"1 of 1 function can be probed"* ]]
  run -0 "$SONDE" record -s -f main -o trace ./app
  [[ "${lines[0]}" == "sonde: 1 call and 1 stack of 1 function "* ]]
}
