#!/usr/bin/env python3
"""Stacks of a recorded program as everybody else's tools see them, held against those of the same program untraced.

usage: stacks.py --work DIR --sonde FILE [--all]

Readers: inside the program backtrace(), _Unwind_Backtrace and GNU libunwind; from outside gdb, eu-stack and `sonde stack`, each
on the live process, on gcore's core file and on the kernel's. Each must show the chain that it shows of the untraced program,
frames in return trampolines aside, and as many of those as calls are hooked. `bt` of a thousand hooked calls takes gdb
less than a second. Quick: every function hooked, without and with a stack per hit, and two subsets of the six. --all: all 64.
"""
import argparse
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
SIX = ["first", "second", "third", "fourth", "fifth", "sixth"]
DEPTH = 1000
CORE_LIMIT = 100 << 20  # what a recording may add to a core file: the agent's own data, not the rings
BT_LIMIT = 1.0  # seconds of processor time
SKIPPED = 77

GDB_SCRIPT = r"""
import gdb, time
gdb.execute("set pagination off")
gdb.execute("set backtrace past-main on")
gdb.execute("set backtrace limit unlimited")
# `bt` first, as a user's first one is.
for thread in gdb.selected_inferior().threads():
    thread.switch()
    gdb.execute("maintenance flush register-cache", to_string=True)
    begin = time.process_time()  # processor time: other processes' work is none of ours
    text = gdb.execute("bt", to_string=True)
    early = "stopped early: " + text[-200:].replace("\n", " ") if "Backtrace stopped" in text else ""
    print("BT %.3f" % (time.process_time() - begin), early)
    frame, pcs = gdb.newest_frame(), []
    while frame:
        if frame.type() not in (gdb.INLINE_FRAME, gdb.TAILCALL_FRAME):
            pcs.append("%x" % frame.pc())
        frame = frame.older()
    print("STACK", thread.ptid[1] or thread.ptid[0], *pcs)
"""


class Failure(Exception):
    pass


def output_of(command, **options):
    done = subprocess.run([str(c) for c in command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True, errors="replace", timeout=120, **options)
    return done.stdout, done.stderr, done.returncode


class Maps:
    """Where addresses lie: (file, offset), or None in the agent."""

    def __init__(self, lines):
        self.ranges = []
        for line in lines:
            if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) \S+ ([0-9a-f]+) \S+ \S+ *(.*)$", line):
                begin, end, offset = (int(g, 16) for g in match.groups()[:3])
                self.ranges.append((begin, end, offset, match.group(4)))

    def place(self, pc):
        for begin, end, offset, name in self.ranges:
            if begin <= pc < end:
                return None if name.endswith("/libsonde-agent.so") else (name, pc - begin + offset)
        return ("nowhere", pc)

    def chain(self, pcs):
        """The chain, and how many trampolines were among its frames."""
        places = [self.place(pc) for pc in pcs]
        kept = [p for p in places if p]
        return kept, len(places) - len(kept)


class Process:
    """The program, recorded or not, once both threads wait."""

    def __init__(self, command, folder, recorded):
        self.folder = folder
        self.started = subprocess.Popen([str(c) for c in command], cwd=folder, stdin=subprocess.DEVNULL,
                                        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                                        preexec_fn=allow_cores)
        lines = []
        for line in self.started.stdout:
            if line == "ready\n":
                break
            lines.append(line)
        else:
            raise Failure(f"{command}: ended early\n{''.join(lines)}")
        self.maps = Maps(lines)
        self.inside = {}
        for line in lines:
            if line.startswith("inside "):
                _, reader, thread, *pcs = line.split()
                self.inside[reader, thread] = [int(pc, 16) for pc in pcs]
        self.pid = self.started.pid
        if recorded:
            self.pid = int(pathlib.Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()[0])
        self.threads = sorted(int(p.name) for p in pathlib.Path(f"/proc/{self.pid}/task").iterdir())
        deadline = time.monotonic() + 60
        while not all(self.waits(tid) for tid in self.threads):
            if time.monotonic() > deadline:
                raise Failure("the program's threads do not wait in pause()")
            time.sleep(0.01)

    def waits(self, tid):
        return pathlib.Path(f"/proc/{self.pid}/task/{tid}/syscall").read_text().split()[0] == "34"  # pause

    def by_thread(self, stacks):
        """Stacks by thread id -> by the name of the thread: the first has the chain of six."""
        if sorted(stacks) != self.threads:
            raise Failure(f"threads {sorted(stacks)}, not {self.threads}")
        deep, = (tid for tid in self.threads if tid != self.pid)
        return {"chain": stacks[self.pid], "deep": stacks[deep]}

    def die_with_core(self):
        """The kernel's core file, or why there is none."""
        pattern = pathlib.Path("/proc/sys/kernel/core_pattern").read_text().strip()
        if not pattern or pattern[0] == "|" or "/" in pattern:
            self.end()
            return None, f"/proc/sys/kernel/core_pattern sends core files elsewhere: {pattern}"
        os.kill(self.pid, signal.SIGABRT)
        self.started.wait(timeout=60)
        cores = [p for p in self.folder.glob("core*") if not p.name.startswith("core.by-gcore")]
        if len(cores) != 1:
            raise Failure(f"the kernel wrote {len(cores)} core files with core_pattern {pattern}")
        return cores[0], None

    def end(self):
        try:
            os.kill(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.started.wait(timeout=60)


def allow_cores():
    import resource
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))


