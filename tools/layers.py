#!/usr/bin/env python3
"""Gate: a folder includes only itself and earlier ones, and core/ includes no header that needs a heap."""
import re
import sys

import gate

ORDER = {
    "core": ["base", "isa", "native", "unwind", "event", "walk", "probe"],
    "host": ["image", "tables", "plan", "check", "target", "trace", "report"],
}
# Which top folders a top folder may include; tests and bench may include anything.
TOPS = {
    "include": {"include"},
    "core": {"core"},
    "agent": {"agent", "core"},
    "host": {"host", "core", "include"},
    "cli": {"cli", "host", "core", "include"},
}
INCLUDE = re.compile(r'^\s*#\s*include\s+(["<])([^">]+)[">]', re.M)
HEAP_HEADERS = {"string", "vector", "map", "set", "unordered_map", "unordered_set", "deque", "list", "functional", "iostream",
                "fstream", "sstream", "chrono", "memory", "thread", "mutex", "stdexcept", "regex", "filesystem", "stdlib.h",
                "stdio.h", "cstdlib", "cstdio", "unistd.h"}


def folder_rank(parts):
    """Place of a file's folder in its layer order; -1 for files directly in core/ or host/, None if unknown."""
    if len(parts) < 3:
        return -1
    order = ORDER[parts[0]]
    return order.index(parts[1]) if parts[1] in order else None


def complaint_about(name, included):
    source, target = name.split("/"), included.split("/")
    if len(target) == 1:
        return "include from the repository root"
    if target[0] not in TOPS:
        return None
    if target[0] not in TOPS[source[0]]:
        return f"{source[0]}/ may not include {target[0]}/"
    if source[0] != target[0] or source[0] not in ORDER:
        return None
    here, there = folder_rank(source), folder_rank(target)
    if here is None or there is None:
        return f"{source[0]}/ has no such layer"
    if there > here:
        return f"{'/'.join(source[:-1])} comes before {'/'.join(target[:-1])}"
    return None


def check(top):
    for name, text in gate.sources(top, TOPS):
        is_test = name.endswith(("_test.cc", "_test.h"))
        for kind, included in INCLUDE.findall(text):
            if kind == "<":
                if included in HEAP_HEADERS and name.startswith(("core/", "agent/")) and not is_test:
                    yield f"{name}: <{included}> has no place in code that runs inside a target"
            elif why := complaint_about(name, included):
                yield f'{name}: "{included}": {why}'


BAD = [
    {"core/base/a.h": '#include "core/walk/frame.h"\n'},
    {"core/probe/a.cc": '#include "host/error.h"\n'},
    {"host/image/a.cc": '  #  include "host/plan/plan.h"\n'},
    {"host/error.h": '#include "host/image/image.h"\n'},
    {"host/odd/a.cc": '#include "host/image/image.h"\n'},
    {"agent/a.cc": '#include "host/error.h"\n'},
    {"core/walk/a.cc": "#include <vector>\n"},
    {"cli/a.cc": '#include "commands.h"\n'},
]
GOOD = [
    {"core/probe/a.cc": '#include "core/base/addr.h"\n#include "core/probe/b.h"\n#include <stdint.h>\n'},
    {"core/walk/a_test.cc": "#include <vector>\n"},
    {"host/plan/a.cc": '#include "host/image/image.h"\n#include "host/error.h"\n#include "core/probe/control.h"\n'},
    {"cli/a.cc": '#include "host/report/tree.h"\n'},
]

if __name__ == "__main__":
    sys.exit(gate.main(check, BAD, GOOD))
