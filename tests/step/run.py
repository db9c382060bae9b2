#!/usr/bin/env python3
"""The proof: real programs single-stepped, and at every instruction sonde's walk held against the truth.

usage: run.py --stepper FILE --work DIR [--steps N] [--urgent] [--from start|entry] [PROGRAM...]

Prints a table, one line for each program and start, and below it where stacks are not reliable. Fails if a stack that is
called reliable is not the true one, if the ways to walk differ, or if too few stacks are reliable on compiled code. A program
whose package is not installed is named, with what to install; if none is left the exit status is 77.
"""
import argparse
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent

# Places where no stack need be reliable, as "reason file:function" (a regular expression): code that no compiler has made.
# What stands here of crt1.o, crti.o and crtbegin.o is in every program and library: it has no rows.
START_FILES = r"no-table-row [^:]*:(\.init|\.fini|_init|_fini|frame_dummy|register_tm_clones|deregister_tm_clones|__do_global_dtors_aux)"


class Program:
    """`prepare(work)` gives the words of the command and a file for its standard input, or None."""

    def __init__(self, name, prepare, needs, package, by_hand=()):
        self.name, self.prepare, self.needs, self.package = name, prepare, needs, package
        self.by_hand = tuple(re.compile(pattern) for pattern in by_hand)

    def missing(self):
        return [n for n in self.needs if not shutil.which(n)]


def numbers(work):
    path = work / "numbers"
    if not path.exists():
        path.write_text("\n".join(map(str, range(4_000_000))))
    return path


def gzip(work):
    return ["/bin/gzip", "-c"], numbers(work)


def sqlite3(work):
    script = work / "script.sql"
    script.write_text("create table t(a integer primary key, b text);\n"
                      "with recursive n(i) as (select 1 union all select i+1 from n where i < 300000)\n"
                      "insert into t select i, hex(i * 7919) || 'x' from n;\ncreate index x on t(b);\n"
                      "select count(*), max(length(b)) from t a join t c on a.b = c.b where c.a % 7 = 3 order by a.b limit 5;\n" * 1)
    return ["/usr/bin/sqlite3", ":memory:"], script


PROGRAMS = [
    Program("gzip", gzip, ["/bin/gzip"], "gzip"),
    Program("sqlite3", sqlite3, ["/usr/bin/sqlite3"], "sqlite3"),
]


def step(args, program, start):
    command, stdin = program.prepare(args.work)
    words = [args.stepper, "--steps", args.steps, "--from", start]
    if args.urgent:
        words.append("--urgent")
    if stdin:
        words += ["--stdin", stdin]
    words += ["--", *command]
    # Not the user's tables: `sonde check` may have marked rows there.
    environment = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", "HOME": str(args.work), "XDG_CACHE_HOME": str(args.work / "cache")}
    done = subprocess.run([str(w) for w in words], cwd=args.work, env=environment, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True, timeout=7200)
    try:
        return json.loads(done.stdout), done.stderr
    except ValueError:
        return None, f"exit status {done.returncode}: {done.stdout}{done.stderr}"


def judge(program, counts):
    """What is wrong with it, in words; and how many unreliable states are in compiled code."""
    problems = []
    compiled = sum(n for place, n in counts["places"].items()
                   if not re.fullmatch(START_FILES, place) and not any(p.search(place) for p in program.by_hand))
    if counts["wrong"]:
        problems.append(f"{counts['wrong']} stacks are called reliable and are not the true ones: {counts['wrong_places']}")
    if counts["forms_differ"]:
        problems.append(f"{counts['forms_differ']} times the ways to walk differ")
    if compiled * 10_000 > counts["states"]:
        problems.append(f"{compiled} stacks on compiled code are not reliable")
    return problems, compiled


HEADER = f"{'program':<22}{'steps':>9}{'compared':>10}{'reliable':>10}{'%':>9}{'wrong':>7}{'unknown':>9}{'s':>6}"


def line(title, c):
    share = 100 * c["reliable"] / max(1, c["states"])
    return (f"{title:<22}{c['steps']:>9}{c['states']:>10}{c['reliable']:>10}{share:>9.4f}{c['wrong']:>7}{c['unknown']:>9}"
            f"{c['seconds']:>6.0f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--stepper", type=pathlib.Path, required=True)
    parser.add_argument("--work", type=pathlib.Path, required=True)
    parser.add_argument("--steps", type=int, default=20000)
    parser.add_argument("--urgent", action="store_true")
    parser.add_argument("--from", dest="starts", action="append")
    parser.add_argument("programs", nargs="*")
    args = parser.parse_args()
    args.work, args.stepper = args.work.resolve(), args.stepper.resolve()
    args.work.mkdir(parents=True, exist_ok=True)
    if os.uname().machine != "x86_64":
        sys.exit("skipped: programs are single-stepped on x86-64 only") or 77
    begin, failed, seen = time.monotonic(), 0, 0
    chosen = [p for p in PROGRAMS if not args.programs or p.name in args.programs]
    print(HEADER, flush=True)
    for program in chosen:
        if missing := program.missing():
            print(f"skipped: {program.name}: {', '.join(missing)} is not there; install the package {program.package}", flush=True)
            continue
        for start in args.starts or ["start", "entry"]:
            seen += 1
            counts, words = step(args, program, start)
            if counts is None:
                failed += 1
                print(f"FAILED {program.name}, {start}: {words}", flush=True)
                continue
            print(line(f"{program.name}, {start}", counts), flush=True)
            problems, _ = judge(program, counts)
            for place, number in sorted(counts["places"].items(), key=lambda item: -item[1])[:12]:
                print(f"    {number:>8}  {place}")
            for problem in problems:
                print(f"FAILED {program.name}, {start}: {problem}")
            if problems:
                failed += 1
                print(words, flush=True)
    if not seen:
        print("skipped: none of the programs is installed (./dev setup)")
        return 77
    print(f"{'FAILED' if failed else 'ok'} {seen} runs in {time.monotonic() - begin:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
