#!/usr/bin/env python3
"""Gate: docs/verdicts.md says of each reason and of each kind of special code which test shows it, and so does the code.

- Each word of core/walk/reason.cc has a row in the table of reasons, each SpecialKind of core/unwind/arena.h one in the table of
  kinds, and no other has; the tests that they name exist, and those of a reason have its word or its enumerator in them.
- Each function that upgrades code (apply_*, add_*, end_of_* in FILES) has a comment in front of it that ends in "Test: " and the
  titles of its tests in quotes, or the names of tests that ctest knows.
"""
import re
import sys

import gate
from requirements import test_exists

DOCUMENT, REASONS, KINDS = "docs/verdicts.md", "core/walk/reason.cc", "core/unwind/arena.h"
FILES = {"core/walk/place.h": r"^  (?:static )?\w+&? (apply_\w+)\(.*\{$", "host/tables/specials.cc": r"^  \w+ (add_[a-z_]+|end_of_\w+)\(\) ?(?:const )?\{$|^  ImageAddr (end_of_\w+)\("}
ROW = re.compile(r"^\| `([a-z_-]+)` \| (.*) \|$", re.M)


def text_of(top, name):
    return (top / name).read_text() if (top / name).exists() else ""


def names(text):
    return re.findall(r"`([^`]+)`", text.rpartition(" | ")[2])


def says(top, test, word):
    """Whether the test's file has the reason by name: as reports print it or as the enumerator."""
    file = test.partition(": ")[0]
    candidates = [top / file] if "/" in file else [top / "tests/outside" / (file.removeprefix("outside_") + ".py")]
    enumerator = "Reason::" + word.replace("-", "_")
    return any(f'"{word}"' in path.read_text() or enumerator in path.read_text() for path in candidates if path.is_file())


def check_table(top, heading, wanted, of_reason):
    section = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", text_of(top, DOCUMENT), re.M | re.S)
    rows = dict(ROW.findall(section.group(1) if section else ""))
    for word in sorted(set(wanted) - set(rows)):
        yield f"{DOCUMENT}, {heading}: nothing about {word}"
    for word in sorted(set(rows) - set(wanted)):
        yield f"{DOCUMENT}, {heading}: there is no {word}"
    for word, row in rows.items():
        if not names(row):
            yield f"{DOCUMENT}: {word} names no test"
        for test in names(row):
            if not test_exists(top, test):
                yield f"{DOCUMENT}: {word}: there is no test {test}"
            elif of_reason and not says(top, test, word):
                yield f"{DOCUMENT}: {test} does not say {word}"


def titled(top, title):
    return any(f'("{title}"' in path.read_text(errors="replace") for folder in ("core", "host", "tests") if (top / folder).exists()
               for path in (top / folder).rglob("*_test.cc"))


def check_code(top):
    for name, pattern in FILES.items():
        lines = text_of(top, name).splitlines()
        for number, line in enumerate(lines):
            if not (match := re.match(pattern, line)):
                continue
            function, comment = next(g for g in match.groups() if g), ""
            while number and lines[number - 1].lstrip().startswith("//"):
                number -= 1
                comment = lines[number].strip().removeprefix("//").strip() + " " + comment
            _, found, tests = comment.partition("Test: ")
            quoted, plain = re.findall(r'"([^"]+)"', tests), re.findall(r"\b(?:step|case|cli|outside)_\w+", re.sub(r'"[^"]*"', "", tests))
            if not found or not quoted + plain:
                yield f"{name}: {function} does not say which test shows it"
            for title in quoted:
                if not titled(top, title):
                    yield f"{name}: {function}: there is no test \"{title}\""
            for test in plain:
                if not test_exists(top, test):
                    yield f"{name}: {function}: there is no test {test}"


def check(top):
    yield from check_table(top, "Reasons", re.findall(r'return "([a-z-]+)";', text_of(top, REASONS)), True)
    kinds = re.search(r"^enum class SpecialKind[^{]*\{(.*?)^\};", text_of(top, KINDS), re.M | re.S)
    yield from check_table(top, "Special code", re.findall(r"^  (\w+),", kinds.group(1) if kinds else "", re.M), False)
    yield from check_code(top)


def tree(**changed):
    files = {DOCUMENT: "## Reasons\n\n| `end` | outermost | `core/a_test.cc: walk: ends` |\n## Special code\n\n| `plt` | stubs | `case_059` |\n",
             REASONS: 'case Reason::end: return "end";\n', KINDS: "enum class SpecialKind : uint32_t {\n  plt,  // stubs\n};\n",
             "core/a_test.cc": 'TEST_CASE("walk: ends") { Reason::end; }\nTEST_CASE("other") {}\n', "tests/cases/059-x/build.sh": "\n",
             "core/b_test.cc": 'TEST_CASE("silent") {}\n',
             "core/walk/place.h": '  // Stubs. Test: "walk: ends", case_059.\n  bool apply_plt(Place& place) {\n',
             "host/tables/specials.cc": '  // Test: "other".\n  void add_entry() {\n'}
    for part, text in changed.items():
        key = {"document": DOCUMENT, "reasons": REASONS, "kinds": KINDS, "place": "core/walk/place.h", "specials": "host/tables/specials.cc"}[part]
        files[key] = text(files[key])
    return files


BAD = [tree(reasons=lambda t: t + 'case Reason::other: return "other";\n'), tree(reasons=lambda t: ""),
       tree(document=lambda t: t.replace("walk: ends", "walk: begins")), tree(document=lambda t: t.replace("core/a_test.cc: walk: ends", "core/b_test.cc: silent")),
       tree(document=lambda t: t.replace("`core/a_test.cc: walk: ends`", "none")), tree(document=lambda t: t.replace("case_059", "case_058")),
       tree(kinds=lambda t: t.replace("};", "  vdso,\n};")), tree(place=lambda t: t.replace("Test: ", "")),
       tree(place=lambda t: t.replace("walk: ends", "walk: begins")), tree(place=lambda t: t.replace("case_059", "case_058")),
       tree(specials=lambda t: "  void add_entry() {\n"), tree(document=lambda t: "")]
GOOD = [tree(), tree(place=lambda t: t + "  bool other(Place& place) {\n")]

if __name__ == "__main__":
    sys.exit(gate.main(check, BAD, GOOD))
