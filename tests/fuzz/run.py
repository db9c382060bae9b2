#!/usr/bin/env python3
"""Builds the fuzz targets, makes seeds for them, runs each for some processor time and says what came out.

Usage: tests/fuzz/run.py [SECONDS] [TARGET...]   (normally through `./dev fuzz`; SECONDS of processor time a target, 600)
What a target has found interesting stays in build/fuzz/corpus/TARGET; inputs that crash it in build/fuzz/findings.
"""
import hashlib
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time

TOP = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BUILD = os.path.join(TOP, "build/fuzz")
TARGETS = ["image_fuzz", "eh_frame_fuzz", "debug_frame_fuzz", "sframe_fuzz", "table_fuzz", "core_fuzz", "walk_fuzz"]
HANGS = 20  # seconds that no input may take
TICKS = os.sysconf("SC_CLK_TCK")

PROGRAM = r"""
extern int puts(const char*);
int depth(int n) { volatile char b[100]; b[n % 100] = n; return n ? depth(n - 1) + b[n % 100] : 0; }
int grows(int n) { char* p = __builtin_alloca(n); p[n / 2] = n; return p[n / 2] + depth(n); }
int aligned(int n) { _Alignas(64) volatile char b[128]; b[n] = n; return b[n] + depth(n) + grows(n); }
int main(int argc, char** argv) { puts(argv[0]); if (argc > 5) __builtin_trap(); return grows(argc) + aligned(argc); }
"""


def shell(command, folder):
    subprocess.run(command, shell=True, cwd=folder, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def build(targets):
    def run(*command):
        done = subprocess.run(command, cwd=TOP, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            sys.exit(done.stdout[-5000:])
    run("cmake", "-S", ".", "-B", BUILD, "-G", "Ninja", "-DSONDE_FUZZ=ON", "-DCMAKE_C_COMPILER=clang-19",
        "-DCMAKE_CXX_COMPILER=clang++-19", "-DCMAKE_BUILD_TYPE=RelWithDebInfo")
    run("cmake", "--build", BUILD, "-j", os.environ.get("SONDE_JOBS", str(os.cpu_count())), "--target", *targets)


def add(target, data):
    folder = os.path.join(BUILD, "seeds", target)
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, hashlib.sha1(data).hexdigest()), "wb") as file:
        file.write(data)


def read(path):
    with open(path, "rb") as file:
        return file.read()


