#!/usr/bin/env python3
"""Reads a ctest JUnit file; prints why tests were skipped and, as last line, "N passed, N failed".

usage: ctest_summary.py [--facts] FILE      --facts: also what the tests say they have counted and measured
"""
import re
import sys
import xml.etree.ElementTree as ElementTree


FACT = re.compile(r"^(ok |skipped: |\| |untraced: |a thousand |.* MESSAGE: |/bin/true, )")


def facts(path):
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        for line in (case.findtext("system-out") or "").splitlines():
            if match := FACT.match(line):
                yield case.get("name"), line if "MESSAGE" not in line else line[match.end():]


def summarize(path):
    passed, failed, skipped = 0, [], []
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        name, status = case.get("name"), case.get("status")
        if status == "run":
            passed += 1
        elif status == "fail":
            failed.append(name)
        else:  # notrun, disabled: a program with the skip status, or one that could not be started
            node = case.find("skipped")
            lines = (case.findtext("system-out") or "").strip().splitlines()
            message = node.get("message", "") if node is not None else ""
            if message and "SKIP" not in message.upper():
                failed.append(f"{name} ({message})")
            else:
                skipped.append((name, lines[-1] if lines else "no reason printed"))
    return passed, failed, skipped


def left_out(path):
    """What tests that ran say they have left out."""
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        for line in (case.findtext("system-out") or "").splitlines() if case.get("status") == "run" else ():
            if line.startswith("skipped: "):
                yield case.get("name"), line.removeprefix("skipped: ")


def main():
    *flags, path = sys.argv[1:]
    for name, line in facts(path) if "--facts" in flags else ():
        print(f"{name}: {line}")
    passed, failed, skipped = summarize(path)
    for name, reason in left_out(path):
        print(f"left out of {name}: {reason}")
    for name, reason in skipped:
        print(f"skipped: {name}: {reason}")
    for name in failed:
        print(f"failed: {name}")
    print(f"{passed} passed, {len(failed)} failed" + (f", {len(skipped)} skipped" if skipped else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
