#!/usr/bin/env python3
"""Two threads that do nothing but call: what is lost, who says so, and what a recorder that dies leaves behind.

The truth is what the program itself counted (paced.c). For each folder given, one on a disk and one in memory:
  wait     the default: calls in the report == calls made, nothing lost, and it is said how long the threads waited
  drop     --drop, while the recorder is stopped for a time: calls in the report + calls lost == calls made
  killed   kill -9 of the recorder while both threads wait on full rings: they are free within 100 ms, and the program
           ends with its own output and status
Usage: speed.py --sonde SONDE --work FOLDER [--seconds S] [--rate N] [--memory FOLDER]
"""
import argparse
import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
THREADS = 2
FREE_WITHIN_MS = 100
PR_SET_CHILD_SUBREAPER = 36


def delays(pid):
    """For how many nanoseconds each thread has wanted a processor and had none (schedstat)."""
    found = {}
    for tid in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{tid}/schedstat") as file:
            found[tid] = int(file.read().split()[1])
    return found


def account(path):
    """Calls made, and the gaps (begin, end) in monotonic nanoseconds."""
    calls, gaps = None, []
    with open(path) as file:
        for line in file:
            what, *numbers = line.split()
            if what == "calls":
                calls = int(numbers[0])
            else:
                gaps.append(tuple(map(int, numbers)))
    return calls, gaps


class Speed:
    def __init__(self, arguments):
        self.sonde, self.work = os.path.abspath(arguments.sonde), os.path.abspath(arguments.work)
        self.seconds, self.rate = arguments.seconds, arguments.rate
        os.makedirs(self.work, exist_ok=True)
        self.paced, self.account = f"{self.work}/paced", f"{self.work}/account"
        subprocess.run(["gcc", "-O2", f"{HERE}/paced.c", "-o", self.paced, "-pthread"], check=True)

    def command(self, trace, *options, seconds=None):
        return [self.sonde, "record", "-o", trace, "-f", "leaf", *options, "--", self.paced, str(THREADS), str(self.rate),
                str(seconds or self.seconds), self.account]

    def record(self, trace, *options):
        """Calls in the report, calls lost, calls made."""
        seconds = self.seconds * (2 if "--drop" in options else 1)
        recorder = subprocess.Popen(self.command(trace, *options, seconds=seconds), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        if "--drop" in options:
            while recorder.poll() is None and not (os.path.exists(trace) and os.path.getsize(trace) > 20000):
                time.sleep(0.01)  # records come
            recorder.send_signal(signal.SIGSTOP)
            time.sleep(seconds / 2)
            recorder.send_signal(signal.SIGCONT)
        output, said = recorder.communicate(timeout=60 + 60 * self.seconds)
        assert (recorder.returncode, output) == (3, "done\n"), (recorder.returncode, output, said)
        size = os.path.getsize(trace)
        report = subprocess.run([self.sonde, "report", "--stats", "--json", trace], capture_output=True, text=True)
        assert report.returncode == 0, report.stderr
        os.unlink(trace)
        parsed = json.loads(report.stdout)
        calls = sum(f["calls"] for f in parsed["functions"] if f["name"] == "leaf")
        said = re.search(r"(\d+) calls of 1 function \(0 refused\), (\d+) lost, waited ([\d.]+) s", said)
        assert said, "the recorder's last lines do not tell"
        assert int(said[1]) == calls, (said[0], calls)
        made, _ = account(self.account)
        print(f"{' '.join(options) or 'wait'}, {os.path.dirname(trace)}: {made} calls made"
              f" ({made / seconds / THREADS / 1e6:.2f} M/s a thread), {calls} recorded, {said[2]} lost,"
              f" waited {said[3]} s, {size / max(calls, 1):.2f} bytes a call")
        return calls, int(said[2]), made

    def wait(self, folder):
        calls, lost, made = self.record(f"{folder}/speed.trace")
        assert calls == made and lost == 0, (calls, lost, made)

    def drop(self, folder):
        calls, lost, made = self.record(f"{folder}/speed.trace", "--drop")
        assert calls + lost == made and lost > 0, (calls, lost, made)

    def freed_after_ms(self):
        """The trace goes into a pipe that nobody reads: the rings fill up while the recorder's heart goes on beating."""
        pipe = f"{self.work}/pipe"
        if os.path.exists(pipe):
            os.unlink(pipe)
        if os.path.exists(self.account):
            os.unlink(self.account)
        os.mkfifo(pipe)
        reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        recorder = subprocess.Popen(self.command(pipe, "-q", seconds=6), stdout=subprocess.PIPE, text=True)
        begun = []
        while len(begun) < 1 + THREADS:  # its own and the program's
            assert recorder.poll() is None, "the program did not run"
            with open(f"/proc/{recorder.pid}/task/{recorder.pid}/children") as file:
                children = file.read().split()
            begun = os.listdir(f"/proc/{children[0]}/task") if children else []
            time.sleep(0.01)
        program = int(children[0])
        time.sleep(2)  # a ring is full within 20 ms at that rate
        before = delays(program)
        killed = time.monotonic_ns()
        recorder.kill()
        delayed = []  # (moment, longest that a thread has been kept from a processor since then)
        while time.monotonic_ns() < killed + 1_000_000_000:
            delayed.append((time.monotonic_ns(), max(n - before.get(tid, n) for tid, n in delays(program).items())))
            time.sleep(0.002)
        assert recorder.wait() == -signal.SIGKILL
        output = recorder.stdout.read()  # until the program ends too
        os.close(reader)
        _, status = os.wait()  # the program's: it became this process's child
        assert os.WIFEXITED(status) and os.WEXITSTATUS(status) == 3, status
        assert output == "done\n", output
        _, gaps = account(self.account)
        waiting = [end for begin, end in gaps if begin < killed < end]
        assert len(waiting) == THREADS, f"{len(waiting)} threads waited when the recorder was killed: {gaps}, {killed}"
        freed = max(waiting)
        without_processor = max((n for moment, n in delayed if moment <= freed), default=0)
        return (freed - killed) / 1e6, without_processor / 1e6

    def killed(self):
        # On a busy machine a thread that waits may not run for long: that time is not the recorder's.
        best = None
        for _ in range(5):
            freed, without = self.freed_after_ms()
            if best is None or freed - without < best[0] - best[1]:
                best = freed, without
            if freed - without < FREE_WITHIN_MS:
                break
        print(f"killed: two threads that waited were free after {best[0]:.1f} ms, {best[1]:.1f} ms of it without a processor")
        assert best[0] - best[1] < FREE_WITHIN_MS, best


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sonde", required=True)
    parser.add_argument("--work", required=True, help="a folder on a disk")
    parser.add_argument("--memory", default="/dev/shm", help="a folder in memory")
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--rate", type=float, default=1e7, help="calls per second and thread")
    arguments = parser.parse_args()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    speed = Speed(arguments)
    memory = f"{arguments.memory}/sonde-speed-{os.getpid()}"
    os.mkdir(memory)
    try:
        for folder in (speed.work, memory):
            speed.wait(folder)
            speed.drop(folder)
        speed.killed()
    finally:
        shutil.rmtree(memory, ignore_errors=True)


if __name__ == "__main__":
    try:
        main()
    except AssertionError as error:
        sys.exit(f"speed: {error}")
