#!/usr/bin/env python3
"""What `sonde stack` says of the cases' programs, held against gdb.

usage: stacks.py --work DIR --sonde FILE [CASE...]

gdb runs a case's program, stops it where the case is about, says what it sees, and writes a core file; `sonde stack` reads that.
A frame that is called reliable must be gdb's, with the same inlined calls and lines; where the case says what verdict and
reason there has to be, that is checked too. The same of the stacks that hits record in the program (hits_*).
"""
import argparse
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

import run as cases

SKIPPED = 77
GDB = r"""
import gdb, json, os
OUT, taken = os.environ["STACKS_OUT"], []
for setting in ("pagination off", "debuginfod enabled off", "confirm off", "backtrace past-main on",
                "backtrace limit unlimited", "disable-randomization on", "breakpoint pending on"):
    gdb.execute("set " + setting)
gdb.execute("handle all nostop noprint pass")
gdb.execute("handle SIGTRAP SIGINT stop nopass")

def row(frame):
    where = frame.find_sal()
    return {"pc": frame.pc(), "name": frame.name(), "inlined": frame.type() == gdb.INLINE_FRAME,
            "tail": frame.type() == gdb.TAILCALL_FRAME, "file": where.symtab.fullname() if where.symtab else None,
            "line": where.line}

def take(label, core=True):
    frame, rows = gdb.newest_frame(), []
    while frame and len(rows) < 5000:
        rows.append(row(frame))
        frame = frame.older()
    path = f"{OUT}/{label}.core"
    if core:
        gdb.execute("generate-core-file " + path, to_string=True)
    taken.append({"label": label, "core": path, "frames": rows})

def go(where):
    gdb.execute("tbreak " + where, to_string=True)
    gdb.execute("continue", to_string=True)

def pc():
    return int(gdb.parse_and_eval("$pc"))

def stepi():
    gdb.execute("stepi", to_string=True)

def start(arguments=""):
    gdb.execute("tbreak main", to_string=True)
    gdb.execute("run %s >/dev/null 2>&1" % arguments, to_string=True)
"""
GDB_END = """
json.dump(taken, open(OUT + "/taken.json", "w"))
gdb.execute("kill")
"""


class Wrong(Exception):
    pass


def require(fact, what):
    if not fact:
        raise Wrong(what)


def stops(folder, program, script):
    """What gdb takes of `program` while it runs `script`."""
    out = folder / f"out/stacks-{pathlib.Path(program).name}"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    (out / "script.py").write_text(GDB + script + GDB_END)
    made = subprocess.run(["gdb", "-batch", "-nx", "-x", out / "script.py", program], cwd=folder,
                          env=dict(os.environ, STACKS_OUT=str(out)), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, errors="replace", timeout=240)
    require((out / "taken.json").exists(), f"gdb took nothing of {program}:\n{made.stdout}")
    return json.loads((out / "taken.json").read_text())


class Sonde:
    def __init__(self, program, folder):
        self.program, self.folder = program, folder

    def run(self, *arguments, status=(0,)):
        done = subprocess.run([self.program, "stack", *arguments], cwd=self.folder, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, text=True, errors="replace", timeout=120)
        require(done.returncode in status, f"sonde stack {arguments}: exit status {done.returncode}\n{done.stderr}")
        return done

    def stack(self, *arguments):
        """The first thread's, and what was noted."""
        out = json.loads(self.run("--json", *arguments).stdout)
        return out["threads"][0], out["problems"]


    def hits(self, program, *functions, arguments=()):
        """The stacks that hits of the functions record, in order of time: lists of (function, reason), an inlined call's reason
        being "inlined"."""
        trace = self.folder / "out/hits.trace"
        chosen = [word for function in functions for word in ("-f", function)]
        for words in (["record", "-q", "-s", "-o", trace, *chosen, "--", program, *arguments], ["report", "--calls", trace]):
            done = subprocess.run([self.program, *words], cwd=self.folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                  stderr=subprocess.PIPE, text=True, errors="replace", timeout=240)
            require(done.returncode == 0, f"sonde {words}: exit status {done.returncode}\n{done.stderr}")
        trace.unlink()
        found, inlined = [], []
        for number, name, reason in re.findall(r"^ {30,}(#\d+)? +(\S.*?)(?:  \[([a-z-]+)\])?$", done.stdout, re.M):
            frame = (re.sub(r"\+0x[0-9a-f]+$", "", name), reason or "reliable")
            if reason == "inlined":
                inlined.append(frame)
                continue
            if number == "#0":
                found.append([])
            found[-1] += [*inlined, frame]
            inlined = []
        return found