def by_gdb(arguments, folder, after=()):
    script = folder / "stacks.py"
    script.write_text(GDB_SCRIPT)
    extra = [word for command in after for word in ("-ex", command)]
    begin = time.monotonic()
    gdb = ["gdb", "-nx", "-q", "-batch", "-ex", "set debuginfod enabled off"]
    out, err, _ = output_of([*gdb, *arguments, "-x", script, *extra])
    whole = time.monotonic() - begin
    stacks, slowest = {}, 0.0
    for line in out.splitlines():
        if line.startswith("STACK "):
            tid, *pcs = line.split()[1:]
            stacks[int(tid)] = [int(pc, 16) for pc in pcs]
        elif line.startswith("BT "):
            slowest = max(slowest, float(line.split()[1]))
            if "stopped early" in line:
                raise Failure(f"gdb: {line}")
    if not stacks:
        raise Failure(f"gdb shows no stack\n{out}{err}")
    return stacks, slowest, whole


def by_eu_stack(arguments):
    out, err, status = output_of(["eu-stack", "-n", "0", *arguments])
    stacks, current = {}, None
    for line in out.splitlines():
        if match := re.match(r"TID (\d+):", line):
            current = stacks.setdefault(int(match.group(1)), [])
        elif match := re.match(r"#\d+ +0x([0-9a-f]+)", line):
            current.append(int(match.group(1), 16))
    return stacks, (status, re.sub(r"\d+", "N", err))


def by_sonde(sonde, arguments):
    out, err, status = output_of([sonde, "stack", "--json", "--reliable", "--max-frames", "10000", *arguments])
    if status or err:
        raise Failure(f"sonde stack {' '.join(map(str, arguments))}: status {status}\n{err}")
    found = json.loads(out)
    for thread in found["threads"]:
        if thread["verdict"] != "reliable" or thread["reason"] != "end":
            raise Failure(f"sonde stack: thread {thread['tid']}: {thread['reason']}")
    return {t["tid"]: [int(f["pc"], 16) for f in t["frames"]] for t in found["threads"]}


class Reading:
    """All that all readers say of one run: (reader, thread) -> (chain, trampolines)."""

    def __init__(self):
        self.chains, self.said, self.times, self.skipped, self.sizes = {}, {}, [], [], {}

    def add(self, reader, process, stacks):
        for thread, pcs in process.by_thread(stacks).items():
            self.chains[reader, thread] = process.maps.chain(pcs)


def read_all(process, program, sonde):
    reading, folder = Reading(), process.folder
    for old in folder.glob("core*"):
        old.unlink()
    try:
        for (reader, thread), pcs in process.inside.items():
            reading.chains[reader, thread] = process.maps.chain(pcs)
        by_gcore = folder / "core.by-gcore"
        stacks, slowest, whole = by_gdb(["-p", process.pid], folder, [f"gcore {by_gcore}"])
        reading.add("gdb -p", process, stacks)
        reading.times.append(("gdb -p", slowest, whole))
        stacks, reading.said["eu-stack -p"] = by_eu_stack(["-p", process.pid])
        reading.add("eu-stack -p", process, stacks)
        reading.add("sonde stack -p", process, by_sonde(sonde, ["-p", process.pid]))
        by_kernel, reason = process.die_with_core()
        if reason:
            reading.skipped.append(f"the kernel's core file: {reason}")
    finally:
        process.end()
    for name, core in (("gcore's", by_gcore), ("the kernel's", by_kernel)):
        if not core:
            continue
        reading.sizes[name] = core.stat().st_size
        stacks, slowest, whole = by_gdb([program, core], folder)
        reading.add(f"gdb on {name} core", process, stacks)
        reading.times.append((f"gdb on {name} core", slowest, whole))
        stacks, reading.said[f"eu-stack on {name} core"] = by_eu_stack(["--core", core, "-e", program])
        reading.add(f"eu-stack on {name} core", process, stacks)
        reading.add(f"sonde stack on {name} core", process, by_sonde(sonde, [core]))
    return reading


def show_difference(truth, chain):
    for at, (a, b) in enumerate(zip(truth + [None] * len(chain), chain + [None] * len(truth))):
        if a != b:
            return f"frame {at} is {b}, untraced {a}; {len(chain)} frames, untraced {len(truth)}"
    return "the same"


