#!/usr/bin/env python3
"""Checks counts.txt against gdb: a breakpoint on each function of an untraced run. usage: gdb_counts.py --work DIR CASE...

Counts above --limit are left out (a breakpoint costs some 50 microseconds), and said to be.
"""
import argparse
import fnmatch
import pathlib
import re
import shlex
import subprocess
import sys

import run


def functions(program):
    """Names as in the symbol table, demangled without arguments -> addresses, for names that counts.txt may use."""
    table = {}
    for line in subprocess.run(["nm", "-C", program], stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines():
        if match := re.match(r"([0-9a-f]+) [TtWw] (.*)$", line):
            if "[clone .cold" in match.group(2):
                continue  # entered by a jump, not a call
            table.setdefault(match.group(2).split("(")[0], set()).add(int(match.group(1), 16))
    return table


def arguments_of(case, name):
    """Those of the case's first command for this program; a case without commands.txt has none."""
    commands = run.HERE / case / "commands.txt"
    for line in commands.read_text().splitlines() if commands.exists() else []:
        words = line.split()
        if words and words[0] == f"./out/{name}":
            return words[1:]
    return []


def count(folder, program, addresses, arguments):
    """Hits of each link-time address, by gdb without address randomisation."""
    pie = b"DYN" in subprocess.run(["readelf", "-h", program], cwd=folder, stdout=subprocess.PIPE, check=True).stdout
    base = 0x555555554000 if pie else 0
    script = ["set pagination off", "set confirm off", "set breakpoint pending off", "handle all nostop noprint pass",
              "handle SIGTRAP stop print nopass",
              f"starti {shlex.join(arguments)} > /dev/null"]
    for number, address in enumerate(addresses, 1):
        script += [f"break *{base + address:#x}", f"ignore {number} 1000000000"]
    script += ["continue", "info breakpoints"]
    lines = [word for line in script for word in ("-ex", line)]
    text = subprocess.run(["gdb", "-nx", "-q", "-batch", *lines, program], cwd=folder, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, errors="replace", timeout=600).stdout
    table = text[text.rindex("Num     Type"):]
    hits = dict.fromkeys(range(1, len(addresses) + 1), 0)
    number = 0
    for line in table.splitlines():
        if match := re.match(r"(\d+)\s+breakpoint", line):
            number = int(match.group(1))
        elif match := re.match(r"\s+breakpoint already hit (\d+) time", line):
            hits[number] = int(match.group(1))
    return dict(zip(addresses, hits.values()))


LEFT_OUT = {"111": "gdb's breakpoints are SIGTRAPs, and it handles those itself",
            "112": "gdb's breakpoints are SIGTRAPs, and it ignores those",
            "114": "to a breakpoint on an entry a loop that begins there is a call each time"}


def check(case, options):
    if reason := LEFT_OUT.get(case[:3]):
        print(f"{case}: left out: {reason}")
        return 0
    folder, wrong = run.build(case, options.work), 0
    rows = [line.split() for line in (run.HERE / case / "counts.txt").read_text().splitlines() if line and line[0] != "#"]
    for name in dict.fromkeys(row[0] for row in rows):
        if b"__fentry__" in (folder / "out" / name).read_bytes():
            print(f"{case}: {name}: left out, its profiler's ticks make gdb count breakpoints twice")
            continue
        table = functions(folder / "out" / name)
        wanted = {row[1]: int(row[2]) for row in rows if row[0] == name}
        small = {f: n for f, n in wanted.items() if n <= options.limit}
        places = {f: sorted(set().union(*(a for k, a in table.items() if fnmatch.fnmatchcase(k, f)))) for f in small}
        for function in [f for f, a in places.items() if not a]:
            print(f"{case}: {name}: no symbol for {function}")
            del places[function]
        addresses = sorted(set().union(*places.values()))
        hits = count(folder, f"./out/{name}", addresses, arguments_of(case, name)) if places else {}
        for function, addresses in places.items():
            seen = sum(hits[a] for a in addresses)
            wrong += seen != wanted[function]
            if seen != wanted[function]:
                print(f"{case}: {name}: {function} is called {seen} times, counts.txt says {wanted[function]}")
        print(f"{case}: {name}: {len(places)} functions counted, {len(wanted) - len(places)} left out", flush=True)
    return wrong


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=pathlib.Path, required=True)
    parser.add_argument("--limit", type=int, default=50000)
    parser.add_argument("cases", nargs="*")
    options = parser.parse_args()
    options.work = options.work.resolve()
    wrong = sum(check(c, options) for c in run.cases(options.cases) if (run.HERE / c / "counts.txt").exists())
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
