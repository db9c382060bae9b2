gcc -O2 -g -o out/t_o2 target.c
gcc -O0 -g -o out/t_o0 target.c
gcc -Os -g -fcf-protection=full -o out/t_os target.c
gcc -O2 -g -fno-omit-frame-pointer -fstack-protector-all -o out/t_fp target.c
clang -O2 -g -o out/t_clang target.c
gcc -O2 -g -mstackrealign -fno-shrink-wrap -o out/t_realign target.c
