"""What a trace says about the functions of a program, and whether that is what a case demands."""
import dataclasses
import fnmatch
import json
import subprocess

MINIMUM_ARMED = 0.9


class Wrong(Exception):
    pass


@dataclasses.dataclass
class Facts:
    armed: int      # functions that were probed
    refused: int    # functions of the program that were not
    refusals: dict  # reason -> how many
    lost: dict      # cause -> how many calls, or records that may be of calls
    calls: list     # (name without parameters, {"calls": n, "unwound": n, ...})


def read(sonde, trace):
    done = subprocess.run([sonde, "report", "--stats", "--json", trace], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    if done.returncode:
        raise Wrong(f"sonde report failed: {done.stderr.decode(errors='replace')}")
    return from_json(json.loads(done.stdout))


def from_json(report):
    footer = report["footer"]
    # A cold part is entered by jumps only: no function, so none that could be missed.
    refusals = {reason: n for reason, n in footer["refused"].items() if "cold" not in reason}
    lost = {cause: n for cause, n in footer["lost"].items() if not cause.startswith("stacks")}
    calls = []
    for function in report["functions"]:
        kinds = {kind: function[kind] for kind in ("returned", "unwound", "abandoned", "unfinished", "thread_ended")}
        name = function["name"].replace("(anonymous namespace)", "{anonymous}").split("(")[0]
        calls.append((name, {"calls": function["calls"], **kinds}))
    return Facts(footer["armed"], sum(refusals.values()), refusals, lost, calls)


def check_armed(name, facts):
    total = facts.armed + facts.refused
    if total == 0 or facts.armed < MINIMUM_ARMED * total:
        raise Wrong(f"{name}: {facts.armed} of {total} functions probed; refused: {facts.refusals}")


def check_counts(name, facts, file):
    if not file.exists():
        return
    if facts.lost:
        raise Wrong(f"{name}: records were lost: {facts.lost}")
    for line in file.read_text().splitlines():
        words = line.split()
        if not words or line.startswith("#") or words[0] != name:
            continue
        pattern, calls, kinds = words[1], int(words[2]), dict(word.split("=") for word in words[3:])
        found = [c for function, c in facts.calls if fnmatch.fnmatchcase(function, pattern)]
        seen = sum(c["calls"] for c in found)
        if seen != calls:
            raise Wrong(f"{name}: {pattern} called {calls} times, the trace shows {seen}")
        for kind, number in kinds.items():
            if (seen := sum(c.get(kind, 0) for c in found)) != int(number):
                raise Wrong(f"{name}: {pattern}: {number} calls {kind}, the trace shows {seen}")