def is_whole(stack):
    return all(reason in ("reliable", "inlined") for _, reason in stack[:-1]) and stack[-1][1] == "end"


def chain(stack):
    return [name for name, _ in stack]


def real(rows):
    """gdb's frames that are frames: it shows inlined and tail calls as some."""
    return [r for r in rows if not r["inlined"] and not r["tail"]]


def to_main(found):
    """Behind main the C library's own debug information may be there or not."""
    ends = [i for i, (name, _) in enumerate(found) if name == "main"]
    return found[:ends[0] + 1] if ends else found


def levels(rows):
    """(name, line) of each level with a source line, as gdb shows them."""
    return to_main([(r["name"], r["line"]) for r in rows if r["file"] and not r["tail"]])


def levels_of(thread):
    found = []
    for frame in thread["frames"]:
        found += [(row["function"], row.get("source_line")) for row in frame["inlined"]]
        if "source_file" in frame:
            found.append((frame["function"], frame["source_line"]))
    return to_main(found)


def check_true(label, thread, rows):
    """Every frame up to the first that is not believed is gdb's. Returns how many those are."""
    truth = [r["pc"] for r in real(rows)]
    good = 0
    for frame in thread["frames"]:
        if frame["verdict"] != "reliable":
            break
        require(good < len(truth) and int(frame["pc"], 16) == truth[good],
                f"{label}: #{good} is called reliable, but is {frame['pc']}, not {truth[good:good + 1]}")
        good += 1
    if thread["verdict"] == "reliable":
        require(good == len(thread["frames"]) == len(truth), f"{label}: {good} reliable frames, gdb has {len(truth)}")
    return good


def check_whole(label, thread, rows):
    require(thread["verdict"] == "reliable", f"{label}: {thread['reason']} after {len(thread['frames'])} frames")
    check_true(label, thread, rows)


def names(thread):
    return [f.get("function") for f in thread["frames"]]


def case_048(folder, sonde):
    script = 'start()\ngo("*hidden_leaf")\ntake("leaf")\n'
    full = None
    for variant in ("full", "zlib", "zlibgnu", "lldz", "dwo", "dw4", "debugframe"):
        (stop,) = stops(folder, f"out/{variant}", script)
        thread, problems = sonde.stack(stop["core"])
        full = full or stop
        require(not problems, f"{variant}: {problems}")
        if variant == "debugframe" and thread["verdict"] != "reliable":
            check_true(variant, thread, stop["frames"])
            continue
        check_whole(variant, thread, stop["frames"])
        require(names(thread)[:4] == ["hidden_leaf", "hidden_mid", "shown", "main"], f"{variant}: {names(thread)}")
        expected = levels(stop["frames"])
        require(any(name == "inl" for name, _ in expected), f"{variant}: gdb does not see the inlined call: {expected}")
        require(levels_of(thread) == expected, f"{variant}: {levels_of(thread)}, gdb has {expected}")
    # The same program without names, by the process of the whole one.
    rows = full["frames"]
    for variant, options in (("link", []), ("bid", ["--debug-dir", "out/dbg"])):
        thread, problems = sonde.stack(full["core"], f"out/{variant}", *options)
        check_whole(variant, thread, rows)
        require(levels_of(thread) == levels(rows) and not problems, f"{variant}: {levels_of(thread)} {problems}")
        require(names(thread)[0] == "hidden_leaf", f"{variant}: {names(thread)}")
    thread, problems = sonde.stack(full["core"], "out/mini")
    check_whole("mini", thread, rows)
    require(names(thread)[:4] == ["hidden_leaf", "hidden_mid", "shown", "main"] and
            not any(name == "main" for name, _ in levels_of(thread)),
            f"mini: {names(thread)} {levels_of(thread)}")
    for variant in ("badlink", "stale", "stripped"):
        thread, problems = sonde.stack(full["core"], f"out/{variant}")
        check_whole(variant, thread, rows)
        require(not any(name == "main" for name, _ in levels_of(thread)) and all(n.startswith(f"{variant}+0x") for n in names(thread)[:4]),
                f"{variant}: {names(thread)} {levels_of(thread)}")
        refused = any("badlink.debug is of another build (the check sum differs)" in p for p in problems)
        require(refused == (variant == "badlink"), f"{variant}: {problems}")
    # Not the program that ran.
    thread, problems = sonde.stack(full["core"], "out/dw4")
    require(thread["reason"] == "unknown-code" and any("out/dw4 is not the file" in p for p in problems), f"{problems}")
    require(sum("out/dw4" in p for p in problems) == 1, f"{problems}")
    return f"13 variants; {hits_048(sonde)}"


