#!/bin/bash
# Builds aarch64_signals.cc, with return addresses signed and not, and runs it under qemu with an instruction at a time between
# signals. usage: aarch64_signals.sh SOURCE_DIR ARENA_OF WORK_DIR SIGNALS
set -eu
compiler=aarch64-linux-gnu-g++
for tool in $compiler qemu-aarch64; do
  command -v $tool >/dev/null || { echo "skipped: $tool is not installed; ./dev setup installs it"; exit 77; }
done
mkdir -p "$3"
cd "$1"
core=(core/walk/walker.cc core/walk/reason.cc core/unwind/table.cc core/unwind/expression.cc)
objects=()
for source in "${core[@]}"; do
  object=$3/$(basename "$source" .cc).o
  $compiler -std=gnu++23 -O2 -g -I. -c "$source" -o "$object"
  objects+=("$object")
done
failed=0
for flags in "-O2 -mbranch-protection=standard" "-O0 -mbranch-protection=none" "-O2 -mbranch-protection=none -fomit-frame-pointer"; do
  program=$3/signals_$(tr -dc '[:alnum:]' <<<"$flags")
  # shellcheck disable=SC2086  # several flags
  $compiler -std=gnu++23 -g $flags -fno-toplevel-reorder -fno-ipa-icf -fno-inline-functions -fno-reorder-functions -I. -static \
    tests/step/aarch64_signals.cc "${objects[@]}" -o "$program"
  XDG_CACHE_HOME=$3/cache "$2" "$program" "$program.arena"
  echo "$flags:"
  timeout 300 qemu-aarch64 -cpu max,pauth-impdef=on -singlestep "$program" "$program.arena" "$4" || failed=1
done
exit $failed
