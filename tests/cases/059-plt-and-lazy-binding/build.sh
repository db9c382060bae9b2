gcc -O1 -g -fno-builtin -Wl,-z,lazy -o out/case case.c -lm
gcc -O1 -g -fno-builtin -fcf-protection=full -Wl,-z,lazy,-z,ibtplt -o out/ibt case.c -lm
gcc -O1 -g -fno-builtin -Wl,-z,now -o out/now case.c -lm
gcc -O1 -g -fno-builtin -fuse-ld=lld -Wl,-z,lazy -o out/lld case.c -lm