def hits_048(sonde):
    for variant in ("full", "zlib", "zlibgnu", "lldz", "dwo", "dw4", "link", "mini", "debugframe"):
        stacks = sonde.hits(f"./out/{variant}", "hidden_leaf")
        require(len(stacks) == 1000, f"{variant}: {len(stacks)} stacks")
        inlined = [] if variant == "mini" else [("inl", "inlined")]
        for stack in stacks:
            require(is_whole(stack), f"{variant}: {stack}")
            require(stack[:4 + len(inlined)] == [("hidden_leaf", "reliable"), *inlined, ("hidden_mid", "reliable"), ("shown", "reliable"),
                                                 ("main", "reliable")], f"{variant}: {stack}")
    return "the same by hits"


def case_050(folder, sonde):
    """Every thirteenth instruction of each of three builds."""
    # The stack-realigning function's own rule is wrong at two instructions; gdb follows it, so main alone is compared there.
    script = """
start()
for i in range(30):
    take(str(i))
    for skip in range(13):
        stepi()
"""
    said = []
    for build in ("t_o2", "t_os", "t_realign"):
        reliable = 0
        taken = stops(folder, f"out/{build}", script)
        for stop in taken:
            thread, _ = sonde.stack(stop["core"])
            check_true(f"{build} {stop['label']}", thread, stop["frames"])
            reliable += thread["verdict"] == "reliable"
        require(reliable >= 0.9 * len(taken), f"{build}: only {reliable} of {len(taken)} states are reliable")
        said.append(f"{build} {reliable}/{len(taken)}")
    return f"{', '.join(said)}; by hits {hits_050(folder, sonde)}"


def hits_050(folder, sonde):
    """Every function hooked, each hit's stack held against gdb's at a breakpoint in the same place."""
    script = """
functions = %r
start()
for function in functions:
    gdb.execute("break *" + function, to_string=True)
for i in range(2000):
    gdb.execute("continue", to_string=True)
    if not gdb.selected_inferior().pid:
        break
    take(str(i), False)
json.dump(taken, open(OUT + "/taken.json", "w"))
os._exit(0)
"""
    known = ("leaf_nofp with_fp many_saved early big_frame with_alloca realigned stack_args tail recurse via_ptr lib run").split()
    said = []
    for build in ("t_o2", "t_o0", "t_os", "t_fp", "t_clang", "t_realign"):
        nm = subprocess.run(["nm", folder / "out" / build], stdout=subprocess.PIPE, text=True, check=True).stdout
        functions = [f for f in known if re.search(rf" [Tt] {f}$", nm, re.M)]
        stacks = sonde.hits(f"./out/{build}", *functions)
        hooked = {chain(stack)[0] for stack in stacks}
        require(len(hooked) >= 10, f"{build}: only {hooked} are hooked")
        truth = [to_main([(r["name"], 0) for r in real(stop["frames"])]) for stop in stops(folder, f"out/{build}", script % functions)]
        truth = [[name for name, _ in frames] for frames in truth if frames[0][0] in hooked]
        require(len(truth) == len(stacks), f"{build}: {len(stacks)} hits, gdb has {len(truth)}")
        for frames, stack in zip(truth, stacks):
            require(is_whole(stack), f"{build}: {stack}")
            ours = [name for name, reason in stack if reason != "inlined"]
            require(ours[:len(frames)] == frames, f"{build}: {stack}, gdb has {frames}")
        said.append(f"{build} {len(stacks)}")
    return ", ".join(said)


