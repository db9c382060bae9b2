#!/usr/bin/env python3
"""Gate: the built agent needs nothing, shows nothing, and touches no vector, x87 or mask register.

usage: agent_symbols.py FILE | agent_symbols.py --self-test
A function that must touch such registers is named in agent_symbols_allowed.txt, one per line with its reason behind #.
"""
import pathlib
import re
import subprocess
import sys
import tempfile

ALLOWED_FILE = pathlib.Path(__file__).with_name("agent_symbols_allowed.txt")
REGISTERS = re.compile(r"%(?:[xyz]mm\d+|mm[0-7]|st\b|k[0-7]\b)")
CANARY = re.compile(r"%fs:0x28\b")
DYNAMIC_TAGS = {"NEEDED": "needs a library", "INIT": "has an initialiser", "FINI": "has a finaliser",
                "INIT_ARRAY": "has initialisers", "FINI_ARRAY": "has finalisers", "PREINIT_ARRAY": "has initialisers",
                "TEXTREL": "relocates its text", "RPATH": "has a search path", "RUNPATH": "has a search path"}


def run(*command):
    return subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, env={"LC_ALL": "C", "PATH": "/usr/bin:/bin"}).stdout


def allowed():
    lines = ALLOWED_FILE.read_text().splitlines() if ALLOWED_FILE.exists() else []
    return {line.split("#")[0].strip() for line in lines} - {""}


def check_dynamic(path):
    for tag, rest in re.findall(r"^ 0x\w+ \((\w+)\)\s*(.*)$", run("readelf", "-dW", path), re.M):
        if tag in DYNAMIC_TAGS:
            yield f"{DYNAMIC_TAGS[tag]}: {tag} {rest}".strip()
    if re.search(r"^\s+TLS\s", run("readelf", "-lW", path), re.M):
        yield "has a TLS segment"
    for kind, symbol in re.findall(r"^[0-9a-f]+\s+[0-9a-f]+\s+(R_\w+)\s*(.*)$", run("readelf", "-rW", path), re.M):
        if kind != "R_X86_64_RELATIVE":
            yield f"has a relocation {kind} {symbol}".rstrip()


def check_symbols(path):
    row = re.compile(r"^ *\d+: +[0-9a-f]+ +\S+ +(\w+) +(\w+) +(\w+) +(\S+) +(\S+)", re.M)
    for kind, binding, visibility, section, name in row.findall(run("readelf", "--dyn-syms", "-W", path)):
        if section == "UND":
            yield f"leaves {name} undefined"
        elif binding != "LOCAL":
            yield f"exports {name}"


def check_code(path):
    permitted, symbol = allowed(), "?"
    for line in run("objdump", "-d", "--no-show-raw-insn", path).splitlines():
        if start := re.match(r"^[0-9a-f]+ <([^>]+)>:$", line):
            symbol = start.group(1)
        elif symbol not in permitted and (found := REGISTERS.search(line)):
            yield f"{symbol} uses {found.group()}: {' '.join(line.split())}"
        elif CANARY.search(line):
            yield f"{symbol} reads the stack protector's canary, which is the program's"


def check(path):
    yield from check_dynamic(path)
    yield from check_symbols(path)
    yield from check_code(path)


# Each source is a fault of its own; the word must stand in what is said about it.
BAD = {
    "needs a library": ("#include <math.h>\n", ["-Wl,--no-as-needed", "-lm", "-nostartfiles"]),
    "undefined": ("int other(void); __attribute__((visibility(\"hidden\"))) int f(void) { return other(); }\n", []),
    "exports": ("int f(void) { return 1; }\n", []),
    "TLS": ("static __thread int x; __attribute__((used)) static int *f(void) { return &x; }\n", []),
    "R_X86_64_": ("extern int x; __attribute__((used)) static int *p = &x;\n", []),
    "initialisers": ("__attribute__((constructor)) static void f(void) { __asm__ volatile(\"\"); }\n", []),
    "xmm": ("__attribute__((used)) static double f(double a) { return a * 2; }\n", []),
    "st": ("__attribute__((used)) static long double f(long double a) { return a * 2; }\n", []),
    "canary": ("__attribute__((used)) static int f(int a) { volatile char b[64]; b[a] = 1; return b[0]; }\n",
               ["-fstack-protector-all", "-Wl,--defsym,__stack_chk_fail=0"]),
}
GOOD = "static int x; static int *p = &x; __attribute__((used)) static int f(int a) { return a + *p; }\n"


def build(folder, text, flags):
    source, out = pathlib.Path(folder, "a.c"), pathlib.Path(folder, "a.so")
    source.write_text(text)
    subprocess.run(["gcc", "-shared", "-fPIC", "-O2", "-fno-stack-protector", "-nostdlib", "-o", out, source, *flags], check=True)
    return out


def self_test():
    failures = 0
    with tempfile.TemporaryDirectory() as folder:
        for word, (text, flags) in BAD.items():
            said = list(check(build(folder, text, flags)))
            if not any(word in line for line in said):
                failures += 1
                print(f"self-test: no complaint with '{word}' but {said}")
        if said := list(check(build(folder, GOOD, []))):
            failures += 1
            print(f"self-test: complaints about a good file: {said}")
    print(f"self-test: {len(BAD)} bad inputs and a good one, {failures} judged wrongly")
    return 1 if failures else 0


def main():
    if sys.argv[1:] == ["--self-test"]:
        return self_test()
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    complaints = list(check(sys.argv[1]))
    for complaint in complaints:
        print(f"{sys.argv[1]}: {complaint}")
    print(f"{len(complaints)} complaints")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
