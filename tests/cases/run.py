#!/usr/bin/env python3
"""Builds a case, runs it alone and under `sonde record`, and compares.

usage: run.py --work DIR [--traced --sonde FILE] [--flag FLAG]... CASE...

A case is a folder with build.sh (bash -e, leaves programs in out/), its sources, and as far as they apply
  commands.txt   one command line per line; without it ./out/case
  flags.txt      beside it, line by line: flags for record, if a command needs any
  ignore.txt     signals that the commands are started with ignored
  trampolines.txt  a regular expression: what return trampolines, which are frames of their own, look like in a backtrace
                 that the program prints; left out of the traced output
  expect.txt     standard output of all commands, one after the other
  counts.txt     PROGRAM FUNCTION CALLS [KIND=N ...]: how often a trace must show a function, and how those calls ended
  not-yet.txt    "counts: ..." or "behaviour: ...": why the traced run is known to fail in what the trace says, or altogether;
                 the case then counts as skipped, and fails once it passes; not-yet-trap.txt with --force-trap, not-yet-sum.txt
                 with --sum

The untraced run is the truth for a traced one: standard output, exit status (or signal) and each line on standard error.
"""
import argparse
import filecmp
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys

import facts

HERE = pathlib.Path(__file__).resolve().parent
TIMEOUT = 120
SKIPPED = 77


class Failure(Exception):
    pass


def tool_folder(work):
    """A folder for PATH where `clang` is clang 19."""
    folder = work / "tools"
    folder.mkdir(parents=True, exist_ok=True)
    for name, real in (("clang", "clang-19"), ("clang++", "clang++-19"), ("ld.lld", "ld.lld-19")):
        target, link = shutil.which(real), folder / name
        if target and not link.is_symlink():
            try:
                link.symlink_to(target)
            except FileExistsError:
                pass  # another run was faster
    return folder


def build(case, work):
    source, folder = HERE / case, work / case
    names = sorted(p.name for p in source.iterdir() if p.is_file())
    if (folder / "out/.built").exists():
        same, differing, missing = filecmp.cmpfiles(source, folder, names, shallow=False)
        if not differing and not missing:
            return folder
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder)
    (folder / "out").mkdir()
    environment = dict(os.environ, PATH=f"{tool_folder(work)}:{os.environ['PATH']}")
    made = subprocess.run(["bash", "-e", "./build.sh"], cwd=folder, env=environment, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, errors="replace")
    if made.returncode:
        raise Failure(f"build.sh failed\n{made.stdout}")
    (folder / "out/.built").touch()
    return folder


def commands(case):
    file = HERE / case / "commands.txt"
    return [shlex.split(line) for line in file.read_text().splitlines()] if file.exists() else [["./out/case"]]


def flags(case):
    file = HERE / case / "flags.txt"
    return [shlex.split(line) for line in file.read_text().splitlines()] if file.exists() else [[]] * len(commands(case))


def ignored_signals(case):
    file = HERE / case / "ignore.txt"
    return [signal.Signals[f"SIG{name}"] for name in file.read_text().split()] if file.exists() else []


def run(folder, command, ignored):
    def prepare():
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)

    try:
        return subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                              timeout=TIMEOUT, preexec_fn=prepare)
    except subprocess.TimeoutExpired:
        raise Failure(f"{shlex.join(command)}: still running after {TIMEOUT} s") from None


def without_trampolines(case, output):
    file = HERE / case / "trampolines.txt"
    return re.sub(file.read_bytes().rstrip(b"\n"), b"", output) if file.exists() else output


def check_same(case, command, alone, traced):
    what = shlex.join(command)
    shell_status = alone.returncode if alone.returncode >= 0 else 128 - alone.returncode
    if traced.returncode not in (alone.returncode, shell_status):
        raise Failure(f"{what}: exit status {traced.returncode} traced, {alone.returncode} untraced\n{text(traced.stderr)}")
    if without_trampolines(case, traced.stdout) != alone.stdout:
        raise Failure(f"{what}: standard output differs\n--- untraced\n{text(alone.stdout)}--- traced\n{text(traced.stdout)}")
    lines = traced.stderr.splitlines()
    for line in alone.stderr.splitlines():
        if line not in lines:
            raise Failure(f"{what}: line missing on standard error: {text(line)}\n{text(traced.stderr)}")


def text(data):
    return data.decode(errors="replace")


def run_case(case, options):
    folder = build(case, options.work)
    ignored = ignored_signals(case)
    alone = [run(folder, command, ignored) for command in commands(case)]
    expected = HERE / case / "expect.txt"
    output = b"".join(a.stdout for a in alone)
    if expected.exists() and output != expected.read_bytes():
        raise Failure(f"untraced output differs from expect.txt\n{text(output)}")
    if not options.traced:
        return f"{len(alone)} programs as expected"
    notes = []
    for command, own_flags, truth in zip(commands(case), flags(case), alone, strict=True):
        name = pathlib.Path(command[0]).name
        trace = folder / f"out/{name}{''.join(options.flag)}.trace"
        record = [options.sonde, "record", "-o", trace, *options.flag, *own_flags, "--", *command]
        check_same(case, command, truth, run(folder, [str(word) for word in record], ignored))
        found = facts.read(options.sonde, trace)
        notes.append(f"{name}: {found.armed} of {found.armed + found.refused} functions")
        facts.check_armed(name, found)
        facts.check_counts(name, found, HERE / case / "counts.txt")
    return "; ".join(notes)


def cases(prefixes):
    known = sorted(p.parent.name for p in HERE.glob("*/build.sh"))
    chosen = [c for c in known if not prefixes or any(c.startswith(p) for p in prefixes)]
    if not chosen:
        sys.exit(f"run.py: no case begins with {' or '.join(prefixes)}")
    return chosen


def main():
    parser = argparse.ArgumentParser(description="Run cases alone and traced.")
    parser.add_argument("--work", type=pathlib.Path, required=True, help="folder for builds and traces")
    parser.add_argument("--sonde", type=pathlib.Path, help="the program under test")
    parser.add_argument("--traced", action="store_true", help="run under sonde record too")
    parser.add_argument("--flag", action="append", default=[], help="a flag for sonde record")
    parser.add_argument("cases", nargs="*", help="beginnings of cases' names; all without")
    options = parser.parse_args()
    options.work = options.work.resolve()
    if options.traced:
        if not options.sonde:
            parser.error("--traced needs --sonde")
        options.sonde = options.sonde.resolve()
    results = [report(case, options) for case in cases(options.cases)]
    return max(results, key=lambda r: (r == 1, r))


def report(case, options):
    """Runs one case and says how it went; 0 passed, 1 failed, 77 known to fail."""
    not_yet = HERE / case / f"not-yet{'-trap' if '--force-trap' in options.flag else '-sum' if '--sum' in options.flag else ''}.txt"
    reason = not_yet.read_text().strip() if options.traced and not_yet.exists() else ""
    try:
        said = run_case(case, options)
    except (Failure, facts.Wrong) as problem:
        known = reason.startswith("behaviour:") or (reason.startswith("counts:") and isinstance(problem, facts.Wrong))
        if not known:
            print(f"FAILED {case}: {problem}", flush=True)
            return 1
        print(f"not yet {case}: {reason}", flush=True)
        return SKIPPED
    if reason:
        print(f"FAILED {case}: passes now; delete tests/cases/{case}/not-yet.txt", flush=True)
        return 1
    print(f"ok {case}: {said}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
