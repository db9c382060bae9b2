#!/usr/bin/env python3
"""Counts of calls in programs that nobody here wrote, held against the hits of gdb's breakpoints in an untraced run.

usage: counts.py --work DIR --sonde FILE [PROGRAM...]      programs: sqlite3 python3 cc1 cmake; all without

Ten functions of each, called between 1 and 200 times, spread over that range. Both runs are without address randomisation, so
that nothing in the program depends on where it lies; which functions are compared is taken from two recordings that
agree, what is compared from gdb. Output and exit status under the recorder equal the untraced ones.
"""
import argparse
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

SKIPPED = 77
PIE_BASE = 0x555555554000  # the kernel's, without randomisation
ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LC_ALL": "C", "HOME": "/nonexistent", "SHELL": "/bin/sh",
               "PYTHONHASHSEED": "0"}

# Breakpoints go in where sonde patches too: when the loader has mapped everything and no constructor has run.
GDB_SCRIPT = r"""
import gdb, re
def mapped(name):
    lines = open("/proc/%d/maps" % gdb.selected_inferior().pid).read().splitlines()
    starts = [int(line.split("-")[0], 16) for line in lines if line.endswith("/" + name)]
    return min(starts) if starts else None
gdb.execute("set pagination off")
gdb.execute("set confirm off")
gdb.execute("set breakpoint pending off")
gdb.execute("set stop-on-solib-events 1")
gdb.execute("handle all nostop noprint pass")
gdb.execute("handle SIGTRAP stop print nopass")
gdb.execute("run", to_string=True)
library = "@LIBRARY@"
while library and mapped(library) is None:
    gdb.execute("continue", to_string=True)
if not library:
    gdb.execute("continue", to_string=True)  # to the second event: the program and its libraries are there
base = mapped(library) if library else @BASE@
gdb.execute("set stop-on-solib-events 0")
points = []
for address in @ADDRESSES@:
    point = gdb.Breakpoint("*%#x" % (base + address), internal=True)
    point.ignore_count = 1000000000
    points.append((address, point))
ended = []
gdb.events.exited.connect(lambda event: ended.append(getattr(event, "exit_code", -1)))
gdb.execute("continue")
print("ENDED", *ended)
for address, point in points:
    print("HIT %x %d" % (address, point.hit_count))
"""


class Failure(Exception):
    pass


class Program:
    def __init__(self, command, patterns=(), library=None, files=None, produced=None):
        self.command, self.patterns, self.library = command, patterns, library
        self.files, self.produced = files or {}, produced


