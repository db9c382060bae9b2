# Shared by the command-line cases: `sonde` of the build under test, a folder of its own for each case, and
# same_as_untraced, which is what most of them are about.
SONDE=${SONDE:-$PWD/build/gcc/sonde}

setup() {
  cd "$BATS_TEST_TMPDIR" || exit 1
}

# same_as_untraced [OPTIONS --] COMMAND...: standard output, standard error (the recorder's own lines aside) and exit
# status equal those of COMMAND alone. Leaves the trace in ./trace.
same_as_untraced() {
  local options=()
  while [ "$1" != -- ]; do options+=("$1"); shift; done
  shift
  local expected=0 status=0
  "$@" >untraced.out 2>untraced.err </dev/null || expected=$?
  "$SONDE" record -o trace "${options[@]}" -- "$@" >traced.out 2>traced.err.all </dev/null || status=$?
  grep -v '^sonde: ' traced.err.all >traced.err || true
  [ "$status" -eq "$expected" ] || { echo "exit status $status, untraced $expected"; cat traced.err.all; return 1; }
  diff untraced.out traced.out || return 1
  diff untraced.err traced.err || return 1
  [ -s trace ] || { echo "no trace was written"; return 1; }
}

# Number of calls of a function by its exact name in ./trace.
calls_of() {
  "$SONDE" report --stats --json trace | python3 -c '
import json, sys
rows = json.load(sys.stdin)["functions"]
print(sum(r["calls"] for r in rows if r["name"].split("(")[0] == sys.argv[1]))' "$1"
}
