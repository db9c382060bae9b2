#!/usr/bin/env python3
"""Each reason that a walk knows, made to arise by a program (reasons.c), seen from outside and from inside.

usage: reasons.py --work DIR --sonde FILE [REASON...]

From outside: `sonde stack` of the waiting program, best effort and --reliable. From inside: the stack that a hit in the same
place records. Both must say just this reason, of just the frame that it is true of, and believe every frame before it. Fails
if core/walk/reason.cc has a reason that is not here.
"""
import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
TOP = HERE.parent.parent

# Reason -> the frames from shown() to the one that it is true of, by function; "" is code without a name, "*" the C library's.
SIGNAL = ["shown", "handler", "*"]
STACKS = {
    "reliable": None,  # each frame but the last of "end"
    "end": ["shown", "make", "main", "*", "*", "_start"],
    "unknown-code": ["shown", ""],
    "special-code": ["shown", "declared"],
    "boundary-next": [*SIGNAL, "interrupted_without_row"],
    "no-table-row": ["shown", "without_row"],
    "fp-mismatch": ["shown", "by_rbp"],
    "ra-not-after-call": ["shown", "pushed"],
    "recovery-failed": ["shown", ""],
    "stack-out-of-range": ["shown", "by_rbx"],
    "non-progress": ["shown", "by_rbx"],
    "depth-limit": ["shown"] + ["deep"] * 48,
    "buffer-full": ["shown"] + ["deep"] * 127,
    "foreign-stack": [*SIGNAL, "by_rbx_in_signal"],
    "null-pc": [*SIGNAL, ""],
    "row-refuted": ["shown", "undescribed"],
}
# What only one of the two can say: a hit keeps as many frames as there is room for, `sonde stack` as many as are asked for.
ONLY_INSIDE, ONLY_OUTSIDE = {"buffer-full"}, {"depth-limit"}
FRAMES = 50  # pause() and those of "depth-limit"


class Wrong(Exception):
    pass


def require(fact, what):
    if not fact:
        raise Wrong(what)


