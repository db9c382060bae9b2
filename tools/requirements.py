#!/usr/bin/env python3
"""Gate: docs/requirements.md has every row, and every test named there exists.

A row is `| S1 | requirement | tests |`. Tests are names in backquotes:
  `path/x_test.cc: title`   a TEST_CASE("title") in that file; of a .bats file @test "title"
  `path`                    a file that exists and is registered or run somewhere
  `case_010`, `gate_layers`, `core_tests`   a test that ctest knows
or the words "not yet: " and a reason.
"""
import re
import sys

import gate

NUMBERS = [n for n in range(1, 63) if n != 19 and not 42 <= n <= 49]
NAMES = [f"S{n}" for n in NUMBERS] + [f"KP{n}" for n in range(1, 16)] + [f"OP{n}" for n in range(1, 11)]
ROW = re.compile(r"^\| ((?:S|KP|OP)\d+) \| (.*) \| (.*) \|$", re.M)


def ctest_exists(top, name):
    if match := re.fullmatch(r"case_(\d{3})(_trap)?", name):
        return any(top.glob(f"tests/cases/{match.group(1)}-*/build.sh"))
    if match := re.fullmatch(r"gate_(\w+)", name):
        return (top / f"tools/{match.group(1).removesuffix('_can_fail')}.py").exists()
    pattern = re.compile(rf"(?:NAME|sonde_\w+test\w*\()\s*{re.escape(name)}\b")
    return any(pattern.search(p.read_text()) for folder in ("tests", "bench", "core", "agent", "host") if (top / folder).exists()
               for p in [*(top / folder).rglob("CMakeLists.txt"), *(top / folder).rglob("*.cmake")])


def test_exists(top, name):
    if match := re.fullmatch(r"(\S+): (.+)", name):
        path = top / match.group(1)
        title = re.escape(match.group(2))
        pattern = rf'^@test "{title}" \{{' if path.suffix == ".bats" else rf'\("{title}"[,)]'
        return path.is_file() and re.search(pattern, path.read_text(errors="replace"), re.M) is not None
    return (top / name).is_file() if "/" in name else ctest_exists(top, name)


def check(top):
    rows = {}
    for row, requirement, tests in ROW.findall((top / "docs/requirements.md").read_text()):
        if row in rows:
            yield f"{row} stands there twice"
        rows[row] = tests
        if len(requirement) < 40:
            yield f"{row} is not stated in full"
        names = re.findall(r"`([^`]+)`", tests)
        for name in names:
            if not test_exists(top, name):
                yield f"{row}: there is no test {name}"
        if not names and not re.search(r"not yet: \S.{9}", tests):
            yield f"{row} names neither a test nor a reason why there is none"
    for name in NAMES:
        if name not in rows:
            yield f"{name} is missing"
    for row in rows:
        if row not in NAMES:
            yield f"{row} is no requirement"


def tree(changed=None, text=None):
    rows = {n: f"| {n} | {'what must hold, in full, with all its words' * 2} | `core/a_test.cc: holds` |" for n in NAMES}
    if changed:
        rows[changed] = text
    return {"docs/requirements.md": "\n".join(rows.values()) + "\n", "core/a_test.cc": 'TEST_CASE("holds") {}\n',
            "tests/CMakeLists.txt": "add_test(NAME core_tests COMMAND core_tests)\n",
            "tests/cases/010-x/build.sh": "\n", "tools/layers.py": "\n", "tests/cli/a.bats": '@test "a: holds" {\n}\n'}


LONG = "a requirement that is long enough to be one"
BAD = [tree("S7", ""), tree("OP2", ""), tree("S7", f"| S6 | {LONG} | `core_tests` |"), tree("S7", f"| S7 | {LONG} | `core/a_test.cc: fails` |"),
       tree("S7", f"| S7 | {LONG} | not yet: |"), tree("S7", f"| S7 | {LONG} | - |"), tree("S7", f"| S7 | {LONG} | `case_011` |"),
       tree("S7", f"| S7 | {LONG} | `no_tests` |"), tree("S7", f"| S7 | {LONG} | `tests/cli/a.bats: a: fails` |"), tree("S7", "| S7 | short | `core_tests` |")]
GOOD = [tree(), tree("S7", f"| S7 | {LONG} | `tests/cli/a.bats: a: holds` |"), tree("KP3", f"| KP3 | {LONG} | `core_tests` |"), tree("S7", f"| S7 | {LONG} | `core_tests`, `case_010`, `gate_layers` |"),
        tree("S7", f"| S7 | {LONG} | not yet: nothing writes such registers |")]

if __name__ == "__main__":
    sys.exit(gate.main(check, BAD, GOOD))
