#!/usr/bin/env python3
"""Every offset of functions that nobody here wrote, tried as the place of a probe while the program does its own work.

usage: places.py --work DIR --sonde FILE [--functions N] [LIBRARY...]     libraries: libc libcrypto python3 libsqlite3; all without

Of each library a quarter of N functions: its AVX-512 code (up to a quarter of them), functions that the program calls, and
others. Where their instructions begin is told by objdump. All other offsets are refused as inside an instruction; of the
instructions, system calls that sonde watches and landing pads (the instruction behind one is probed for both); every other one
is armed, all at once, and the program does what it does alone. How often those of most functions are executed is counted by
step_counts.c.
"""
import argparse
import collections
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).parent
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LC_ALL": "C", "HOME": "/nonexistent", "SHELL": "/bin/sh", "PYTHONHASHSEED": "0",
               "PERL_HASH_SEED": "0"}
LIBRARIES = "/usr/lib/x86_64-linux-gnu/"
SKIPPED = 77
SMALLEST, LARGEST = 4, 6000  # bytes of a function
MOST_CALLS = 300  # of one: a trap takes microseconds
COUNTED_HITS = 30_000  # of the sample that is held against step_counts.c
NOPS = b"\x90" * 16  # between functions: whatever ends there, the next begins anew
# Why an offset is refused.
INSIDE = "inside an instruction"
WATCHED = "a system call that sonde watches is or begins there"
PAD = "a landing pad: the instruction behind it is probed for both"

SQL = """create table t(x integer primary key, y text, z real); create index i on t(y);
with recursive c(n) as (select 1 union all select n+1 from c where n < 60)
  insert into t select n, printf('%04x', n * 7919 % 1000), n / 7.0 from c;
select count(*), sum(x), min(y), max(y), round(avg(z), 6) from t where y like '%1%';
select group_concat(x) from (select x from t order by y desc, x limit 20);
delete from t where x % 3 = 0; update t set y = upper(y) where x % 5 = 0;
select count(distinct y) from t;
select json_extract('{"a":[1,2,{"b":"c"}]}', '$.a[2].b'), hex('xyz'), strftime('%Y', 0, 'unixepoch');"""
PYTHON = """import re, sys
class A:
    def __init__(self, x): self.x = x
    def __eq__(self, o): return self.x == o.x
d = {str(i): [i] * (i % 3) for i in range(40)}
print(sorted(d, key=lambda k: d[k])[:5], A(1) == A(1), f'{1 / 3:.4f}', '%05d' % 42, 7 ** 90 % 1009, b'ab'.hex())
print({*range(9)} & {3, 5}, 'a-b-c'.split('-'), re.sub('[aeiou]', 'X', 'functions'), sum(x * x for x in range(30)))
try: [].pop()
except IndexError as e: print(e)
print(sys.intern('x'), bytes(range(5)), [1, 2, 3][::-1], (1.5).as_integer_ratio(), complex(1, 2) * 3, 'abc'.encode('utf-16'))"""
PERL = r"""my %h = map { $_ => length } split /\W+/, 'the quick brown fox jumps over the lazy dog and the end';
printf "%s %d\n", $_, $h{$_} for sort keys %h; printf "%.17g %e %x %s\n", 1/3, 12345.678, 255, scalar gmtime 86400;
my @a = map { sprintf '%03d', $_ * 7919 % 1000 } 1..60; print join(',', sort { $b cmp $a } @a), "\n";
open my $f, '<', '/proc/self/comm' or die; print scalar <$f>; close $f; print "1.5e3" + 2, " ", index('needle in hay', 'hay'), "\n";
print lc 'ABC', uc 'def', "\n"; for (1..20) { my $s = 'x' x ($_ * 50); $s .= $s; print length $s, ' ' } print "\n";"""


class Failure(Exception):
    pass


class Library:
    def __init__(self, file, command, module=None):
        self.file, self.command, self.module = os.path.realpath(file), command, module or os.path.basename(file)


