#!/usr/bin/env python3
"""Says which C and C++ sources clang-format-19 would change; with --write it changes them.

usage: format.py [--self-test | --write [FILE...]]

The cases under tests/cases are left alone: some depend on how their text lies. So are, until somebody formats them, the files
that tools/format_exempt.txt lists; a file that is formatted may not stay on that list.
"""
import pathlib
import re
import shutil
import subprocess
import sys

import gate

FOLDERS = ("agent", "bench", "cli", "core", "host", "include", "tests")
EXCLUDED = ("tests/cases/", "tests/data/", "tests/programs/")
EXEMPT = "tools/format_exempt.txt"
TOOL = "clang-format-19"
STYLE = f"--style=file:{gate.TOP / '.clang-format'}"


def names(top):
    return [name for name, _ in gate.sources(top, FOLDERS, (".h", ".cc"), EXCLUDED)]


def exempt(top):
    file = top / EXEMPT
    return set(file.read_text().split()) if file.exists() else set()


def unformatted(top, some):
    if not some:
        return set()
    command = [TOOL, STYLE, "--dry-run", *some]
    said = subprocess.run(command, cwd=top, stderr=subprocess.PIPE, text=True, errors="replace", check=True).stderr
    return set(re.findall(r"^(.+?):\d+:\d+: warning: code should be clang-formatted", said, re.M))


def check(top):
    known, bad = exempt(top), unformatted(top, names(top))
    for name in sorted(bad - known):
        yield f"{name}: not formatted; run ./dev fmt {name}"
    for name in sorted(known - bad):
        yield f"{EXEMPT}: {name} is formatted, or gone: take it off the list"


BAD = [
    {"core/base/a.h": "#pragma once\nint  a;\n"},
    {"host/a.cc": "int a() {\n    return 1;\n}\n"},
    {"host/a.cc": "int a;\n", EXEMPT: "host/a.cc\n"},
    {EXEMPT: "host/gone.cc\n"},
]
GOOD = [
    {"core/base/a.h": "#pragma once\nint a;\n"},
    {"tests/cases/001/a.cc": "int  a;\n"},
    {"host/a.cc": "int  a;\n", EXEMPT: "host/a.cc\n"},
]


def main():
    if not shutil.which(TOOL):
        print(f"{TOOL} is not installed; ./dev setup installs it")
        return 77
    options = [a for a in sys.argv[1:] if a.startswith("--")]
    files = [pathlib.Path(a).resolve() for a in sys.argv[1:] if not a.startswith("--")]
    if options != ["--write"]:
        return gate.main(check, BAD, GOOD)
    known = exempt(gate.TOP)
    return subprocess.run([TOOL, STYLE, "-i", *(files or [gate.TOP / n for n in names(gate.TOP) if n not in known])]).returncode


if __name__ == "__main__":
    sys.exit(main())
