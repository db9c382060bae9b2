gcc -O1 -o out/case case.c