def case_051(folder, sonde):
    taken = stops(folder, "out/case", 'start()\nfor which in ("b", "a"):\n    go("die")\n    take(which)\n')
    for stop in taken:
        thread, _ = sonde.stack(stop["core"])
        check_whole(stop["label"], thread, stop["frames"])
        require(names(thread)[:4] == ["die", f"fatal_{stop['label']}", "go", "main"], names(thread))
        nm = subprocess.run(["nm", "-S", folder / "out/case"], stdout=subprocess.PIPE, text=True, check=True).stdout
        sizes = {w[-1]: int(w[1], 16) for w in map(str.split, nm.splitlines()) if len(w) == 4}
        fatal = thread["frames"][1]
        # The address is the true one: the first byte behind the function.
        size = sizes.get(fatal["function"])
        require(fatal["offset"] == size, f"{fatal['function']}+{fatal['offset']}, its size is {size}")
    stacks = sonde.hits("./out/case", "die")
    require([chain(stack)[:4] for stack in stacks] == [["die", f"fatal_{which}", "go", "main"] for which in "ba"], stacks)
    require(all(map(is_whole, stacks)), stacks)
    return "die, fatal_a or fatal_b, go, main"


def case_052(folder, sonde):
    script = """
start()
for label in ("start", "first_insn", "mid_fault", "usr2", "null"):
    go("snap")
    take(label)
"""
    wanted = {"first_insn": ["on_segv", "first_insn", "caller_of", "main"],
              "mid_fault": ["on_segv", "mid_fault", "caller_of", "main"],
              "usr2": ["on_usr2", "on_usr1", "nest", "main"],
              "null": ["on_segv", "nullcall", "main"], "start": ["main"]}
    for stop in stops(folder, "out/case", script):
        label = stop["label"]
        thread, _ = sonde.stack(stop["core"])
        ours = ("on_", "first", "mid", "caller_of", "null", "nest", "main")
        require([n for n in names(thread) if n and n.startswith(ours)] == wanted[label], f"{label}: {names(thread)}")
        if label == "null":
            require(thread["verdict"] == "unreliable" and thread["reason"] == "null-pc", f"null: {thread['reason']}")
            assumed = next(f for f in thread["frames"] if f.get("function") == "nullcall")
            require(assumed["verdict"] == "guessed", f"null: {assumed}")
            continue
        check_whole(label, thread, stop["frames"])
        # The interrupted pc is exact, also where the byte before it belongs to the neighbour.
        exact = [f.get("function") for f in thread["frames"][1:] if not f["is_return"]]
        if label in ("first_insn", "mid_fault"):
            require(exact[-1:] == [label], f"{label}: exact are {exact}")
    stacks = sonde.hits("./out/case", "snap")
    require(len(stacks) == 5, f"{len(stacks)} hits")
    for label, stack in zip(("start", "first_insn", "mid_fault", "usr2", "null"), stacks):
        require([n for n in chain(stack) if n.startswith(ours)] == wanted[label], f"{label}: {stack}")
        require(is_whole(stack) == (label != "null"), f"{label}: {stack}")
    require([why for name, why in stacks[4] if name in ("0x0", "nullcall")] == ["null-pc", "null-pc"], stacks[4])
    return "whole over every signal frame; a null call assumed; the same by hits"


def case_055(folder, sonde):
    script = """
start()
for function in ("a_nocfi", "a_expr", "a_wrong"):
    go("*" + function)
    go("cb")
    take(function + ".cb")
go("*a_empty")
for i in range(4):
    take("a_empty.%d" % i)
    stepi()
go("*a_expr")
for i in range(60):
    symbol = gdb.selected_frame().name()
    if symbol == "a_expr":
        take("a_expr.%d" % i)
    stepi()
    if gdb.selected_frame().name() == "drive":
        break
go("*a_nocfi")
for i in range(6):
    take("a_nocfi.%d" % i)
    stepi()
"""
    taken = stops(folder, "out/case", script)
    for stop in taken:
        label, rows = stop["label"], stop["frames"]
        function = label.split(".")[0]
        thread, _ = sonde.stack(stop["core"])
        strict = sonde.run("--reliable", "--json", stop["core"], status=(0, 3))
        require(strict.returncode == (0 if thread["verdict"] == "reliable" else 3), label)
        if function in ("a_expr", "a_empty"):
            check_whole(label, thread, rows)
            continue
        # Without tables, or with wrong ones: the frames above are not gdb's to say. What is certain is cb and its caller.
        require(thread["verdict"] == "unreliable", f"{label}: called reliable")
        good = [f for f in thread["frames"] if f["verdict"] == "reliable"]
        require(all(f["function"] in ("cb", function) for f in good), f"{label}: {names(thread)}")
        for frame in json.loads(strict.stdout)["threads"][0]["frames"]:
            require(frame.get("function") in ("cb", function) or frame["verdict"] != "reliable", f"{label}: {frame}")
        if function == "a_nocfi":
            require(thread["reason"] == "no-table-row", f"{label}: {thread['reason']}")
    require(len(taken) > 20, f"only {len(taken)} stops")
    return f"{len(taken)} states, {hits_055(sonde)} hits"


