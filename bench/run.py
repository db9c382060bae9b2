#!/usr/bin/env python3
"""Cost of a probed call, side by side in one run: the hand-written floor, sonde, and the peers that are installed.

Prints nanoseconds added per call (entry + return) to a 2 ns function: median of nine interleaved rounds and the spread.
Ratios are medians of the rounds' own.
Usage: bench/run.py BUILD_FOLDER [--rounds N] [--quick] [--json]   (normally through `./dev bench`)
"""
import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
TRACEFS = "/sys/kernel/tracing"
DEPTH = 9  # frames of its own below work(): 12 with main's and the thread's


class Skip(Exception):
    pass


def run(command, env=None, cwd=None, said=None):
    """The figure that the program printed; `said`, if given, gets what stood on standard error."""
    if not os.path.exists(command[0]) and not shutil.which(command[0]):
        raise Skip(f"{command[0]} does not exist")
    done = subprocess.run(command, env={**os.environ, **(env or {})}, cwd=cwd, capture_output=True, text=True, timeout=300)
    if done.returncode != 0:
        raise Skip(f"{command[0]} failed: {(done.stderr or done.stdout).strip()[-200:]}")
    numbers = re.findall(r"^[0-9]+\.[0-9]{3}$", done.stdout, re.M)
    if not numbers:
        raise Skip(f"{command[0]} printed no figure: {done.stdout[-200:]!r}")
    if said is not None:
        said.append(done.stderr)
    return float(numbers[-1])


