#!/usr/bin/env python3
"""Gate: the repository speaks of itself only: no machine's paths, no package hosts, no numbers of somebody's tracker.

The patterns are written so that they do not match their own text.
"""
import re
import subprocess
import sys

import gate

WORDS = {
    r"/[w]ork/|/[h]ome/\w|/[U]sers/\w|/[r]oot/[.\w]": "a path of one machine",
    r"\b(?:deb|security|archive|snapshot)\.[d]ebian\.org|\b[p]ypi\.org|[r]egistry\.npmjs|[c]rates\.io|[p]roxy\.golang": "a package host",
    r"(?i)\b(?:[i]ssue|[t]icket|[p]ull request|PR) ?#?\d+\b|\b[\w.+-]+#[1-9]\d{1,5}\b": "a tracker's number",
    r"(?i)\b[c]laude\b|[a]nthropic|\b[o]penai\b|\b[c]hatgpt\b|[l]anguage model|\b[s]ubagents?\b|\b[c]oding agents?\b": "who typed it",
    r"\b(?:[T]ODO|[F]IXME|[X]XX)\b": "a plan instead of a fact",
}
EXCLUDED = {"LICENSE"}


def files(top):
    listed = subprocess.run(["git", "-C", top, "ls-files", "-z", "--cached", "--others", "--exclude-standard"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    if listed.returncode == 0 and listed.stdout:
        return sorted(name for name in listed.stdout.decode().split("\0") if name)
    return sorted(p.relative_to(top).as_posix() for p in top.rglob("*")
                  if p.is_file() and not p.relative_to(top).as_posix().startswith(("build/", ".git/")))


def check(top):
    for name in files(top):
        path = top / name
        if name in EXCLUDED or not path.is_file():
            continue
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            for pattern, what in WORDS.items():
                if found := re.search(pattern, line):
                    yield f"{name}:{number}: '{found.group()}' is {what}"


BAD = [{"a.md": text + "\n"} for text in (
    "see /" + "work/x", "in /" + "root/.cache", "deb http://deb." + "debian.org/debian", "issue" + " 12 wants", "uftrace" + "#738",
    "by Cla" + "ude", "TO" + "DO later")]
GOOD = [{"a.md": "frameworks/work, workers, the agent in the target, #include, 3 issues, S15, x#y\n"}]

if __name__ == "__main__":
    sys.exit(gate.main(check, BAD, GOOD))
