#!/usr/bin/env python3
"""Writes sonde.1: docs/sonde.1.in with the options of each command as its own --help prints them.

usage: manpage.py SONDE TEMPLATE OUT. A line '.\\" OPTIONS record' in the template becomes the options of `sonde record`.
"""
import pathlib
import re
import subprocess
import sys


def escape(text):
    return text.replace("\\", "\\e").replace("-", "\\-")


def options(sonde, command):
    """(option with its argument, what it does) in the order of --help."""
    text = subprocess.run([sonde, command, "--help"], stdout=subprocess.PIPE, check=True, text=True).stdout
    found = []
    for line in text.split("Options:\n", 1)[1].splitlines():
        if not line.strip():
            break
        if match := re.match(r"  (-\S.*?)(?:  +(\S.*))?$", line):
            found.append([match.group(1), match.group(2) or ""])
        elif found:
            found[-1][1] += " " + line.strip()
    return [pair for pair in found if not pair[0].startswith("-h")]


def main():
    sonde, template, out = sys.argv[1:4]
    lines = []
    for line in pathlib.Path(template).read_text().splitlines():
        if not line.startswith('.\\" OPTIONS '):
            lines.append(line)
            continue
        for option, text in options(sonde, line.split()[2]):
            lines += [".TP", f"\\fB{escape(option)}\\fR", escape(text.strip())]
    pathlib.Path(out).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
