# `sonde dump table --stats`: what no row can say is counted, and why.
load common
bats_require_minimum_version 1.5.0

@test "tables: what no row can say is counted by its reason" {
  cat >odd.S <<'CODE'
  .text
  .globl odd
  .type odd, @function
odd:
  .cfi_startproc
  nop
  .cfi_escape 0x0f, 0x02, 0x77, 0x00   # CFA: rsp + 0, an expression as good as a rule
  nop
  .cfi_escape 0x0f, 0x02, 0xe0, 0x00   # CFA: an operation that only some tool knows
  nop
  ret
  .cfi_endproc
  .size odd, . - odd
  .globl main
  .type main, @function
main:
  .cfi_startproc
  xor %eax, %eax
  ret
  .cfi_endproc
  .size main, . - main
  .section .note.GNU-stack, "", @progbits
CODE
  gcc -o odd odd.S
  run -0 "$SONDE" dump table --stats ./odd
  grep -qE '^ +1  inexpressible rows$' <<<"$output"
  grep -qE '^ +1 .*unknown operation in CFA expression$' <<<"$output"
  ! grep -qE ' 0\.00  inexpressible in 100,000 rows$' <<<"$output"
  gcc -o even -x c - <<<'int main(void) { return 0; }'
  run -0 "$SONDE" dump table --stats ./even
  grep -qE '^ +0  inexpressible rows$' <<<"$output"
  ! grep -q 'unknown operation' <<<"$output"
}

@test "tables: under 1 in 100,000 rows of Debian's libc, libstdc++, libLLVM and python3" {
  seen=0
  for file in /lib/x86_64-linux-gnu/libc.so.6 /usr/lib/x86_64-linux-gnu/libstdc++.so.6 /usr/lib/x86_64-linux-gnu/libLLVM-19.so /usr/bin/python3; do
    [ -e "$file" ] || { echo "# $file is not installed" >&3; continue; }
    run -0 "$SONDE" dump table --stats "$file"
    python3 - "$file" <<CHECK
import re, sys
text = """$output"""
number = lambda what: float(re.search(r"^ +([0-9.]+)x?  " + re.escape(what), text, re.M)[1])
assert number("inexpressible in 100,000 rows") < 1, text
assert number("inexpressible rows") * 100000 < number("rows (places where another one begins)"), text
assert number("rows (places where another one begins)") > 20000 and number("changes with a register lost") == 0, text
CHECK
    seen=$((seen + 1))
  done
  [ "$seen" -ge 2 ]
}
