flags="-O1 -g -fno-optimize-sibling-calls -pthread"
g++ $flags -o out/libgcc main.cc throws.cc
g++ $flags -o out/llvm main.cc throws.cc -Wl,--no-as-needed -l:libunwind.so.1
g++ $flags -static-libgcc -static-libstdc++ -o out/static main.cc throws.cc
g++ $flags -static-libgcc -static-libstdc++ -s -Wl,--export-dynamic -o out/stripped main.cc throws.cc -Wl,--exclude-libs,ALL
# The same with _Unwind_GetIP (mov 0x98(%rdi),%rax; ret; nopl) as another compiler might write it: lea, mov, ret, nop.
perl -0777 -pe 's/\x48\x8b\x87\x98\0\0\0\xc3\x0f\x1f\x40\0/\x48\x8d\x87\x98\0\0\0\x48\x8b\0\xc3\x90/g' out/stripped >out/reworded
if cmp -s out/stripped out/reworded; then exit 1; fi
chmod +x out/reworded
renamed="-Dthrows=plugin_throws -Dpasses=plugin_passes -Dcatches=plugin_catches"
g++ $flags $renamed -fPIC -shared -o out/plugin.so throws.cc
# With a C++ runtime of its own, so that its personality is bound to LLVM's unwinder too.
g++ $flags $renamed -fPIC -shared -static-libstdc++ -nodefaultlibs -o out/plugin-llvm.so throws.cc -Wl,--exclude-libs,ALL \
  -Wl,--no-as-needed -l:libunwind.so.1 -Wl,--start-group -l:libstdc++.a -Wl,--end-group -lm -lc -l:libgcc.a
g++ $flags -o out/both both.cc throws.cc
gcc $flags -o out/opens opens.c
gcc $flags -o out/ends ends.c
gcc $flags -fexceptions -o out/ends-exceptions ends.c
