#!/bin/bash
# rounds.sh SONDE PROGRAM THREADS ROUNDS: attaches to and leaves a program whose threads never rest. Its code, mappings and signal
# actions must be what they were after each round, and its results right at the end. Prints how long it stood still.
set -eu
sonde=$(realpath "$1") program=$(realpath "$2") threads=$3 rounds=$4
folder=$(mktemp -d)
cd "$folder"
# It leaves the processors to whoever else wants them: the rounds shall end one day.
nice -n 5 "$program" "$threads" >out 2>err </dev/null &
pid=$!
trap 'kill $pid 2>/dev/null || true; rm -rf "$folder"' EXIT
for ((i = 0; i < 1000; i++)); do [ ! -s out ] || break; sleep 0.02; done

state() {
  python3 - $pid <<'PYTHON'
import hashlib, re, sys
pid = sys.argv[1]
memory = open(f"/proc/{pid}/mem", "rb", 0)
for line in open(f"/proc/{pid}/maps"):
    if re.search(r"sonde|memfd", line): sys.exit("left behind: " + line)
    if " r-xp " not in line or "vdso" in line: continue
    begin, end = (int(x, 16) for x in line.split()[0].split("-"))
    memory.seek(begin)
    print(line.rstrip(), hashlib.md5(memory.read(end - begin)).hexdigest())
for line in open(f"/proc/{pid}/status"):
    if line.startswith(("SigCgt", "SigIgn", "SigBlk")): print(line.rstrip())
PYTHON
}

state >before
for ((round = 1; round <= rounds; round++)); do
  "$sonde" record --drop --max-size 2M -f '*step*' -o trace -p $pid -- sleep 0.05 2>said || { cat said; exit 1; }
  state >after || { cat said; exit 1; }
  diff before after || { echo "round $round: not as it was"; exit 1; }
  grep -oP 'stood still for at most \K[0-9.]+ ms' said >>pauses
done
touch stop
wait $pid
[ "$(tail -1 out)" = "0 wrong" ] && [ ! -s err ] || { cat out err; exit 1; }
[ "$(wc -l <pauses)" -eq "$rounds" ] || { echo "it is not said how long the program stood"; exit 1; }
sort -n pauses | awk -v threads="$threads" '{ p[NR] = $1 } END {
  printf "%d rounds, %d threads, 1000 functions: the program stood still for %s ms (median), %s ms (worst)\n", NR, threads, p[int((NR + 1) / 2)], p[NR] }'
