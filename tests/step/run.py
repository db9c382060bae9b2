#!/usr/bin/env python3
"""The proof: real programs single-stepped, and at every instruction sonde's walk held against the truth.

usage: run.py --stepper FILE --work DIR [--aarch64] [--steps N] [--jobs N] [--urgent] [--from start|entry|steady]... [PROGRAM...]

Without --from: where a program does what it is there for, or at its first instruction if it is a short one. --aarch64: the
programs of that processor, under qemu; there nobody else tells what is on a stack at some time, so what comes before steady
state is stepped as well.

Prints a table, one line for each program and start, and below it where stacks are not reliable and why. Fails if a stack that
is called reliable is not the true one, if the ways to walk differ, if too few stacks are reliable on compiled code, or if more
are unreliable elsewhere than the bare rows refuse or get wrong. A program that is not installed is named, with the package that
has it; if none is left the exit status is 77.
"""
import argparse
import concurrent.futures
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
CASES = HERE.parent / "cases"


class Program:
    """`prepare(work)` gives the words of the command and a file for its standard input or None.

    `steady`: seconds of processor time after which it does what it is there for; None: it ends too soon for that.
    `beyond_rows`: why more stacks are not reliable than the bare rows fail at, if so.
    `by_hand`: patterns of "reason file:function" where code that no compiler has made is not reliable, each with the reason why.
    """

    def __init__(self, name, prepare, package, needs=(), steady=0.5, by_hand=(), flags=(), beyond_rows=""):
        self.name, self.prepare, self.package, self.needs, self.steady = name, prepare, package, needs, steady
        self.flags, self.beyond_rows = flags, beyond_rows
        self.by_hand = [re.compile(pattern) for pattern, _ in by_hand]

    def missing(self):
        return [n for n in self.needs if not shutil.which(n)]


def write(path, text):
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
    return path


def gzip(work):
    return ["/bin/gzip", "-c"], write(work / "numbers", "\n".join(map(str, range(6_000_000))))


def sqlite3(work):
    script = """create table t(a integer primary key, b text);
with recursive n(i) as (select 1 union all select i+1 from n where i < 400000) insert into t select i, hex(i * 7919) || 'x' from n;
create index x on t(b);
select count(*), max(length(b)) from t;
select sum(c.a), group_concat(t.b) from t join t c on t.b = c.b where c.a % 7 = 3 group by t.a % 1000 order by 1 desc limit 5;
"""
    return ["/usr/bin/sqlite3", ":memory:"], write(work / "script.sql", script * 3)


def python3(work):
    script = """
import json, re
class Node:
    def __init__(self, n): self.n, self.children = n, []
    def total(self): return self.n + sum(c.total() for c in self.children)
def tree(n): 
    node = Node(n)
    if n: node.children = [tree(n - 1), tree(n - 1)]
    return node
for i in range(10000):
    text = json.dumps({str(k): [k, k * 1.5, "x" * (k % 7)] for k in range(50)})
    words = sorted(re.findall(r"[0-9]+", text), key=lambda w: (len(w), w))
    assert json.loads(text)["3"] == [3, 4.5, "xxx"] and tree(5).total() == 57
"""
    return ["/usr/bin/python3", "-S", "-E", write(work / "script.py", script)], None


def perl(work):
    script = """
my %seen; my $text = join ' ', map { $_ * 7919 } 1 .. 2000;
sub depth { my $n = shift; return $n ? 1 + depth($n - 1) : 0 }
for my $round (1 .. 10000) {
  $seen{$1}++ while $text =~ /(\\d*7\\d+)/g;
  my @sorted = sort { $seen{$a} <=> $seen{$b} or $a cmp $b } keys %seen;
  die unless depth(20) == 20 and sprintf('%05.2f', $round / 3);
}
"""
    return ["/usr/bin/perl", write(work / "script.pl", script)], None


def speed(*what):
    return lambda work: (["/usr/bin/openssl", "speed", "-seconds", "3000", "-bytes", "8192", *what], None)


def speed_of_exchange(work):
    return ["/usr/bin/openssl", "speed", "-seconds", "3000", "ecdhx25519"], None


