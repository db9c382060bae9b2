#!/usr/bin/env python3
"""Gate: only core/isa and core/native ask the preprocessor for the architecture."""
import re
import sys

import gate

CONDITION = re.compile(r"^[ \t]*#[ \t]*(?:if|ifdef|ifndef|elif)\b(?:.*\\\n)*.*$", re.M)
NAMES = re.compile(r"__(?:x86_64|amd64|i386|aarch64|arm|arm64|riscv|ARM_\w+)(?:__)?\b|\bSONDE_ARCH|_M_(?:X64|ARM64)\b")
FOLDERS = ("include", "core", "agent", "host", "cli")
ALLOWED = ("core/isa/", "core/native/")


def check(top):
    for name, text in gate.sources(top, FOLDERS, excluded=ALLOWED):
        for match in CONDITION.finditer(text):
            if found := NAMES.search(match.group()):
                yield f"{name}:{text.count(chr(10), 0, match.start()) + 1}: asks for {found.group()}"


BAD = [
    {"core/walk/a.cc": "#ifdef __x86_64__\n#endif\n"},
    {"host/plan/a.cc": "  # if defined(X) && \\\n  defined(__aarch64__)\n#endif\n"},
    {"agent/a.cc": "#if 0\n#elif __x86_64__\n#endif\n"},
]
GOOD = [
    {"core/isa/a.h": "#ifdef __x86_64__\n#endif\n", "core/native/a.cc": "#ifdef __aarch64__\n#endif\n"},
    {"core/walk/a.cc": "// __x86_64__ is asked for elsewhere\n#ifdef NDEBUG\n#endif\n"},
]

if __name__ == "__main__":
    sys.exit(gate.main(check, BAD, GOOD))