def append(path, line):
    """One write to a tracefs file: Python's own append mode seeks, which these files refuse."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND)
    try:
        os.write(fd, (line + "\n").encode())
    finally:
        os.close(fd)


class Bench:
    def __init__(self, build, scale):
        self.build, self.scale = build, scale
        self.waited, self.lost = [], 0  # of the runs with two threads: share of the threads' time, records
        self.folder = tempfile.mkdtemp(prefix="sonde-bench-")
        self.plain = os.path.join(self.folder, "call_cost")
        subprocess.run(["gcc", "-O2", "-g", "-DWITH_FLOOR", f"{HERE}/call_cost.c", f"{HERE}/floor.S", "-o", self.plain,
                        "-lpthread"], check=True)

    def calls(self, millions):
        return str(max(1000, int(millions * 1e6 * self.scale)))

    def base(self, threads=1, depth=0):
        return run([self.plain, "direct", self.calls(20 if threads == 1 else 100), str(threads), str(depth)])

    def floor(self, threads=1, depth=0):
        return run([self.plain, "floor", self.calls(10 if threads == 1 else 30), str(threads), str(depth)])

    def sonde(self, threads=1, depth=0, *options):
        return run([f"{self.build}/sonde", "record", "-o", f"{self.folder}/t", "-f", "work", *options, "--", self.plain,
                    "direct", self.calls(4), str(threads), str(depth)])

    def sonde_two(self):
        """Long enough, more than half a second, that rings fill and the recorder's own work is paid for."""
        calls, said = self.calls(20), []
        each = run([f"{self.build}/sonde", "record", "-o", f"{self.folder}/t", "-f", "work", "--", self.plain, "direct", calls,
                    "2", "0"], said=said)
        lost, waited = re.search(r"(\d+) lost, waited ([\d.]+) s", said[0]).groups()
        self.lost += int(lost)
        self.waited.append(float(waited) * 1e9 / (2 * int(calls) * each))
        return each

    def sonde_stack(self, threads=1, depth=DEPTH):
        return self.sonde(threads, depth, "-s")

    def uftrace(self, threads=1, depth=0):
        if not shutil.which("uftrace"):
            raise Skip("uftrace is not installed")
        return run(["uftrace", "record", "-P", "^work$", "-d", f"{self.folder}/uftrace", self.plain, "direct",
                    self.calls(2), str(threads), str(depth)])

    def xray(self, threads=1, depth=0):
        binary = os.path.join(self.folder, "xray")
        if not os.path.exists(binary):
            if not shutil.which("clang-19"):
                raise Skip("clang-19 is not installed")
            if subprocess.run(["clang-19", "-O2", "-fxray-instrument", f"{HERE}/call_cost.c", "-o", binary, "-lpthread"],
                              capture_output=True).returncode != 0:
                raise Skip("libclang-rt-19-dev is not installed")
        options = f"patch_premain=true xray_mode=xray-fdr verbosity=0 xray_logfile_base={self.folder}/xray."
        value = run([binary, "direct", self.calls(2), str(threads), str(depth)], env={"XRAY_OPTIONS": options})
        for name in os.listdir(self.folder):
            if name.startswith("xray."):
                os.unlink(os.path.join(self.folder, name))
        return value

    def uprobe(self, threads=1, depth=0):
        if not os.access(f"{TRACEFS}/uprobe_events", os.W_OK):
            raise Skip(f"{TRACEFS}/uprobe_events is not writable (mount tracefs, be root)")
        symbols = subprocess.run(["nm", self.plain], capture_output=True, text=True).stdout
        address = int(re.search(r"^([0-9a-f]+) T work$", symbols, re.M).group(1), 16)
        events = f"{TRACEFS}/uprobe_events"
        for line in (f"p:sondebench/entry {self.plain}:{address:#x}", f"r:sondebench/exit {self.plain}:{address:#x}"):
            append(events, line)
        try:
            append(f"{TRACEFS}/events/sondebench/enable", "1")
            return run([self.plain, "direct", self.calls(0.05), str(threads), str(depth)])
        finally:
            append(f"{TRACEFS}/events/sondebench/enable", "0")
            append(events, "-:sondebench/entry")
            append(events, "-:sondebench/exit")
            with open(f"{TRACEFS}/trace", "w"):
                pass


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="a tenth of the calls")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    bench = Bench(os.path.abspath(arguments.build), 0.1 if arguments.quick else 1)
    # name -> (function, baseline key); what is compared stands side by side
    jobs = {
        "floor": (lambda: bench.floor(), "base"),
        "sonde": (lambda: bench.sonde(), "base"),
        "floor, 2 threads": (lambda: bench.floor(2), "base, 2 threads"),
        "sonde, 2 threads": (lambda: bench.sonde_two(), "base, 2 threads"),
        "uftrace full-dynamic": (lambda: bench.uftrace(), "base"),
        "LLVM XRay FDR": (lambda: bench.xray(), "base"),
        "kernel uprobe+uretprobe": (lambda: bench.uprobe(), "base"),
        "sonde --sum": (lambda: bench.sonde(1, 0, "--sum"), "base"),
        "sonde --sum, 2 threads": (lambda: bench.sonde(2, 0, "--sum"), "base, 2 threads"),
        "sonde, stack of 12": (lambda: bench.sonde_stack(), "base"),
    }
    bases = {"base": lambda: bench.base(), "base, 2 threads": lambda: bench.base(2)}
    values = {name: [] for name in [*jobs, *bases]}
    skipped = {}
    try:
        for number in range(arguments.rounds):
            if sys.stderr.isatty():
                print(f"\rround {number + 1} of {arguments.rounds}", end="", file=sys.stderr)
            for name, function in bases.items():
                values[name].append(function())
            for name, (function, base) in jobs.items():
                if name in skipped:
                    continue
                try:
                    values[name].append(function() - values[base][-1])
                except Skip as reason:
                    skipped[name] = str(reason)
    finally:
        shutil.rmtree(bench.folder, ignore_errors=True)
    median = {name: statistics.median(v) for name, v in values.items() if v}
    # The machine has more than one speed (neighbours on the same cores), so ratios are those of a round.
    ratio = lambda name, to: statistics.median(a / b for a, b in zip(values[name], values[to]))
    rows = [{"name": name, "median_ns": round(median[name], 2), "min_ns": round(min(values[name]), 2),
             "max_ns": round(max(values[name]), 2),
             "floors": round(ratio(name, "floor, 2 threads" if "2 threads" in name else "floor"), 2)}
            for name in jobs if name in median]
    two = {}
    if {"sonde", "sonde, 2 threads"} <= median.keys():
        of_one = {name: [a / b for a, b in zip(values[f"{name}, 2 threads"], values[name])] for name in ("floor", "sonde")}
        two = {**{name: statistics.median(v) for name, v in of_one.items()},
               "scaled": statistics.median(s / f for s, f in zip(of_one["sonde"], of_one["floor"])),
               "waited": statistics.median(bench.waited), "lost": bench.lost}
    if arguments.json:
        print(json.dumps({"rounds": arguments.rounds, "rows": rows, "two_threads": two, "skipped": skipped}))
        return
    if sys.stderr.isatty():
        print("\r", end="", file=sys.stderr)
    print(f"ns added per call of a {median['base']:.1f} ns function, entry + return; median of {arguments.rounds} (min .. max)")
    for row in rows:
        print(f"  {row['name']:<26} {row['median_ns']:9.1f}  ({row['min_ns']:.1f} .. {row['max_ns']:.1f})  {row['floors']:7.2f} x floor")
    if two:
        print(f"two threads against one: floor {two['floor']:.2f}, sonde {two['sonde']:.2f}: {two['scaled']:.2f} x as the"
              f" floor scales; sonde's threads waited {two['waited'] * 100:.1f} % of their time, {two['lost']} records lost")
    for name, reason in skipped.items():
        print(f"  {name:<26} not measured: {reason}")


if __name__ == "__main__":
    main()