def hits_055(sonde):
    stacks = sonde.hits("./out/case", "cb")
    require(len(stacks) == 12000, f"{len(stacks)} hits")
    for at, stack in enumerate(stacks):
        function = ("a_nocfi", "a_expr", "a_wrong", "drive")[at % 4]  # a_empty jumps
        require(chain(stack)[:2] == ["cb", function], stack)
        if function in ("a_expr", "drive"):
            require(is_whole(stack) and "main" in chain(stack), stack)
        if function == "a_nocfi":
            require(stack[1][1] == "no-table-row", stack)
        if function == "a_wrong":  # nothing behind it is believed
            bad = next(i for i, (_, reason) in enumerate(stack) if reason not in ("reliable", "end"))
            require(bad in (1, 2) and not any(why == "reliable" for _, why in stack[bad:]), stack)
    return len(stacks)


def case_056(folder, sonde):
    script = """
start("100000000")
for kind in range(10):
    go("spin_here")
    take(str(kind), kind == 9 or True)
    gdb.execute("set $rdx = 1")
"""
    reasons = {}
    program = str((folder / "out/case").resolve())
    for stop in stops(folder, "out/case", script):
        begin = time.monotonic()
        out = json.loads(sonde.run("--json", stop["core"]).stdout)
        spinning = [t for t in out["threads"] if any(f.get("function") == "spin_with" for f in t["frames"])]
        require(len(spinning) == 1, f"{stop['label']}: {len(spinning)} threads spin")
        (thread,) = spinning
        require(thread["verdict"] == "unreliable", f"{stop['label']}: a damaged stack is called reliable")
        good = [f for f in thread["frames"] if f["verdict"] == "reliable"]
        # Kind 6 is a chain as recursion would make it: each frame of it is right until it ends at the mapping's.
        require(len(good) <= (251 if stop["label"] == "6" else 3), f"{stop['label']}: {len(good)} frames believed")
        require(len(thread["frames"]) <= 1000, f"{stop['label']}: {len(thread['frames'])} frames")
        # The main thread joins, or is just back from its clone, in hand-written code.
        others = [t for t in out["threads"] if t is not thread]
        known = ("special-code", "no-table-row")
        require(all(t["verdict"] == "reliable" or t["reason"] in known for t in others), f"{stop['label']}: {others}")
        require(time.monotonic() - begin < 20, f"{stop['label']}: took long")
        reasons[stop["label"]] = thread["reason"]
    allowed = {"stack-out-of-range", "non-progress", "ra-not-after-call", "unknown-code", "fp-mismatch", "no-table-row"}
    require(set(reasons.values()) <= allowed, reasons)
    # From another process, while it spins.
    process = subprocess.Popen([program, "3000000000"], stdout=subprocess.DEVNULL)
    try:
        seen = 0
        for _ in range(20):
            out = json.loads(sonde.run("--json", "-p", str(process.pid)).stdout)
            seen += sum(t["verdict"] == "unreliable" and any(f.get("function") == "spin_with" for f in t["frames"])
                        for t in out["threads"])
        require(seen > 0, "no stack of a spinning thread was taken")
        require(process.poll() is None, "the program ended")
    finally:
        process.kill()
        process.wait()
    return f"{reasons}, {seen} of 20 samples; by signals {hits_056(sonde, allowed)}"


def hits_056(sonde, allowed):
    """Sampled at 1 kHz by signals, on a stack of their own, as it goes on."""
    begin = time.monotonic()
    stacks = [s for s in sonde.hits("./out/sampled", "tick", arguments=["300000000"]) if "spin_with" in chain(s)]
    require(len(stacks) > 50, f"{len(stacks)} samples")
    reasons = {}
    for stack in stacks:
        at = chain(stack).index("spin_with")
        require(all(why == "reliable" for _, why in stack[:at]), stack)
        bad = next((why for _, why in stack if why not in ("reliable", "end")), "none")
        require(bad in allowed | {"buffer-full"} and not is_whole(stack), stack)
        reasons[bad] = reasons.get(bad, 0) + 1
    require(len(reasons) >= 3, reasons)
    require(time.monotonic() - begin < 120, "samples took long")
    return reasons