def cc1(work):
    functions = "".join(f"""
struct s{i} {{ int a, b[{i % 9 + 1}]; double c; }};
static int f{i}(struct s{i} *p, int n) {{
  int sum = 0;
  for (int k = 0; k < n; k++) {{ switch (k % {i % 5 + 3}) {{ case 0: sum += p->b[k % {i % 9 + 1}]; break; case 1: p->c *= 1.5; break;
    case 2: sum ^= (int)p->c + k; break; default: sum -= p->a * {i}; }} }}
  return sum;
}}
int g{i}(int x) {{ struct s{i} v = {{x, {{x}}, x * 0.5}}; return f{i}(&v, x & 31) + f{i}(&v, {i}); }}
""" for i in range(3000))
    compiler = subprocess.run(["gcc", "-print-prog-name=cc1"], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    return [compiler, "-quiet", "-O2", write(work / "source.i", functions), "-o", "/dev/null"], None


def ffmpeg(work):
    return ["/usr/bin/ffmpeg", "-nostdin", "-v", "error", "-f", "lavfi", "-i", "testsrc2=size=640x360:rate=25", "-t", "600", "-c:v",
            "libx264", "-x264-params", "threads=1:sync-lookahead=0:rc-lookahead=5:sliced-threads=0", "-threads", "1", "-f",
            "null", "-"], None


def luajit(*flags):
    def prepare(work):
        script = """
local function fib(n) if n < 2 then return n end return fib(n - 1) + fib(n - 2) end
local words = {}
for round = 1, 1000000 do
  for i = 1, 200 do words[i] = tostring(i * 7919 % 1000) .. "x" end
  table.sort(words)
  local s = table.concat(words, ","):gsub("%d+7", function(w) return "<" .. w .. ">" end)
  local ok = pcall(function() if fib(12) ~= 144 then error("wrong") end end)
  local c = coroutine.wrap(function() for i = 1, 20 do coroutine.yield(i * i) end end)
  for i = 1, 20 do assert(c() == i * i) end
end
"""
        return ["/usr/bin/luajit", *flags, write(work / "script.lua", script)], None
    return prepare


def case(number, program):
    """A program of tests/cases, built in the work folder."""
    def prepare(work):
        source = next(CASES.glob(f"{number}-*"))
        folder = work / source.name
        if not (folder / "out" / program).exists():
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(source, folder)
            (folder / "out").mkdir()
            subprocess.run(["sh", "-e", "build.sh"], cwd=folder, check=True, timeout=300,
                           env={**os.environ, "PATH": f"{clang_as_clang(work)}:{os.environ['PATH']}"})
        return [folder / "out" / program], None
    return prepare


def signals(name, *command):
    """A program that gets a signal at each of its instructions."""
    def prepare(work):
        program = work / f"signals_{name}"
        if not program.exists():
            subprocess.run([*command, "-w", "-o", program, HERE / "signals.c"], check=True, timeout=300)
        return [program], None
    return prepare


def clang_as_clang(work):
    """The cases call `clang`; Debian's is named by its version."""
    folder = work / "bin"
    folder.mkdir(exist_ok=True)
    for name, versioned in (("clang", "clang-19"), ("ld.lld", "ld.lld-19")):
        if not (folder / name).exists() and shutil.which(versioned):
            (folder / name).symlink_to(shutil.which(versioned))
    return folder


INTERPRETER = [(r"^row-refuted luajit:", "one row for the whole interpreter, wrong where functions in it begin, and in the small ones"),
               (r"^no-table-row luajit:", "glue without rows"),
               (r"^unknown-code generated code", "what it compiles itself")]

PROGRAMS = [
    *(Program(f"050 {b}", case("050", b), "gcc, clang-19", ["gcc", "clang-19"], steady=None)
      for b in ("t_o2", "t_o0", "t_os", "t_fp", "t_clang", "t_realign")),
    *(Program(f"059 {b}", case("059", b), "gcc, lld-19", ["gcc", "ld.lld-19"], steady=None) for b in ("case", "ibt", "now", "lld")),
    *(Program(f"{number} {what}", case(number, "case"), "gcc, g++", ["g++"], steady=None)
      for number, what in (("002", "tails"), ("051", "noreturn"), ("052", "signals"))),
    Program("010 exceptions", case("010", "case"), "g++", ["g++"], steady=None,
            by_hand=[("^special-code libgcc_s", "return addresses and saved registers are being written over")],
            beyond_rows="not all of what is written over is needed"),
    Program("011 longjmp", case("011", "case"), "gcc", ["gcc"], steady=None,
            by_hand=[("^special-code libc.so.6:(__longjmp|0x)", "rows that describe the target; no name without libc6-dbg")]),
    Program("012 fibers", case("012", "case"), "gcc", ["gcc"], steady=None, beyond_rows="a context that has not begun called nobody",
            by_hand=[("^special-code libc.so.6:swapcontext", "its row needs a pc that is not pushed yet"),
                     ("^ra-not-after-call case:", "a context that has not begun")]),
    Program("055 assembly", case("055", "case"), "gcc", ["gcc"], steady=None,
            by_hand=[("^no-table-row case:a_nocfi", "no row"), ("^unknown-code generated code from case:a_wrong", "a wrong row")]),
    Program("060 fork", case("060", "case"), "gcc", ["gcc"], steady=None,
            by_hand=[("^no-table-row libc.so.6:vfork", "its row looks for the return address where it was")]),
    *(Program(f"signals {name}", signals(name, *command), "gcc, clang-19", command[:1], steady=None, flags=["--signals"])
      for name, command in {"o2": ["gcc", "-O2", "-Wl,-z,lazy", "-fcf-protection=full"], "o0": ["gcc", "-O0", "-Wl,-z,lazy"],
                            "realign": ["gcc", "-O2", "-mstackrealign", "-fno-shrink-wrap"],
                            "clang": ["clang-19", "-Os"]}.items()),
    Program("gzip", gzip, "gzip", ["/bin/gzip"]),
    Program("sqlite3", sqlite3, "sqlite3", ["/usr/bin/sqlite3"]),
    Program("python3", python3, "python3", ["/usr/bin/python3"]),
    Program("perl", perl, "perl", ["/usr/bin/perl"]),
    Program("cc1", cc1, "gcc", ["gcc"], steady=1, by_hand=[("^no-table-row libgmp.so", "GMP's assembly has no rows")]),
    Program("openssl sha512", speed("sha512"), "openssl", ["/usr/bin/openssl"]),
    Program("openssl aes", speed("-evp", "aes-256-gcm"), "openssl", ["/usr/bin/openssl"],
            by_hand=[("^no-table-row libcrypto.so.3:", "_aesni_ctr32_ghash_6x has no rows")]),
    Program("openssl x25519", speed_of_exchange, "openssl", ["/usr/bin/openssl"],
            by_hand=[("^no-table-row libcrypto.so.3:", "field arithmetic whose row at its return is wrong")]),
    Program("ffmpeg x264", ffmpeg, "ffmpeg", ["/usr/bin/ffmpeg"], steady=1.5,
            by_hand=[(r"^no-table-row lib(x264|avcodec|avutil|swscale|swresample)\.so", "assembly without any rows")]),
    Program("luajit", luajit(), "luajit", ["/usr/bin/luajit"], by_hand=INTERPRETER),
    Program("luajit -joff", luajit("-joff"), "luajit", ["/usr/bin/luajit"], by_hand=INTERPRETER),
]


def cross(name, source, *flags):
    """A program for AArch64 in the work folder. `source`: in this folder, or the number of a case."""
    def prepare(work):
        program = work / f"aarch64_{name.replace(' ', '_')}"
        file = HERE / source if (HERE / source).exists() else next(f for f in next(CASES.glob(f"{source}-*")).glob("*.c*"))
        if not program.exists():
            compiler = "aarch64-linux-gnu-g++" if file.suffix == ".cc" else "aarch64-linux-gnu-gcc"
            subprocess.run([compiler, "-g", "-w", "-pthread", *flags, "-o", program, file], check=True, timeout=300)
        return [program], None
    return prepare


def aarch64(name, source, *flags, by_hand=(), beyond_rows="", stepper_flags=(), steady=None):
    by_hand = [(r"^no-table-row [^ ]*:(_init|_fini|call_weak_fn)$", "start files have no rows"), *by_hand]
    return Program(name, cross(name, source, *flags), "g++-aarch64-linux-gnu, qemu-user", ["aarch64-linux-gnu-g++", "qemu-aarch64"],
                   steady=steady, by_hand=by_hand, flags=list(stepper_flags), beyond_rows=beyond_rows)


THROWN = [("^special-code libgcc_s", "return addresses and saved registers are being written over")]
WRITTEN_OVER = "not all of what is written over is needed"
NOW = "-Wl,-z,now"  # main is reached after fewer instructions
AARCH64_PROGRAMS = [
    *(aarch64(f"050 {name}", "050", NOW, *flags, steady=1000)
      for name, flags in {"o0": ["-O0"], "o2": ["-O2"], "os": ["-Os"], "nofp": ["-O2", "-fomit-frame-pointer"],
                          "leaf fp": ["-O2", "-fno-omit-frame-pointer", "-mno-omit-leaf-frame-pointer", "-fstack-clash-protection"],
                          "signed": ["-O2", "-mbranch-protection=standard"],
                          "signed leaf": ["-O1", "-mbranch-protection=pac-ret+leaf+b-key"],
                          "noplt": ["-O2", "-fno-plt", "-mbranch-protection=none"]}.items()),
    aarch64("050 lazy", "050", "-O2", "-Wl,-z,lazy", "-mbranch-protection=standard", steady=5000),
    aarch64("050 static", "050", "-O2", "-static", steady=1000),
    aarch64("102 frames", "aarch64_frames.c", NOW, "-O2", "-fomit-frame-pointer", steady=1000),
    aarch64("102 signed", "aarch64_frames.c", NOW, "-O1", "-mbranch-protection=standard", steady=1000),
    aarch64("002 tails", "002", NOW, "-O1", steady=1000), aarch64("051 noreturn", "051", NOW, "-O2", steady=1000),
    aarch64("052 signals", "052", NOW, "-O1", "-rdynamic", steady=1000),
    aarch64("010 exceptions", "010", "-O2", by_hand=THROWN, beyond_rows=WRITTEN_OVER, steady=20000),
    aarch64("010 static", "010", "-O1", "-static", "-mbranch-protection=standard", by_hand=THROWN, beyond_rows=WRITTEN_OVER,
            steady=6000),
    aarch64("011 longjmp", "011", NOW, "-O1", beyond_rows="rows that describe the target lead there, sometimes", steady=1000,
            by_hand=[("^special-code libc.so.6:", "rows that describe the target")]),
    aarch64("012 fibers", "012", NOW, "-O1", beyond_rows="a context that has not begun called nobody", steady=1000,
            by_hand=[("^special-code libc.so.6:(swapcontext|setcontext)", "rows say that the return address is in x30"),
                     ("^ra-not-after-call aarch64", "a context that has not begun")]),
    aarch64("library", "aarch64_library.cc", "-O2", by_hand=THROWN, beyond_rows=WRITTEN_OVER, steady=60000),
    aarch64("signals", "signals.c", NOW, "-O2", stepper_flags=["--signals"], steady=1000),
    aarch64("signals signed", "signals.c", NOW, "-O0", "-mbranch-protection=standard", stepper_flags=["--signals"], steady=1000),
]


def step(args, program, start):
    command, stdin = program.prepare(args.work)
    words = [args.stepper, "--steps", args.steps, "--from"]
    if start == "steady" and args.aarch64:
        words += ["entry", "--skip", program.steady]
    else:
        words.append(program.steady if start == "steady" else start)
    if shutil.which("gdb"):
        words += ["--gdb-script", HERE / "gdb_stacks.py", "--gdb-every", args.gdb_every, "--gdb-unreliable", args.gdb_unreliable]
    words += ["--return-seconds", args.return_seconds]
    words += program.flags
    if args.urgent:
        words.append("--urgent")
    if stdin:
        words += ["--stdin", stdin]
    words += ["--", *command]
    # Not the user's tables: `sonde check` may have marked rows there.
    environment = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", "HOME": str(args.work), "XDG_CACHE_HOME": str(args.work / "cache")}
    done = subprocess.run([str(w) for w in words], cwd=args.work, env=environment, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True, timeout=7200)
    try:
        return json.loads(done.stdout), done.stderr
    except ValueError:
        return None, f"exit status {done.returncode}: {done.stdout}{done.stderr}"


def judge(program, counts):
    """What is wrong with it, in words."""
    problems = []
    unreliable = counts["states"] - counts["reliable"] - counts["wrong"]
    compiled = sum(n for place, n in counts["places"].items() if not any(p.search(place) for p in program.by_hand))
    plain = counts["plain"]
    if counts["wrong"]:
        problems.append(f"{counts['wrong']} stacks are called reliable and are not the true ones: {counts['wrong_places']}")
    if counts["forms_differ"]:
        problems.append(f"{counts['forms_differ']} times the ways to walk differ")
    if counts["adopted_false"]:
        problems.append(f"{counts['adopted_false']} calls taken from libdw and libunwind did not return as they said")
    if compiled * 10_000 > counts["states"]:
        problems.append(f"{compiled} stacks on compiled code are not reliable")
    if not program.beyond_rows and unreliable > plain["refused"] + plain["wrong"]:
        problems.append(f"{unreliable} stacks are not reliable, the bare rows fail at {plain['refused'] + plain['wrong']}")
    if counts["gdb_problem"]:
        problems.append(counts["gdb_problem"])
    return problems


TITLE = ("| program, start         compared  reliable %  unrel.  wrong  unknown |  bare rows   libdw      libunwind  gdb        | "
         "unreliable: gdb right |  adopted |    s")
UNDER = ("|                                                                       refused and wrong, in a million states    |"
         "                       | returned |")


def others(counts, name):
    c = counts[name]
    if not c["asked"]:
        return f"{'-':<10}"
    return f"{round(c['refused'] * 1e6 / c['asked'])}/{round(c['wrong'] * 1e6 / c['asked'])}".ljust(10)


def line(title, c):
    unreliable = c["states"] - c["reliable"] - c["wrong"]
    gdb = c["gdb"]["at_unreliable"]
    right = f"{gdb['asked'] - gdb['refused'] - gdb['wrong']} of {gdb['asked']}" if gdb["asked"] else "-"
    return (f"| {title:<21}{c['states']:>10}  {100 * c['reliable'] / max(1, c['states']):>10.4f}{unreliable:>8}{c['wrong']:>7}"
            f"{c['unknown']:>9} | {others(c, 'plain')} {others(c, 'libdw')} {others(c, 'libunwind')} {others(c, 'gdb')} | {right:>21} | "
            f"{c['adopted_returned']:>3}/{c['adopted']:<4} | {c['seconds']:>4.0f}")


def show(program, start, counts, words):
    """Prints what came out; True if nothing is wrong with it."""
    if counts is None:
        print(f"FAILED {program.name}, {start}: {words}", flush=True)
        return False
    print(line(f"{program.name}, {start}", counts), flush=True)
    problems = judge(program, counts)
    for place, number in sorted(counts["places"].items(), key=lambda item: -item[1])[:8]:
        print(f"    {number:>8}  {place}")
    for problem in problems:
        print(f"FAILED {program.name}, {start}: {problem}")
    if problems:
        print(words, flush=True)
    return not problems


def self_test(args):
    """With every fiftieth truth spoiled, just those stacks must be called wrong."""
    program = next(p for p in PROGRAMS if p.name == "gzip")
    program.flags = ["--spoil-every", 50]
    counts, words = step(args, program, "steady")
    if counts is None:
        print(f"FAILED {words}")
        return 1
    found = counts["wrong"] == counts["spoiled"] > 0 and counts["states"] - counts["reliable"] == counts["wrong"]
    print(f"{'ok' if found else 'FAILED'} {counts['spoiled']} of {counts['states']} truths spoiled, {counts['wrong']} stacks found wrong")
    return 0 if found else 1


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--stepper", type=pathlib.Path, required=True)
    parser.add_argument("--work", type=pathlib.Path, required=True)
    parser.add_argument("--steps", type=int, default=20000)
    parser.add_argument("--gdb-every", type=int, default=10000)
    parser.add_argument("--gdb-unreliable", type=int, default=1000)
    parser.add_argument("--return-seconds", type=float, default=1)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--self-test", action="store_true")
    parser.add_argument("--aarch64", action="store_true")
    parser.add_argument("--urgent", action="store_true")
    parser.add_argument("--from", dest="starts", action="append")
    parser.add_argument("programs", nargs="*")
    args = parser.parse_args()
    args.work, args.stepper = args.work.resolve(), args.stepper.resolve()
    args.work.mkdir(parents=True, exist_ok=True)
    if args.self_test:
        return self_test(args)
    begin, failed, todo = time.monotonic(), 0, []
    for program in (p for p in (AARCH64_PROGRAMS if args.aarch64 else PROGRAMS) if not args.programs or p.name in args.programs):
        if missing := program.missing():
            print(f"skipped: {program.name}: no {', '.join(missing)} here; packages: {program.package}", flush=True)
            continue
        begins = args.starts or ["steady" if program.steady else "entry"]
        todo += [(program, start) for start in begins if start != "steady" or program.steady]
        if args.aarch64 or not program.steady:
            program.prepare(args.work)  # before anything runs at the same time
    print(TITLE, UNDER, sep="\n", flush=True)
    # Each run is two processes that wait for each other: one processor.
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        results = pool.map(lambda item: step(args, *item), todo)
        for (program, start), (counts, words) in zip(todo, results):
            failed += not show(program, start, counts, words)
    seen = len(todo)
    if not seen:
        print("skipped: none of the programs is installed (./dev setup)")
        return 77
    print(f"{'FAILED' if failed else 'ok'} {seen} runs in {time.monotonic() - begin:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
