# One program, thirteen ways to keep, move, compress, lose or falsify its names and tables.
gcc -O1 -g -o out/full case.c
gcc -O1 -g -gz=zlib -o out/zlib case.c
gcc -O1 -g -Wl,--compress-debug-sections=zlib-gnu -o out/zlibgnu case.c
clang -O1 -g -gz=none -fuse-ld=lld -Wl,--compress-debug-sections=zlib -o out/lldz case.c
gcc -O1 -g -gsplit-dwarf -o out/dwo case.c
gcc -O1 -g -gdwarf-4 -o out/dw4 case.c
gcc -O1 -g -fno-asynchronous-unwind-tables -fno-exceptions -o out/debugframe case.c  # .debug_frame only for its own code
cd out

split() { cp full "$1"; objcopy --only-keep-debug "$1" "$1.debug"; strip -s "$1"; objcopy --add-gnu-debuglink="$1.debug" "$1"; }
split link
split badlink
printf 'x' >>badlink.debug  # its checksum no longer fits

cp full bid
id=$(readelf -n bid | awk '/Build ID/{print $3}')
mkdir -p "dbg/.build-id/${id:0:2}"
objcopy --only-keep-debug bid "dbg/.build-id/${id:0:2}/${id:2}.debug"
strip -s bid

gcc -O0 -g -DOTHER -o stale_other ../case.c
cp full stale
strip -s stale
objcopy --only-keep-debug stale_other stale.debug  # of another build, found by name only

# A small symbol table, compressed, inside the stripped file.
cp full mini
nm -D mini --format=posix --defined-only | awk '{print $1}' | sort >dyn
nm mini --format=posix --defined-only | awk '$2 ~ /[TtD]/ {print $1}' | sort >func
comm -13 dyn func >keep
objcopy --only-keep-debug mini mini.debug
objcopy -S --remove-section .comment --keep-symbols=keep mini.debug mini.mid
strip -s mini
xz -k -f mini.mid
objcopy --add-section .gnu_debugdata=mini.mid.xz mini

cp full stripped
strip -s stripped
