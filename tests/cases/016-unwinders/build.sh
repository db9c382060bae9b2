flags="-O1 -g -fno-optimize-sibling-calls -pthread"
g++ $flags -o out/libgcc main.cc throws.cc
g++ $flags -o out/llvm main.cc throws.cc -Wl,--no-as-needed -l:libunwind.so.1
g++ $flags -static-libgcc -static-libstdc++ -o out/static main.cc throws.cc
g++ $flags -static-libgcc -static-libstdc++ -s -Wl,--export-dynamic -o out/stripped main.cc throws.cc -Wl,--exclude-libs,ALL
renamed="-Dthrows=plugin_throws -Dpasses=plugin_passes -Dcatches=plugin_catches"
g++ $flags $renamed -fPIC -shared -o out/plugin.so throws.cc
# With a C++ runtime of its own, so that its personality is bound to LLVM's unwinder too.
g++ $flags $renamed -fPIC -shared -static-libstdc++ -nodefaultlibs -o out/plugin-llvm.so throws.cc -Wl,--exclude-libs,ALL \
  -Wl,--no-as-needed -l:libunwind.so.1 -Wl,--start-group -l:libstdc++.a -Wl,--end-group -lm -lc -l:libgcc.a
g++ $flags -o out/both both.cc throws.cc
gcc $flags -o out/opens opens.c
gcc $flags -o out/ends ends.c
gcc $flags -fexceptions -o out/ends-exceptions ends.c