def add_tables(folder):
    """The packed tables that the seed programs' own rows make, as the cache keeps them behind its header of 32 bytes."""
    sonde = os.path.join(TOP, "build/gcc/sonde")
    if not os.path.exists(sonde):
        return
    environment = {**os.environ, "XDG_CACHE_HOME": folder}
    subprocess.run([sonde, "check", "plain"], cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for name in os.listdir(os.path.join(folder, "sonde")) if os.path.isdir(os.path.join(folder, "sonde")) else []:
        add("table_fuzz", read(os.path.join(folder, "sonde", name))[32:])


def add_core(folder):
    """The core file of a program without libraries, its large parts of zeros left out."""
    if shutil.which("gdb"):
        shell("gdb -nx -q -batch -ex 'break depth' -ex run -ex 'generate-core-file core' ./static", folder)
        if os.path.exists(os.path.join(folder, "core")):
            data = read(os.path.join(folder, "core"))
            add("core_fuzz", data[:4096] + b"".join(p for p in (data[i:i + 4096] for i in range(4096, len(data), 4096)) if any(p))[:65536])


def make_seeds():
    folder = os.path.join(BUILD, "seed_programs")
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    with open(os.path.join(folder, "a.c"), "w", encoding="ascii") as file:
        file.write(PROGRAM)
    shell("gcc -O1 -Wa,--gsframe -o plain a.c; gcc -O2 -g -fno-asynchronous-unwind-tables -fno-exceptions -gz=none -o debug a.c;"
          "gcc -O0 -shared -fPIC -Wa,--gsframe -o lib.so a.c; strip -o bare plain; gcc -g -gz=zlib -o zlib a.c;"
          "gcc -O1 -nostdlib -nostartfiles -static -Wl,-e,depth -Dputs=grows -o static a.c 2>/dev/null || gcc -static -o static a.c; true", folder)
    for name in ("plain", "debug", "lib.so", "bare", "zlib"):
        add("image_fuzz", read(os.path.join(folder, name)))
    for name, section, target in (("plain", ".eh_frame", "eh_frame_fuzz"), ("lib.so", ".eh_frame", "eh_frame_fuzz"),
                                  ("debug", ".debug_frame", "debug_frame_fuzz"), ("plain", ".sframe", "sframe_fuzz"),
                                  ("lib.so", ".sframe", "sframe_fuzz")):
        shell(f"objcopy -O binary --set-section-flags {section}=alloc --only-section={section} {name} section", folder)
        data = read(os.path.join(folder, "section"))
        for first in range(4):
            add(target, bytes([first]) + (b"\0" if target == "debug_frame_fuzz" else b"") + data)
    add_tables(folder)
    add_core(folder)


def cpu_seconds(pid):
    with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def run_once(target, seconds):
    """(exit status, seconds used, the log). The target ends itself in good order at SIGUSR1."""
    corpus, seeds = (os.path.join(BUILD, kind, target) for kind in ("corpus", "seeds"))
    findings = os.path.join(BUILD, "findings") + "/"
    for folder in (corpus, seeds, findings):
        os.makedirs(folder, exist_ok=True)
    log_path = os.path.join(BUILD, f"{target}.log")
    longest = 16384 if target not in ("image_fuzz", "core_fuzz") else 131072
    with open(log_path, "wb") as log:
        child = subprocess.Popen([os.path.join(BUILD, "tests/fuzz", target), corpus, seeds, f"-timeout={HANGS}", f"-max_len={longest}",
                                  "-rss_limit_mb=2500", "-report_slow_units=1000000", f"-artifact_prefix={findings}{target}-", "-print_final_stats=1", "-handle_usr1=1"],
                                 stdout=log, stderr=log)
        used = 0.0
        while child.poll() is None:
            time.sleep(0.1)
            try:
                used = cpu_seconds(child.pid)
            except (OSError, IndexError):
                break
            if used >= seconds:
                child.send_signal(signal.SIGUSR1)
                try:
                    child.wait(120)
                except subprocess.TimeoutExpired:
                    child.kill()
        status = child.wait()
    return status, used, read(log_path).decode("utf-8", "replace")


def hangs(target, path):
    """Whether an input that took long on the clock takes long of the processor too; a machine may stand still for others."""
    def limit():
        resource.setrlimit(resource.RLIMIT_CPU, (HANGS, HANGS))
    done = subprocess.run([os.path.join(BUILD, "tests/fuzz", target), path, "-timeout=0"], preexec_fn=limit, check=False,
                          stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return done.returncode != 0


def run(target, seconds):
    """True if nothing was found."""
    executions, used, covered, found, stood_still = 0, 0.0, "0", [], 0
    while True:
        status, took, text = run_once(target, seconds - used)
        used += took
        executions += int((re.findall(r"stat::number_of_executed_units:\s*(\d+)", text) or ["0"])[-1])
        covered = (re.findall(r"cov: (\d+)", text) or [covered])[-1]
        new = re.findall(r"Test unit written to (\S+)", text)
        if len(new) == 1 and "-timeout-" in new[0] and stood_still < 5 and not hangs(target, new[0]):
            os.remove(new[0])
            stood_still += 1
            if used < seconds:
                continue
            status, new = 0, []
        found += new
        break
    good = status == 0 and executions and not found
    result = "clean" if good else f"FOUND {' '.join(found) or f'exit status {status}'}, see {BUILD}/{target}.log"
    print(f"{target:<18} {executions:>10} executions in {used:.0f} s of processor time, {covered:>5} places reached: {result}", flush=True)
    return good


def main():
    arguments = sys.argv[1:]
    seconds = float(arguments.pop(0)) if arguments and re.fullmatch(r"[0-9.]+", arguments[0]) else 600
    targets = arguments or TARGETS
    if not shutil.which("clang++-19"):
        print("skipped: clang-19 is not installed (./dev setup)")
        return 77
    for target in targets:
        if target not in TARGETS:
            sys.exit(f"fuzz: no target {target}; there are {' '.join(TARGETS)}")
    build(targets)
    make_seeds()
    return 0 if all([run(target, seconds) for target in targets]) else 1


if __name__ == "__main__":
    sys.exit(main())
