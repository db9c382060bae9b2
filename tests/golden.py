#!/usr/bin/env python3
"""Golden dumps: tests/data/NAME.S is built, `sonde dump STAGE` must print tests/data/NAME.STAGE.txt; for the stage
"check", `sonde check` must.

usage: golden.py SONDE WORK_DIR. With SONDE_REBASE=1 the texts are rewritten from what is printed; review the difference.
The source names its linker flags in a line "# link: ...". A dump that leaves the folder's path in its text has WORK there.
"""
import difflib
import os
import pathlib
import shlex
import subprocess
import sys

DATA = pathlib.Path(__file__).resolve().parent / "data"


def build(source, work):
    flags = next(line.split("link:")[1] for line in source.read_text().splitlines() if "link:" in line)
    out = work / source.stem
    subprocess.run(["gcc", *shlex.split(flags), "-o", out, source], check=True)
    return out


def main():
    sonde, work = pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2]).resolve()
    work.mkdir(parents=True, exist_ok=True)
    rebase, failures, compared = os.environ.get("SONDE_REBASE") == "1", 0, 0
    for expected in sorted(DATA.glob("*.*.txt")):
        name, stage = expected.name.split(".")[:2]
        program = build(next(p for p in DATA.glob(f"{name}.*") if p.suffix in (".S", ".c")), work)
        command = ["check", "--no-mark", "--missing", "--unknown"] if stage == "check" else ["dump", stage]
        done = subprocess.run([sonde, *command, program], stdout=subprocess.PIPE, text=True)
        if done.returncode not in ((0, 1) if stage == "check" else (0,)):
            sys.exit(f"sonde {' '.join(command)} {program}: exit status {done.returncode}")
        made = done.stdout
        made = made.replace(str(work), "WORK")
        compared += 1
        if rebase:
            expected.write_text(made)
        elif made != expected.read_text():
            failures += 1
            print(*difflib.unified_diff(expected.read_text().splitlines(), made.splitlines(), str(expected), "printed",
                                        lineterm=""), sep="\n")
    print(f"{compared} dumps, {failures} differ")
    return 1 if failures or not compared else 0


if __name__ == "__main__":
    sys.exit(main())
