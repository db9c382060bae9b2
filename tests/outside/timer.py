#!/usr/bin/env python3
"""Backtraces from a timer's handler over hooked code: none cut, none that the program does not show untraced.

usage: timer.py --work DIR --sonde FILE [--stacks N]

timer.c prints each distinct chain that it saw. Untraced that is the set of the possible ones; recorded, with every function
hooked, without and with a stack per hit, it must be the same set.
"""
import argparse
import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent


def run(command):
    done = subprocess.run([str(c) for c in command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True, timeout=3000)
    if done.returncode:
        sys.exit(f"FAILED: {command}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
    lines = done.stdout.splitlines()
    counts = {line.rpartition(" ")[0]: int(line.rpartition(" ")[2]) for line in lines if " times chain " not in line}
    return counts, {line.partition(" times chain ")[2] for line in lines if " times chain " in line}


def check(what, counts, chains, possible):
    wrong = [f"not possible untraced: {c}" for c in sorted(chains - possible)]
    wrong += [f"missing: {c}" for c in sorted(possible - chains)]
    wrong += [f"{name}: {counts[name]}" for name in ("wrong results", "too many chains", "outside") if counts[name]]
    print(f"{'FAILED' if wrong else 'ok'} {what}: {counts['taken']} stacks, {len(chains)} distinct chains",
          *wrong, sep="\n  ", flush=True)
    return len(wrong)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=pathlib.Path, required=True)
    parser.add_argument("--sonde", type=pathlib.Path, required=True)
    parser.add_argument("--stacks", type=int, default=20000)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    program = options.work.resolve() / "timer"
    subprocess.run(["gcc", "-O2", "-g", "-fno-optimize-sibling-calls", "-o", program, HERE / "timer.c"], check=True)
    counts, possible = run([program, max(options.stacks // 4, 5000)])
    # In leaf, called by branch here or there; in branch; in round.
    kinds = sorted(chain.split()[0] for chain in possible)
    if counts["outside"] or kinds != ["branch", "leaf", "leaf", "round"]:
        sys.exit(f"FAILED untraced: {counts} {possible}")
    wrong = 0
    for flags in ([], ["-s"]):
        record = [options.sonde.resolve(), "record", "-q", "-o", options.work / "timer.trace", "--drop", *flags, "--"]
        counts, chains = run([*record, program, options.stacks if not flags else options.stacks // 4])
        wrong += check(f"every function hooked {' '.join(flags)}", counts, chains, possible)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
