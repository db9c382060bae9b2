#!/usr/bin/env python3
"""Formats the C and C++ sources with clang-format-19; --check only says which files would change.

The cases under tests/cases are left alone: some depend on how their text lies.
"""
import pathlib
import shutil
import subprocess
import sys

FOLDERS = ("agent", "bench", "cli", "core", "host", "include", "tests")
EXCLUDED = ("tests/cases/", "tests/data/", "tests/programs/")
TOOL = "clang-format-19"


def sources(top):
    for folder in FOLDERS:
        for path in sorted((top / folder).rglob("*")):
            name = path.relative_to(top).as_posix()
            if path.suffix in (".h", ".cc") and not name.startswith(EXCLUDED):
                yield path


def would_change(path):
    text = path.read_bytes()
    made = subprocess.run([TOOL, "--style=file", path], stdout=subprocess.PIPE, check=True).stdout
    return made != text


def main():
    arguments = [a for a in sys.argv[1:] if a != "--check"]
    check = "--check" in sys.argv[1:]
    if not shutil.which(TOOL):
        print(f"{TOOL} is not installed; ./dev setup installs it")
        return 77
    top = pathlib.Path(__file__).resolve().parent.parent
    paths = [pathlib.Path(a).resolve() for a in arguments] or list(sources(top))
    if not check:
        return subprocess.run([TOOL, "--style=file", "-i", *paths]).returncode
    bad = [p for p in paths if would_change(p)]
    for path in bad:
        print(f"{path}: not formatted; run ./dev fmt")
    print(f"{len(paths)} files looked at, {len(bad)} not formatted")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
