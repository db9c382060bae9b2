# Preparations that take long are told: to a terminal as they go on, elsewhere by one line.
load common
bats_require_minimum_version 1.5.0

make_large() {
  python3 - <<'P' >large.s
print('.section .note.GNU-stack,"",@progbits\n.text')
for i in range(40000):
    print(f".globl f{i}\n.type f{i},@function\nf{i}: push %rbp\nmov %rsp,%rbp\nmov %edi,%eax\npop %rbp\nret\n.size f{i},.-f{i}")
P
  echo 'int f7(int); int main(void) { return f7(0); }' >main.c
  gcc main.c large.s -o large
}

@test "on a terminal a line is renewed and erased, elsewhere there is one after two seconds, with -q none" {
  make_large
  script -qec "$SONDE record -f '*' -o trace ./large" typescript >/dev/null </dev/null
  tr '\r' '\n' <typescript | grep -a preparing | tail -1 | grep -aqE 'preparing 400[0-9]{2} functions in 1 module\.\.\.$'
  # Erased before anything else is said.
  [[ "$(cat typescript)" == *preparing*$'\r\033[Ksonde: '*' calls of '* ]]
  begin=$(date +%s%N)
  run -0 --separate-stderr "$SONDE" record -f '*' -o trace ./large
  took=$((($(date +%s%N) - begin) / 1000000))
  lines=$(grep -cE '^sonde: preparing 400[0-9]{2} functions in 1 module\.\.\.$' <<<"$stderr") || true
  echo "took $took ms"
  [ "$lines" -le 1 ]
  [ "$took" -lt 5000 ] || [ "$lines" -eq 1 ]
  run -0 script -qec "$SONDE record -q -f '*' -o trace ./large" typescript </dev/null
  [[ "$output" != *preparing* ]]
  run -0 "$SONDE" record -o trace true
  [[ "$output" != *preparing* ]]
}