class Runner:
    def __init__(self, options):
        self.work, self.sonde = options.work.resolve(), options.sonde.resolve()
        self.work.mkdir(parents=True, exist_ok=True)
        self.environment = {**os.environ, "XDG_CACHE_HOME": str(self.work / "cache")}
        self.program = self.build("reasons")

    def build(self, name, *flags):
        path = self.work / name
        subprocess.run(["gcc", "-O2", "-fno-optimize-sibling-calls", f"-Wl,--defsym,build_of_{name}=1", *flags, f"-I{TOP}/include", "-o", path,
                        HERE / "reasons.c"], check=True)
        return path

    def run(self, *arguments, status=(0,)):
        done = subprocess.run([str(a) for a in (self.sonde, *arguments)], env=self.environment, cwd=self.work, stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=60)
        require(done.returncode in status, f"sonde {arguments}: exit status {done.returncode}\n{done.stderr}")
        return done.stdout

    def waiting(self, reason, program):
        """The program in pause(), recorded if the reason is about being recorded: (what to end, its process id)."""
        command = [program, reason, "wait"]
        if reason == "recovery-failed":
            command = [self.sonde, "record", "-q", "-o", self.work / "waiting.trace", "-f", "copied", "--", *command]
        child = subprocess.Popen([str(c) for c in command], env=self.environment, cwd=self.work, stdin=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and child.poll() is None:
            for pid in (child.pid, *map(int, pathlib.Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split())):
                try:
                    here = pathlib.Path(f"/proc/{pid}/comm").read_text() == program.name + "\n"
                    if here and pathlib.Path(f"/proc/{pid}/syscall").read_text().split()[0] == "34":
                        return child, pid
                except OSError:
                    continue
            time.sleep(0.01)
        child.kill()
        raise Wrong(f"{command} does not come to wait")

    def outside(self, reason, program):
        """[(function, file, reason, believed)] from shown() on, as `sonde stack` shows it, and the same of a reliable walk."""
        child, pid = self.waiting(reason, program)
        limit = ["--max-frames", FRAMES] if reason == "depth-limit" else []
        bad = reason not in ("end", "reliable")
        try:
            both = [json.loads(self.run("stack", "--json", *limit, *how, "-p", pid, status=status))["threads"][0]
                    for how, status in (((), (0,)), (("--reliable",), (3 if bad else 0,)))]
        finally:
            os.kill(pid, 9)
            child.wait(60)
        for thread in both:
            require(thread["reason"] == ("end" if reason == "reliable" else reason), f"the thread's reason is {thread['reason']}")
            require(thread["verdict"] == ("unreliable" if bad else "reliable"), f"the thread is called {thread['verdict']}")
        return [[(f.get("function", ""), os.path.basename(f.get("file", "")), f["reason"], f["verdict"] == "reliable")
                 for f in thread["frames"]] for thread in both]

    def inside(self, reason, program):
        """The same as the record of a hit at shown()'s beginning has it; names only."""
        trace = self.work / "inside.trace"
        trace.unlink(missing_ok=True)
        hooked = ["-f", "copied"] if reason == "recovery-failed" else []
        self.run("record", "-q", "-s", "-o", trace, "-f", "shown", *hooked, "--", program, reason)
        text = self.run("report", "--calls", trace)
        stacks, frames = [], []
        for number, name, why in re.findall(r"^ {20,}#(\d+) +(.*?)(?:  \[([a-z-]+)\])?$", text, re.M):
            if number == "0":
                frames = []
                stacks.append(frames)
            frames.append((re.sub(r"\+0x[0-9a-f]+$", "", name), "", why or "reliable", (why or "end") == "end"))
        of_shown = [s for s in stacks if s[0][0] == "shown"]
        require(len(of_shown) == 1, f"{len(of_shown)} stacks at shown()\n{text}")
        return of_shown[0]


def check_frames(where, frames, reason):
    """Frames begin at shown()."""
    expected = STACKS[reason]
    require(len(frames) >= len(expected), f"{where}: {frames}")
    for i, (wanted, frame) in enumerate(zip(expected, frames)):
        function, file, why, believed = frame
        named = function == wanted or (wanted == "*" and function not in STACKS_OWN) or (not wanted and not function.isidentifier())
        require(named, f"{where}: #{i} is {function} in {file}, not {wanted}: {frames}")
        last = i == len(expected) - 1
        require(why == (reason if last else "reliable"), f"{where}: the reason of #{i} is {why}: {frames}")
        require(believed == (not last or reason == "end"), f"{where}: #{i} is {'' if believed else 'not '}believed")


STACKS_OWN = {name for frames in STACKS.values() for name in frames or () if name not in ("", "*")}


def from_shown(frames):
    at = [f[0] for f in frames].index("shown")
    require(at > 0 and all(f[2] == "reliable" for f in frames[:at]), f"above shown(): {frames[:at]}")
    return frames[at:]


def check(runner, reason):
    program = runner.program
    if reason == "reliable":
        reason = "end"  # whose every other frame is reliable
    if reason == "row-refuted":
        program = runner.build("refuted")
        runner.run("check", program, status=(1,))
    said = []
    if reason not in ONLY_INSIDE:
        best, strict = runner.outside(reason, program)
        check_frames("sonde stack", from_shown(best), reason)
        check_frames("sonde stack --reliable", from_shown(strict), reason)
        require(len(from_shown(strict)) == len(STACKS[reason]), f"a reliable walk went on: {strict}")
        said.append(f"from outside at #{len(best) - len(from_shown(best)) + len(STACKS[reason]) - 1} of {len(best)}")
    if reason not in ONLY_OUTSIDE:
        frames = runner.inside(reason, program)
        check_frames("a hit's stack", frames, reason)
        said.append(f"from inside at #{len(STACKS[reason]) - 1} of {len(frames)}")
    return ", ".join(said)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=pathlib.Path, required=True)
    parser.add_argument("--sonde", type=pathlib.Path, required=True)
    parser.add_argument("reasons", nargs="*")
    options = parser.parse_args()
    known = re.findall(r'return "([a-z-]+)";', (TOP / "core/walk/reason.cc").read_text())
    runner, failed = Runner(options), 0
    for reason in sorted(set(known) ^ set(STACKS)):
        print(f"FAILED {reason}: {'no test makes it arise' if reason in known else 'no such reason'}")
        failed += 1
    for reason in options.reasons or STACKS:
        try:
            print(f"ok {reason}: {check(runner, reason)}", flush=True)
        except (Wrong, ValueError, IndexError) as problem:
            print(f"FAILED {reason}: {problem}", flush=True)
            failed += 1
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