def programs():
    cc1 = subprocess.run(["gcc", "-print-prog-name=cc1"], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    source = "struct s { int a, b; };\nint f(struct s *s, int n) { int t = 0; while (n--) t += s[n].a * s[n].b; return t; }\n"
    return {
        "sqlite3": Program(["/usr/bin/sqlite3", ":memory:",
                            "create table t(x); insert into t values(1),(2); select sum(x) from t;"],
                           ["-f", "libsqlite3.so.0:sqlite3_*"], "libsqlite3.so.0.8.6"),
        "python3": Program(["/usr/bin/python3", "-S", "-c", "print(sum(map(int, '1 2 3'.split())))"], ["-f", "Py*"]),
        "cc1": Program([cc1, "-quiet", "-O2", "in.c", "-o", "out.s"], files={"in.c": source}, produced="out.s"),
        "cmake": Program(["/usr/bin/cmake", "--version"]),
    }


def run(command, folder):
    done = subprocess.run([str(c) for c in command], cwd=folder, env=ENVIRONMENT, stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=600)
    return done.stdout, done.stderr, done.returncode


def produced(program, folder):
    return (folder / program.produced).read_bytes() if program.produced else b""


def recorded(sonde, program, folder, truth):
    """name -> (run-time address, calls), after the check that the program did what it does alone."""
    trace = folder / "trace"
    command = ["setarch", "-R", sonde, "record", "-q", "-o", trace, *program.patterns, "--", *program.command]
    out, err, status = run(command, folder)
    if (out, status, produced(program, folder)) != truth:
        raise Failure(f"recorded: status {status}, untraced {truth[1]}, or output or what it writes differ\n"
                      f"{out.decode(errors='replace')}{err.decode(errors='replace')}")
    text, err, status = run([sonde, "report", "--stats", "--json", trace], folder)
    if status:
        raise Failure(err.decode(errors="replace"))
    report = json.loads(text)
    if report["footer"]["lost"]:
        raise Failure(f"records lost: {report['footer']['lost']}")
    return {f["name"]: (f["address"], f["calls"]) for f in report["functions"]}


def symbols(library):
    table = {}
    for line in subprocess.run(["nm", "-D", library], stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines():
        if match := re.match(r"([0-9a-f]+) [TW] ([^@]+)", line):
            table[match.group(2)] = int(match.group(1), 16)
    return table


def image_addresses(program, names, found, folder):
    """Link-time addresses: of a library by its symbols, of a program from where it lay."""
    if program.library:
        paths = subprocess.run(["ldd", program.command[0]], stdout=subprocess.PIPE, text=True, check=True).stdout
        files = [os.path.realpath(p) for p in re.findall(r"=> (\S+)", paths)]
        path = next(p for p in files if p.endswith(program.library))
        table = symbols(path)
        return {name: table[name] for name in names}, 0
    header = subprocess.run(["readelf", "-h", program.command[0]], stdout=subprocess.PIPE, text=True, check=True).stdout
    base = PIE_BASE if re.search(r"Type:\s+DYN", header) else 0
    return {name: found[name][0] - base for name in names}, base


def choose(first, second):
    """Ten functions with the same count in both recordings, spread evenly over the counts that occur."""
    rows = sorted((calls, name) for name, (_, calls) in first.items()
                  if 1 <= calls <= 200 and second.get(name, (0, 0))[1] == calls)
    if len(rows) < 10:
        raise Failure(f"only {len(rows)} functions are called between 1 and 200 times, equally often in two recordings")
    by_count = {}
    for calls, name in rows:
        by_count.setdefault(calls, []).append(name)
    counts = sorted(by_count)
    chosen = [by_count[counts[i * (len(counts) - 1) // 9]].pop() for i in range(10)] if len(counts) >= 10 else []
    return chosen or [rows[i * (len(rows) - 1) // 9][1] for i in range(10)]


def by_gdb(program, addresses, base, folder, truth):
    script = folder / "counts_script.py"
    script.write_text(GDB_SCRIPT.replace("@LIBRARY@", program.library or "").replace("@BASE@", str(base))
                      .replace("@ADDRESSES@", repr(sorted(addresses))))
    gdb = ["gdb", "-nx", "-q", "-batch", "-ex", "set debuginfod enabled off", "-x", script, "--args"]
    out, err, _ = run([*gdb, *program.command], folder)
    text = out.decode(errors="replace")
    if f"ENDED {truth[1]}" not in text or produced(program, folder) != truth[2]:
        raise Failure(f"under gdb the program does not end as alone\n{text}{err.decode(errors='replace')}")
    return {int(a, 16): int(n) for a, n in re.findall(r"^HIT ([0-9a-f]+) (\d+)$", text, re.M)}


def check(name, program, sonde, work):
    folder = work / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for file, text in program.files.items():
        (folder / file).write_text(text)
    out, _, status = run(["setarch", "-R", *program.command], folder)
    truth = (out, status, produced(program, folder))
    first = recorded(sonde, program, folder, truth)
    second = recorded(sonde, program, folder, truth)
    differ = sum(second.get(n, (0, 0))[1] != calls for n, (_, calls) in first.items())
    chosen = choose(first, second)
    addresses, base = image_addresses(program, chosen, first, folder)
    hits = by_gdb(program, addresses.values(), base, folder, truth)
    wrong = [f"{f}: {first[f][1]} calls, gdb {hits.get(addresses[f])}" for f in chosen if first[f][1] != hits.get(addresses[f])]
    print(f"{'FAILED' if wrong else 'ok'} {name}: {len(first)} functions ({differ} counted otherwise by a second recording), "
          f"10 by gdb: {' '.join(str(first[f][1]) for f in chosen)}", *wrong, sep="\n  ", flush=True)
    return len(wrong)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=pathlib.Path, required=True)
    parser.add_argument("--sonde", type=pathlib.Path, required=True)
    parser.add_argument("programs", nargs="*")
    options = parser.parse_args()
    if not shutil.which("gdb"):
        print("skipped: gdb is not installed (./dev setup)")
        return SKIPPED
    wrong = 0
    for name, program in programs().items():
        if options.programs and name not in options.programs:
            continue
        if not os.path.exists(program.command[0]):
            print(f"skipped: {program.command[0]} is not installed")
            continue
        wrong += check(name, program, options.sonde.resolve(), options.work.resolve())
    return 1 if wrong else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Failure as failure:
        print(f"FAILED: {failure}")
        sys.exit(1)
