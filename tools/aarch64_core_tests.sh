#!/bin/bash
# Builds core/ and its unit tests for AArch64 and runs them under qemu. usage: aarch64_core_tests.sh SOURCE_DIR
for tool in aarch64-linux-gnu-g++ qemu-aarch64; do
  command -v $tool >/dev/null || { echo "$tool is not installed; ./dev setup installs it"; exit 77; }
done
cd "$1" && cmake --preset aarch64 >/dev/null && cmake --build --preset aarch64 -j "${SONDE_JOBS:-$(nproc)}" &&
  qemu-aarch64 build/aarch64/tests/core_tests
