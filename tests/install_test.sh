#!/bin/bash
# The installed program works by itself: it finds its agent in ../lib/sonde. usage: install_test.sh BUILD_DIR
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cmake --install "$1" --prefix "$folder/usr" >/dev/null
cd "$folder"
for file in usr/bin/sonde usr/lib/sonde/libsonde-agent.so usr/share/man/man1/sonde.1 usr/share/bash-completion/completions/sonde; do
  [ -f "$file" ] || { echo "$file was not installed"; exit 1; }
done
usr/bin/sonde record -o trace -- /bin/true
usr/bin/sonde report --stats trace >report.txt
[ -s report.txt ] || { echo "the report is empty"; exit 1; }
mv usr/lib/sonde elsewhere
if usr/bin/sonde record -o trace -- /bin/true 2>error.txt; then echo "recording without the agent succeeded"; exit 1; fi
grep -q 'libsonde-agent.so' error.txt || { echo "the error does not name the missing file:"; cat error.txt; exit 1; }
