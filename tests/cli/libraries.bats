# Libraries that come and go while stacks are taken: each walk finds the tables that are right at its time.
load common

@test "200 times a library comes and goes under running walks: each stack is whole, reliable and the true one" {
  cat >plugin.c <<'C'
int through(int (*f)(int), int x) {
  volatile char room[ROOM];
  room[0] = 1;
  return f(x) + room[0];
}
C
  cat >come.c <<'C'
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <unistd.h>
static volatile int over;
__attribute__((noinline)) int callback(int x) { __asm__ volatile(""); return x + 1; }
__attribute__((noinline)) int beside(int x) { __asm__ volatile(""); return x + 1; }
static void *busy(void *p) {
  volatile long n = 0;
  while (!over) {
    for (int i = 0; i < 10; i++) n += beside(1);
    usleep(50);
  }
  return p;
}
int main(void) {
  pthread_t t;
  long sum = 0;
  pthread_create(&t, 0, busy, 0);
  for (int i = 0; i < 200; i++) {  // two files of other code and other tables, mostly at the same address
    void *h = dlopen(i & 1 ? "./one.so" : "./two.so", RTLD_NOW);
    int (*through)(int (*)(int), int) = (int (*)(int (*)(int), int))dlsym(h, "through");
    for (int k = 0; k < 10; k++) sum += through(callback, k);
    dlclose(h);
  }
  over = 1;
  pthread_join(t, 0);
  printf("%ld\n", sum);
  return 0;
}
C
  gcc -O2 -shared -fPIC -DROOM=40 plugin.c -o one.so
  gcc -O0 -shared -fPIC -DROOM=4000 plugin.c -o two.so
  gcc -O2 -pthread come.c -o come
  same_as_untraced -s -f callback -f beside -- ./come
  [ "$(calls_of callback)" -eq 2000 ]
  "$SONDE" report --calls trace >calls
  python3 - <<'CHECK'
import collections, re
stacks, seen = collections.Counter(), None
inner = ("__libc_start_call_main", "start_thread", "clone3", "libc")  # the last without libc's debug symbols
for line in open("calls"):
    if frame := re.match(r" +#(\d+) +(\w+)\S*(.*)", line):
        if frame[1] == "0":
            seen = []
        seen.append("(libc)" if frame[2] in inner else frame[2])
        if "unreliable" in frame[3]:
            seen.append("unreliable")
        if "[end]" in frame[3]:
            stacks[tuple(seen)] += 1
print(stacks)
start = ("(libc)", "__libc_start_main", "_start")
beside = ("beside", "busy", "(libc)", "(libc)")
assert set(stacks) == {("callback", "through", "main", *start), beside}, stacks
assert stacks[("callback", "through", "main", *start)] == 2000, stacks
CHECK
  "$SONDE" report trace | grep -q 'unreliable stacks: 0.0 % of'
  [ "$(calls_of beside)" -eq "$("$SONDE" report trace | sed -n 's/^unreliable stacks: .* of \([0-9,]*\)$/\1/p' | tr -d , | awk '{print $1 - 2000}')" ]
}

# make_opener [BUILD-ID]: a program that opens ./pl.so 30 times and closes it again, the last ten times another build of it.
make_opener() {
  cat >pl.c <<'C'
int run(int x) { return x + ADD; }
int twice(int x) { return run(x) + run(x); }
C
  cat >opener.c <<'C'
#include <dlfcn.h>
#include <stdio.h>
int main(void) {
  for (int i = 0; i < 30; i++) {
    if (i == 20 && rename("./other.so", "./pl.so")) return 1;
    void *d = dlopen("./pl.so", RTLD_NOW);
    int (*twice)(int) = (int (*)(int))dlsym(d, "twice");
    twice(i);
    dlclose(d);
  }
  return 0;
}
C
  gcc -O0 -shared -fPIC -Wl,--build-id$1 -DADD=1 pl.c -o pl.so
  gcc -O0 -shared -fPIC -Wl,--build-id$1 -DADD=2 -Wl,-z,max-page-size=0x10000 pl.c -o other.so
  gcc opener.c -o opener
}

# Calls of each row of a function, the rows sorted.
rows_of() { "$SONDE" report "${@:2}" trace | awk -v name="$1" '$NF == name { print $1 }' | sort -n | xargs; }

@test "a library that is opened again has no rows of its own; another build under its path has" {
  make_opener
  "$SONDE" record -q -o trace -f ./pl.so:run -f ./pl.so:twice ./opener
  [ "$(rows_of run --stats)" = "20 40" ]
  [ "$(rows_of twice --stats)" = "10 20" ]
  [ "$(rows_of run)" = "20 40" ]
  [ "$("$SONDE" report --json trace | python3 -c 'import json, sys; print(json.load(sys.stdin)["footer"]["armed"])')" = 4 ]
  # The same in sums.
  make_opener
  "$SONDE" record -q --sum -o trace -f ./pl.so:run -f ./pl.so:twice ./opener
  [ "$(rows_of run --stats)" = "20 40" ]
  [ "$(rows_of twice)" = "10 20" ]
  # Without a build id the path is what there is to go by, and the size.
  make_opener =none
  "$SONDE" record -q -o trace -f ./pl.so:run ./opener
  [ "$(rows_of run --stats)" = "20 40" ]
}
