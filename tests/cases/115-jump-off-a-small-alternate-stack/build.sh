gcc -O1 -g -fno-optimize-sibling-calls -pthread -Wl,-z,now -o out/case case.c
