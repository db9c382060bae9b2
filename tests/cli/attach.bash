# For the cases about programs that run already: one is started, compared with what it was, and ended.

teardown() {
  [ -z "$pid" ] || kill "$pid" 2>/dev/null || true
}

# start COMMAND...: sets pid, waits for its first line.
start() {
  rm -f stop
  "$@" >out 2>err </dev/null &
  pid=$!
  for i in {1..500}; do [ -s out ] && return 0; sleep 0.01; done
  return 1
}

# Its end is that of the untraced program.
ends_well() {
  touch stop
  wait "$pid"
  pid=
  [ "$(tail -1 out)" = "0 wrong" ]
  [ ! -s err ]
}

# Only what is mapped from files and the code's bytes: a heap may have grown. Nothing else of the recorder is left.
state() {
  grep -E ' r-xp ' /proc/$pid/maps | grep -v vdso | while read -r range rest; do
    echo "$range $rest" "$(dd if=/proc/$pid/mem bs=4096 iflag=skip_bytes,count_bytes skip=$((16#${range%-*})) \
      count=$((16#${range#*-} - 16#${range%-*})) 2>/dev/null | md5sum)"
  done
  ls -l /proc/$pid/fd | awk '{print $9, $10, $11}'
  grep -E '^(SigCgt|SigIgn|SigBlk)' /proc/$pid/status
  ! grep -E 'sonde|memfd' /proc/$pid/maps
}