def run(command, folder, **more):
    return subprocess.run([str(c) for c in command], cwd=folder, env=ENVIRONMENT, stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=300, **more)


def succeed(command, folder):
    done = run(command, folder, text=True)
    if done.returncode:
        raise Failure(f"{' '.join(map(str, command))[:200]}\n{done.stderr}")
    return done.stdout


class Trial:
    def __init__(self, library, sonde, folder, functions, counter):
        self.library, self.sonde, self.folder, self.wanted, self.counter = library, sonde, folder, functions, counter
        done = run(["setarch", "-R", *library.command], folder)
        if done.returncode:
            raise Failure(f"{library.command[0]}: {done.stderr.decode(errors='replace')}")
        self.alone = (done.stdout, done.stderr, done.returncode)

    def record(self, options):
        """What the trace holds, after the check that the program did what it does alone."""
        trace = self.folder / "trace"
        done = run(["setarch", "-R", self.sonde, "record", "--json", "-o", trace, *options, "--", *self.library.command],
                   self.folder)
        *before, said = done.stderr.splitlines(keepends=True)
        if (done.stdout, b"".join(before), done.returncode) != self.alone:
            raise Failure(f"recorded with {options}, the program did something else: status {done.returncode}\n"
                          + (done.stdout + done.stderr).decode(errors="replace")[-2000:])
        said = json.loads(said)
        if said["lost"]:
            raise Failure(f"{said['lost']} lost")
        rows = json.loads(succeed([self.sonde, "report", "--stats", "--json", trace], self.folder))
        return said, rows

    def choose(self):
        """Functions without overlap: three quarters of them with AVX-512 code or called by the program."""
        listed = json.loads(succeed([self.sonde, "list", "--json", self.library.file], self.folder))["functions"]
        names = collections.Counter(f["name"] for f in listed)
        listed = sorted((f for f in listed if names[f["name"]] == 1), key=lambda f: f["address"])
        apart = [f for f, g in zip(listed, listed[1:]) if f["address"] + f["size"] <= g["address"]]
        apart = [f for f in apart if SMALLEST <= f["size"] <= LARGEST]
        _, report = self.record(["--no-trap", "-f", self.library.module + ":*"])
        calls = {f["name"]: f["calls"] + f["entries_only"] for f in report["functions"]}
        evex = [f for f in apart if 40 * self.bytes_of(f).count(b"\x62") > f["size"]]  # the prefix, among other things
        vector = spread([f for f in self.disassemble(evex) if is_avx512(f)], self.wanted // 4)
        taken = {f["name"] for f in vector}
        executed = [f for f in apart if 0 < calls.get(f["name"], 0) <= MOST_CALLS and f["name"] not in taken]
        idle = [f for f in apart if f["name"] not in calls and f["name"] not in taken]
        executed = self.disassemble(spread(executed, 3 * self.wanted // 4 - len(vector)))
        chosen = vector + executed
        chosen += self.disassemble(spread(idle, self.wanted - len(chosen)))
        if len(chosen) < 9 * self.wanted // 10:
            raise Failure(f"only {len(chosen)} functions of {self.library.file} to choose from")
        self.report(f"{len(chosen)} functions, {sum(f['name'] in calls for f in chosen)} called, "
                    f"{len(vector)} with AVX-512")
        return chosen

    def bytes_of(self, function):
        at = self.file_offset(function["address"])
        return self.image[at:at + function["size"]]

    def disassemble(self, functions):
        """code: offset in the function -> instruction, as objdump sees it. Without those that it cannot read as a whole."""
        text = bytearray()
        for f in functions:
            f["at"] = len(text)
            text += self.bytes_of(f) + NOPS
        (self.folder / "code").write_bytes(text)
        lines = succeed(["objdump", "-D", "-b", "binary", "-m", "i386:x86-64", "--no-show-raw-insn", self.folder / "code"],
                        self.folder)
        every = {int(a, 16): what for a, what in re.findall(r"^ *([0-9a-f]+):\t(.*)$", lines, re.M)}
        for f in functions:
            f["code"] = {i: every[f["at"] + i] for i in range(f["size"]) if f["at"] + i in every}
        return [f for f in functions if f["at"] + f["size"] in every and not any("(bad)" in c for c in f["code"].values())]

    def file_offset(self, address):
        return next(offset + address - begin for begin, offset, size in self.segments if begin <= address < begin + size)

    def check_list(self, functions):
        """Every offset, one of them an instruction or not. -> addresses that are to be armed."""
        by_address = {f["address"] + i: (f, i) for f in functions for i in range(f["size"])}
        (self.folder / "offsets").write_text("".join(f"{a:#x}\n" for a in by_address))
        listed = json.loads(succeed([self.sonde, "list", "--json", self.library.file, "--at", f"@{self.folder}/offsets"],
                                    self.folder))["instructions"]
        if [i["address"] for i in listed] != sorted(by_address):
            raise Failure("not every offset is listed")
        refused, armed, wrong = collections.Counter(), [], []
        for i in listed:
            f, offset = by_address[i["address"]]
            what = f["code"].get(offset)
            why = i.get("refused")
            if what is None: right = why == INSIDE
            elif why == WATCHED: right = what.startswith("syscall")
            elif why == PAD: right = what.startswith("endbr64")
            else: right = why is None
            if not right: wrong.append(f"{i['name']}: {why or i['method']}, objdump: {what}")
            if why: refused[why] += 1
            else: armed.append(i["address"])
        if wrong:
            raise Failure("\n".join([f"{len(wrong)} offsets are judged wrongly", *wrong[:20]]))
        self.report(f"{len(listed)} offsets: {len(armed)} to be armed; refused: "
                    + ", ".join(f"{n} {why}" for why, n in refused.items()))
        return armed

    def check_recorded(self, functions, armed):
        """All at once. -> hits by address."""
        places = self.folder / "places"
        places.write_text("".join(f"{self.library.module}:{self.file_offset(a):#x}\n" for a in armed))
        said, report = self.record(["--at", f"@{places}"])
        if (said["instructions"], said["refused"]) != (len(armed), 0):
            raise Failure(f"{said['instructions']} instructions armed and {said['refused']} refused, not {len(armed)}")
        begin = {f["name"]: f["address"] for f in functions}
        rows = report["functions"]
        (base,) = {r["address"] - begin[r["name"].split("+0x")[0]] - int(r["name"].split("+")[-1], 16) for r in rows
                   if r["name"].count("+") == 1 and r["name"].split("+0x")[0] in begin} or {0}
        hits = {r["address"] - base: r["calls"] for r in rows}
        by_method = collections.Counter()
        for r in rows:
            by_method[r["method"]] += r["calls"]
        self.report(f"{len(hits)} of them hit, {said['calls']} times; " + ", ".join(f"{n} by {m}" for m, n in by_method.items()))
        return hits

    def check_counts(self, functions, armed, hits):
        """Of functions whose hits are not too many for single steps."""
        armed, sample, total = set(armed), [], 0
        own = [[f["address"] + a for a in f["code"] if f["address"] + a in armed] for f in functions]
        for n, places in sorted((sum(hits.get(a, 0) for a in places), places) for places in own):
            if n and total + n <= COUNTED_HITS:
                sample += places
                total += n
        truth = self.step(sample)
        wrong = [a for a in sample if hits.get(a, 0) != truth[a]]
        # What depends on where things lie (a table of pointers) comes out otherwise when they lie elsewhere.
        moving = set()
        for _ in range(3 if wrong else 0):
            again = self.step(sample, "--randomize")
            moving |= {id(f) for f in functions for a in f["code"] if again.get(f["address"] + a) != truth.get(f["address"] + a)}
        unsteady = [a for f in functions if id(f) in moving for a in wrong if f["address"] <= a < f["address"] + f["size"]]
        wrong = sorted({*wrong} - {*unsteady})
        if wrong or len(unsteady) > len(sample) // 10:
            raise Failure("\n".join([f"{len(wrong)} of {len(sample)} counts differ, {len(unsteady)} more in functions whose "
                                     "counts depend on addresses", *(f"{a:#x}: {hits.get(a, 0)} hits, {truth[a]} steps"
                                                                     for a in wrong[:20])]))
        self.report(f"{len(sample) - len(unsteady)} counts of {total} hits in all are those of single steps"
                    + (f", {len(unsteady)} others depend on addresses" if unsteady else ""))

    def step(self, sample, *options):
        """Executions by address, of an untraced run."""
        offsets, counts = self.folder / "sample", self.folder / "counts"
        offsets.write_text("".join(f"{self.file_offset(a):x}\n" for a in sorted(sample)))
        done = run([self.counter, *options, self.library.file, offsets, counts, *self.library.command], self.folder)
        if (done.stdout, done.stderr, done.returncode) != self.alone:
            raise Failure(f"single-stepped, the program did something else: status {done.returncode}\n{done.stderr.decode()}")
        found = {int(a, 16): int(n) for a, n in (line.split() for line in counts.read_text().splitlines())}
        return {a: found.get(self.file_offset(a), 0) for a in sample}

    def report(self, text):
        print(f"  {text}  [{time.monotonic() - self.began:.1f} s]", flush=True)

    def check(self):
        self.began = time.monotonic()
        self.image = pathlib.Path(self.library.file).read_bytes()
        headers = succeed(["readelf", "-lW", self.library.file], self.folder)
        self.segments = [(int(a, 16), int(o, 16), int(s, 16)) for o, a, s in
                         re.findall(r"LOAD +(0x\w+) (0x\w+) 0x\w+ (0x\w+) ", headers)]
        functions = self.choose()
        armed = self.check_list(functions)
        hits = self.check_recorded(functions, armed)
        self.check_counts(functions, armed, hits)


def is_avx512(function):
    return any(re.search(r"%zmm|%[xy]mm(1[6-9]|2\d|3[01])|{%k", text) for text in function["code"].values())


def spread(items, n):
    n = min(n, len(items))
    return [items[i * len(items) // n] for i in range(n)]


def libraries(work):
    return {
        "libc": Library(LIBRARIES + "libc.so.6", ["/usr/bin/perl", "-e", PERL]),
        "libcrypto": Library(LIBRARIES + "libcrypto.so.3", [work / "crypto_work"]),
        "python3": Library("/usr/bin/python3", ["/usr/bin/python3", "-S", "-c", PYTHON]),
        "libsqlite3": Library(LIBRARIES + "libsqlite3.so.0", ["/usr/bin/sqlite3", ":memory:", SQL]),
    }


def build(work):
    for name, libraries in (("step_counts", []), ("crypto_work", [LIBRARIES + "libcrypto.so.3"])):
        succeed(["gcc", "-O1", "-o", work / name, HERE / f"{name}.c", *libraries], work)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=pathlib.Path, required=True)
    parser.add_argument("--sonde", type=pathlib.Path, required=True)
    parser.add_argument("--functions", type=int, default=500)
    parser.add_argument("libraries", nargs="*")
    options = parser.parse_args()
    work = options.work.resolve()
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    missing = [f for f in (LIBRARIES + "libcrypto.so.3", "/usr/bin/sqlite3", "/usr/bin/python3", "/usr/bin/perl")
               if not os.path.exists(f)]
    if missing:
        print(f"skipped: {', '.join(missing)} not installed (./dev setup)")
        return SKIPPED
    build(work)
    wrong, began = 0, time.monotonic()
    for name, library in libraries(work).items():
        if options.libraries and name not in options.libraries:
            continue
        (work / name).mkdir()
        print(name, flush=True)
        try:
            Trial(library, options.sonde.resolve(), work / name, options.functions // 4, work / "step_counts").check()
        except Failure as failure:
            print(f"FAILED {name}: {failure}", flush=True)
            wrong += 1
    print(f"{time.monotonic() - began:.1f} s in all")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