def case_059(folder, sonde):
    # lld writes no tables for its stubs: gdb is right at a stub's first instruction only, and until the stub and the resolver
    # are left the callers stay the same.
    script = """
start()
go("outerp")
inside, budget, callers = 0, 4000, None
while inside < 20 and budget > 0:
    budget -= 1
    stepi()
    name = gdb.execute("info symbol $pc", to_string=True)
    if ".plt" in name or "@plt" in name or "_dl_runtime_resolve" in name:
        take(str(inside))
        callers = callers or taken[-1]["frames"][1:]
        taken[-1]["frames"][1:] = callers
        inside += 1
    else:
        callers = None
"""
    said = []
    programs = sorted({c[0] for c in cases.commands(folder.name)})
    for program in programs:
        taken = stops(folder, program, script)
        for stop in taken:
            thread, _ = sonde.stack(stop["core"])
            label = f"{program} {stop['label']}"
            check_whole(label, thread, stop["frames"])
            ours = [n for n in names(thread) if n in ("many", "outerp", "main")]
            require(ours == ["many", "outerp", "main"], f"{label}: {names(thread)}")
        require(len(taken) > 3, f"{program}: {len(taken)} states in stubs")
        stacks = sonde.hits(program, "many")
        require(len(stacks) == 2000 and all(is_whole(s) and chain(s)[:3] == ["many", "outerp", "main"] for s in stacks), f"{program}: hits")
        said.append(f"{pathlib.Path(program).name} {len(taken)}")
    return ", ".join(said)


def case_061(folder, sonde):
    script = """
gdb.execute("handle SIGSEGV stop nopass")
gdb.execute("set follow-exec-mode same")
start("go")
gdb.execute("continue", to_string=True)
n = int(gdb.parse_and_eval("n"))
gdb.execute("generate-core-file " + OUT + "/deep.core", to_string=True)
taken.append({"label": "deep", "core": OUT + "/deep.core", "n": n, "frames": []})
"""
    (stop,) = stops(folder, "out/case", script)
    thread, _ = sonde.stack(stop["core"])
    require(len(thread["frames"]) == 1000 and thread["reason"] == "depth-limit", f"{thread['reason']}")
    require(all(f["verdict"] == "reliable" for f in thread["frames"][:999]), "the frames before the cut")
    both, _ = sonde.stack("--max-frames", "10", "--outermost", "5", stop["core"])
    require(len(both["frames"]) == 15 and names(both)[:10] == ["forever"] * 10, names(both))
    require("main" in names(both)[10:] and both["frames"][-1]["reason"] == "end", names(both))
    # forever(0) is the outermost call.
    whole, _ = sonde.stack("--max-frames", "10000000", stop["core"])
    require(whole["verdict"] == "reliable", whole["reason"])
    require(names(whole).count("forever") == stop["n"] + 1, f"{names(whole).count('forever')} frames, n is {stop['n']}")
    require(both["left_out"] == len(whole["frames"]) - 15, f"{both['left_out']} left out of {len(whole['frames'])}")
    os.remove(stop["core"])
    return f"{len(whole['frames'])} frames"


def main():
    parser = argparse.ArgumentParser(description="Hold sonde stack against gdb.")
    parser.add_argument("--work", type=pathlib.Path, required=True, help="folder for builds, as for run.py")
    parser.add_argument("--sonde", type=pathlib.Path, required=True, help="the program under test")
    parser.add_argument("cases", nargs="*", help="beginnings of cases' names; all that are known without")
    options = parser.parse_args()
    if not shutil.which("gdb"):
        print("skipped: gdb is not installed (./dev setup)")
        return SKIPPED
    known = {name[5:]: check for name, check in globals().items() if name.startswith("case_")}
    failed = 0
    for case in cases.cases(options.cases or sorted(known)):
        number = case.split("-")[0]
        folder = cases.build(case, options.work.resolve())
        try:
            print(f"ok {case}: {known[number](folder, Sonde(options.sonde.resolve(), folder))}", flush=True)
            for core in folder.glob("out/stacks-*/*.core"):
                core.unlink()
        except (Wrong, KeyError, IndexError, StopIteration) as problem:
            print(f"FAILED {case}: {problem!r}", flush=True)
            failed += 1
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
