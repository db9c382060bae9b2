gcc -O1 -g -fno-optimize-sibling-calls -Wl,-z,now -o out/case case.c
