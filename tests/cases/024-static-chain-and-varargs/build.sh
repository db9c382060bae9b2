# Four kinds of function starts: as compiled, five nops, nops before and behind the entry with a landing pad, a call to __fentry__.
gcc -O1 -g -Wno-trampolines -z execstack -o out/case case.c
gcc -O1 -g -Wno-trampolines -z execstack -fpatchable-function-entry=5 -o out/case_pfe5 case.c
gcc -O1 -g -Wno-trampolines -z execstack -fcf-protection=full -fpatchable-function-entry=16,11 -o out/case_pfe16 case.c
gcc -O1 -g -Wno-trampolines -z execstack -pg -mfentry -o out/case_fentry case.c
