# `sonde check`: what a user sees of a wrong table, what the exit status says, and what a stack says afterwards.
load common
bats_require_minimum_version 1.5.0

setup() {
  cd "$BATS_TEST_TMPDIR" || exit 1
  export XDG_CACHE_HOME=$BATS_TEST_TMPDIR/cache
}

teardown() {
  [ -z "$target" ] || kill "$target" 2>/dev/null || true
}

# A program that waits in a function whose table leaves out a push. The push moves the frame by 8 bytes.
build_wrong() {
  cat >wait.S <<'CODE'
  .text
  .globl wrong
  .type wrong, @function
wrong:
  .cfi_startproc
  push %rbx
  mov $34, %eax
  syscall
  pop %rbx
  ret
  .cfi_endproc
  .size wrong, . - wrong
  .globl main
  .type main, @function
main:
  .cfi_startproc
  sub $8, %rsp
  .cfi_def_cfa_offset 16
  call wrong
  add $8, %rsp
  .cfi_def_cfa_offset 8
  ret
  .cfi_endproc
  .size main, . - main
  .section .note.GNU-stack, "", @progbits
CODE
  gcc -o app wait.S
}

@test "check: a wrong row with its instruction and both answers, exit status 1" {
  build_wrong
  run --separate-stderr -1 "$SONDE" check ./app
  [[ "${lines[0]}" == "wrong ("*" bytes)" ]]
  [[ "${lines[1]}" == "  +0x1 "*"mov \$0x22, %eax  -- wrong: cfa" ]]
  [[ "${lines[2]}" == "      row   cfa=rsp+8 ra=[cfa-8]" ]]
  [[ "${lines[3]}" == "      code  cfa=rsp+16 ra=[cfa-8]" ]]
  [[ "$output" == *" 3  wrong, in 1 function"* ]]
  [[ "$output" == *"marked"* ]]
  [ -z "$stderr" ]
}

@test "check: JSON says the same" {
  build_wrong
  run -1 "$SONDE" check --json ./app
  echo "$output" >check.json
  python3 - <<'CHECK'
import json
out = json.load(open("check.json"))
functions = {f["name"]: f for f in out["functions"]}
findings = functions["wrong"]["findings"]
assert [f["offset"] for f in findings] == [1, 6, 8], findings
assert all(f["verdict"] == "wrong" and f["wrong"] == "cfa" for f in findings)
assert findings[1]["row"] == "cfa=rsp+8 ra=[cfa-8]" and findings[1]["code"] == "cfa=rsp+16 ra=[cfa-8]"
assert functions["main"]["findings"] == [] and functions["main"]["instructions"]["right"] == 4
assert out["instructions"]["wrong"] == 3 and out["marked"] is True and out["build_id"]
CHECK
}

@test "check: stacks that need a marked row are not reliable, and say why" {
  build_wrong
  ./app 3>&- &
  target=$!
  until grep -q '^State:.*S' /proc/$target/status; do :; done
  run -1 "$SONDE" check --no-mark ./app
  run "$SONDE" stack -p "$target"
  [[ "$output" != *row-refuted* ]]
  run -1 "$SONDE" check ./app
  run "$SONDE" stack -p "$target"
  [[ "${lines[1]}" == *" wrong+"*" row-refuted" ]]
  run -3 "$SONDE" stack --reliable -p "$target"
}

@test "check: gcc's rule of a realigned frame stays in force behind leave, at two instructions" {
  cp "$BATS_TEST_DIRNAME/../cases/050-step-every-instruction/target.c" .
  gcc -O0 -g -o t_o0 target.c
  gcc -O2 -g -fno-omit-frame-pointer -fstack-protector-all -o t_fp target.c
  for program in t_o0 t_fp; do
    run -1 "$SONDE" check --json ./$program
    echo "$output" >check.json
    python3 - <<'CHECK'
import json
functions = {f["name"]: f for f in json.load(open("check.json"))["functions"] if f["instructions"]["wrong"]}
assert list(functions) == ["realigned"], functions.keys()
lea, ret = functions["realigned"]["findings"]
assert lea["instruction"] == "lea -0x08(%r10), %rsp" and ret["instruction"] == "ret", (lea, ret)
assert "rbp" in lea["wrong"] and "rbp" in ret["wrong"]
CHECK
  done
}

@test "check: a sound program, exit status 0" {
  echo 'int main(int n, char **v) { return n - 1; }' >main.c
  gcc -O1 -o sound main.c
  run -0 "$SONDE" check ./sound
  [[ "$output" == *" 0  wrong, in 0 functions"* ]]
  [[ "$output" != *marked* ]]
}

@test "check: what is no program, and help with examples" {
  echo hello >text
  run -1 "$SONDE" check ./text
  [ "$output" = "sonde: ./text is not an ELF file" ]
  run -2 "$SONDE" check
  run -0 "$SONDE" check --help
  [[ "$output" == *"Examples:"*"sonde check"* ]]
}
