#!/bin/bash
# A clean clone on a bare Debian 12: debootstrap's smallest system, nothing installed, then `./dev demo` and `./dev test` in it.
# What they need beyond that system they must install themselves. Needs root and the package debootstrap.
#
# usage: tools/bare.sh [--keep DIR] [--ccache DIR] [COMMAND...]
#   --keep DIR     the system's folder, made if it is not there, kept afterwards; else a temporary one
#   --ccache DIR   lend it this machine's compiler cache
#   COMMAND        what to run in the clone; without it "./dev demo" and "./dev test"
#
# Cloned is what is committed. Packages come from the mirror of this machine's apt, or from $SONDE_MIRROR.
set -euo pipefail
top=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
keep='' ccache=''
while [ $# -gt 0 ]; do
  case $1 in
    --keep) keep=$2; shift 2 ;;
    --ccache) ccache=$2; shift 2 ;;
    --help | -h) sed -n '2,10s/^# \?//p' "$0"; exit 0 ;;
    *) break ;;
  esac
done
[ $# -gt 0 ] || set -- ./dev demo '&&' ./dev test
[ "$(id -u)" = 0 ] || { echo "bare: only root may make a system to change into" >&2; exit 1; }
command -v debootstrap >/dev/null || { echo "bare: the package debootstrap is not installed" >&2; exit 1; }

root=${keep:-$(mktemp -d "${TMPDIR:-/var/tmp}/sonde-bare.XXXXXX")}
mounted=()
leave() {
  local at
  for at in "${mounted[@]}"; do umount "$at" || umount -l "$at"; done
  # Never through a mount that would not go.
  [ -n "$keep" ] || grep -q " $root/" /proc/mounts || rm -rf "$root"
}
trap leave EXIT
lend() {  # OPTIONS... WHAT WHERE
  mkdir -p "$root/${*: -1}"
  mount "${@:1:$#-1}" "$root/${*: -1}"
  mounted=("$root/${*: -1}" "${mounted[@]}")
}

# Devices of its own: what is installed, run or removed in there must not change this machine's /dev.
lend_devices() {
  local name numbers
  lend -t tmpfs -o mode=755 tmpfs dev
  while read -r name numbers; do
    # shellcheck disable=SC2086  # two numbers
    mknod -m 666 "$root/dev/$name" c $numbers
  done <<<'null 1 3
zero 1 5
full 1 7
random 1 8
urandom 1 9
tty 5 0'
  ln -s /proc/self/fd "$root/dev/fd"
  ln -s fd/0 "$root/dev/stdin"
  ln -s fd/1 "$root/dev/stdout"
  ln -s fd/2 "$root/dev/stderr"
  mkdir -m 1777 "$root/dev/shm"
  lend -t devpts -o newinstance,ptmxmode=666,mode=620 devpts dev/pts
  ln -s pts/ptmx "$root/dev/ptmx"
}

if [ ! -e "$root/etc/debian_version" ]; then
  mirror=${SONDE_MIRROR:-$(apt-get indextargets --format '$(SITE) $(CODENAME)' 2>/dev/null | sed -n 's/ bookworm$//p' | head -1)}
  debootstrap --variant=minbase bookworm "$root" ${mirror:+"$mirror"}
fi
rm -rf "$root/src/sonde"
mkdir -p "$root/src"
git clone -q --no-hardlinks "$top" "$root/src/sonde"
lend -t proc proc proc
lend_devices
environment=(HOME=/root "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin" TERM=dumb)
if [ -n "$ccache" ]; then
  lend --bind "$ccache" ccache
  environment+=(CCACHE_DIR=/ccache CCACHE_BASEDIR=/src CCACHE_NOHASHDIR=1)
fi
status=0
chroot "$root" env -i "${environment[@]}" bash -c "cd /src/sonde && $*" || status=$?
echo "bare: exit status $status"
exit $status