def compare(what, truth, reading, hooked):
    """hooked: thread -> number of hooked calls on its stack. sonde's walker shows callers in place of trampolines."""
    wrong = []
    if set(reading.chains) != set(truth.chains):
        wrong.append(f"readers {set(reading.chains) ^ set(truth.chains)} are missing on one side")
    for (reader, thread), (chain, trampolines) in reading.chains.items():
        expected = truth.chains[reader, thread][0]
        if chain != expected:
            wrong.append(f"{reader}, {thread}: {show_difference(expected, chain)}")
        # The engine leaves trampolines out of what libgcc's unwinder shows to the program, and sonde's walker knows them.
        shown = reader not in ("backtrace", "_Unwind_Backtrace") and not reader.startswith("sonde")
        expected = hooked[thread] + hooked.get(reader, 0) if shown else 0
        if trampolines != expected:
            wrong.append(f"{reader}, {thread}: {trampolines} trampolines, not {expected}")
    for reader, said in reading.said.items():
        if said != truth.said[reader]:
            wrong.append(f"{reader} says {said}, untraced {truth.said[reader]}")
    for name, size in reading.sizes.items():
        if size > truth.sizes[name] + CORE_LIMIT:
            wrong.append(f"{name} core file has {size >> 20} MB, untraced {truth.sizes[name] >> 20} MB")
    for reader, slowest, whole in reading.times:
        if slowest >= BT_LIMIT:
            wrong.append(f"{reader}: bt takes {slowest:.3f} s")
    print(f"{'FAILED' if wrong else 'ok'} {what}: {len(reading.chains)} chains", *(f"; {w}" for w in wrong), flush=True)
    return len(wrong)


def check_truth(truth):
    """The untraced chains themselves: every reader sees both stacks whole."""
    for (reader, thread), (chain, trampolines) in truth.chains.items():
        least = {"chain": len(SIX) + 4, "deep": DEPTH + 4}[thread]
        if trampolines or len(chain) < least:
            raise Failure(f"untraced, {reader}, {thread}: {len(chain)} frames")


def build(work):
    program = work / "chain"
    libraries = ["-Wl,--no-as-needed", "-lgcc_s", "-lunwind"]
    subprocess.run(["gcc", "-O2", "-g", "-pthread", "-o", program, HERE / "chain.c", *libraries], check=True)
    return program


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=pathlib.Path, required=True)
    parser.add_argument("--sonde", type=pathlib.Path, required=True)
    parser.add_argument("--all", action="store_true")
    options = parser.parse_args()
    work = options.work.resolve() / ("all" if options.all else "quick")
    work.mkdir(parents=True, exist_ok=True)
    sonde = options.sonde.resolve()
    for tool in ("gdb", "eu-stack"):
        if subprocess.run(["which", tool], stdout=subprocess.DEVNULL).returncode:
            print(f"skipped: {tool} is not installed (./dev setup)")
            return SKIPPED
    program = build(work)
    truth = read_all(Process([program], work, False), program, sonde)
    check_truth(truth)
    for reason in truth.skipped:
        print(f"skipped: {reason}")
    for reader, slowest, whole in truth.times:
        print(f"untraced: {reader}: bt {slowest:.3f} s of processor time, gdb as a whole {whole:.3f} s by the clock")

    record = [sonde, "record", "-q", "-o", work / "trace"]
    wrong, times = 0, []
    # main, the six, look_and_wait; deep_thread, the thousand, look_and_wait. The in-process readers are called by `look`,
    # unw_step by a function of its own.
    everything = {"chain": 2 + len(SIX), "deep": 2 + DEPTH, "unw_backtrace": 1, "unw_step": 2}
    for flags in ([], ["-s"]):
        process = Process([*record, *flags, "--", program], work, True)
        reading = read_all(process, program, sonde)
        wrong += compare(f"every function hooked {' '.join(flags)}", truth, reading, everything)
        times += reading.times
    for mask in range(64) if options.all else (0b010110, 0b101001):
        chosen = [name for bit, name in enumerate(SIX) if mask >> bit & 1]
        # A recording needs a pattern; where none of the six is wanted, something is hooked that is not on these stacks.
        patterns = [word for name in chosen or ["keep"] for word in ("-f", name)]
        process = Process([*record, *patterns, "--", program], work, True)
        reading = read_all(process, program, sonde)
        wrong += compare(f"hooked: {' '.join(chosen) or 'none of the six'}", truth, reading,
                         {"chain": len(chosen), "deep": 0})
    for reader in dict.fromkeys(r for r, _, _ in times):
        print(f"a thousand hooked calls: {reader}: bt", *(f"{s:.3f}" for r, s, _ in times if r == reader),
              "s of processor time, gdb as a whole", *(f"{w:.3f}" for r, _, w in times if r == reader), "s by the clock")
    return 1 if wrong else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Failure as failure:
        print(f"FAILED: {failure}")
        sys.exit(1)
