// The truth at every instruction. A program is single-stepped and a call stack kept aside, from what call, ret, signals and
// signal returns do to rsp alone: no unwind table has a part in it. At each instruction the reliable walk is compared with
// it. Silently wrong (a frame called reliable that differs, or a whole stack that is not the truth) must be zero.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/ptrace.h>
#include <sys/uio.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <sstream>

#include "host/target/stepper_test.h"

namespace sonde::host {
namespace {

namespace fs = std::filesystem;

constexpr const char* kProgram = R"(
#include <alloca.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#define NOINLINE __attribute__((noinline))
static volatile int sink;
NOINLINE int leaf(int a) { sink = a; return a * 3; }
NOINLINE int with_alloca(int n) { char *p = alloca(n * 16 + 1); memset(p, n, n * 16 + 1); sink = p[n]; return leaf(p[0]); }
NOINLINE int aligned(int n) { int x[8] __attribute__((aligned(64))); for (int i = 0; i < 8; i++) x[i] = leaf(n + i); return x[n & 7]; }
NOINLINE int summed(int n, ...) { va_list a; va_start(a, n); int s = 0; while (n--) s += va_arg(a, int); va_end(a); return s; }
NOINLINE double real(double x, int n) { return n ? real(x * 1.5, n - 1) + leaf(n) : x; }
NOINLINE int choose(int n) { switch (n) { case 0: return leaf(1); case 1: return aligned(2); case 2: return with_alloca(3); case 3: return summed(4, 1, 2, 3, 4); case 4: return leaf(9) + 1; case 5: return (int)real(1.0, 3); default: return -1; } }
NOINLINE int tail(int n) { return n > 3 ? choose(2) : choose(n); }
NOINLINE int many(int a, int b, int c, int d, int e, int f, int g, int h) { return leaf(a + b + c + d) + leaf(e + f + g + h); }
NOINLINE int recurse(int n) { volatile int keep = n; return n ? recurse(n - 1) + keep : leaf(2); }
static int order(const void *a, const void *b) { return *(const int *)a - *(const int *)b; }
typedef int (*function)(int);
static function functions[] = {leaf, tail, aligned, recurse, with_alloca};
static void handler(int s) { sink += leaf(s); }
NOINLINE void __attribute__((noreturn)) last(int code) { exit(code); }
int main(void) {
  int sorted[5] = {4, 1, 3, 2, 0};
  char text[80];
  static char alternate[32768];
  stack_t stack = {.ss_sp = alternate, .ss_size = sizeof alternate};
  struct sigaction action = {.sa_handler = handler};
  sigaction(SIGUSR1, &action, 0);
  sigaltstack(&stack, 0);
  action.sa_flags = SA_ONSTACK;
  sigaction(SIGUSR2, &action, 0);
  for (int i = 0; i < 7; i++) sink += choose(i);
  for (int i = 0; i < 5; i++) sink += functions[i](i);
  sink += many(1, 2, 3, 4, 5, 6, 7, 8);
  qsort(sorted, 5, sizeof sorted[0], order);
  raise(SIGUSR1);
  raise(SIGUSR2);
  snprintf(text, sizeof text, "%d %s %5.2f", sorted[2], "text", 1.25);
  char *copy = strdup(text);
  sink += (int)strlen(copy) + atoi(copy);
  free(copy);
  if (sink == 12345678) last(3);
  return 0;
})";

std::string build(const std::string& name, const char* source, const std::string& command) {
  fs::path folder = fs::path(SONDE_BINARY_DIR) / "test-programs" / "step";
  fs::create_directories(folder);
  fs::path file = folder / name, text = folder / (name + (command.starts_with("g++") ? ".cc" : ".c"));
  std::ofstream(text) << source;
  REQUIRE(std::system((command + " -o " + file.string() + " " + text.string()).c_str()) == 0);
  return file;
}

Counts check(std::vector<std::string> program, bool from_entry, uint64_t least_steps, uint64_t limit = ~0ull) {
  std::string title = fs::path(program[0]).filename();
  Stepper stepper(std::move(program));
  if (from_entry) stepper.run_to_entry();
  else stepper.run_to_main();
  Counts counts = stepper.compare_all(limit);
  std::string refused;
  for (auto& [where, n] : counts.refused_in) refused += " " + where + ":" + std::to_string(n);
  for (auto& [where, n] : counts.wrong_in) refused += " WRONG " + where + ":" + std::to_string(n);
  for (auto& [why, n] : counts.reasons) refused += " " + why + ":" + std::to_string(n);
  MESSAGE(title, ": ", counts.steps, " steps, ", counts.signals, " signals, ", counts.whole, " whole, ", counts.refused,
          " refused, ", counts.wrong, " wrong;", refused);
  INFO("first wrong:", counts.first_wrong);
  CHECK(counts.wrong == 0);
  CHECK(counts.steps >= least_steps);
  CHECK(counts.whole + counts.refused == counts.steps);
  return counts;
}

// Functions in `names` may be refused, no others.
void check_refused(const Counts& counts, std::initializer_list<std::string> names) {
  for (auto& [where, n] : counts.refused_in) {
    INFO(where, " refused ", n, " times");
    // Without libc's debug symbols its functions have no names.
    CHECK((std::ranges::find(names, where) != names.end() || where.starts_with("libc.so.6+0x")));
  }
}

}  // namespace

TEST_CASE("step: at every instruction of compiled code the walk is the truth") {
  struct Build {
    const char* name;
    const char* command;
  };
  const Build builds[] = {{"o2", "gcc -O2 -fcf-protection=full -Wl,-z,lazy"},
                          {"o0", "gcc -O0"},
                          {"os", "gcc -Os"},
                          {"frame_pointers", "gcc -O2 -fno-omit-frame-pointer -fstack-protector-all"},
                          {"realigned", "gcc -O2 -mstackrealign -fno-shrink-wrap"},
                          {"static", "gcc -O2 -static"},
                          {"clang", "clang -O2"}};
  for (const Build& b : builds) {
    if (std::string(b.command).starts_with("clang") && std::system("command -v clang >/dev/null") != 0) {
      MESSAGE("SKIPPED: clang is not installed");
      continue;
    }
    CAPTURE(b.name);
    Counts counts = check({build(b.name, kProgram, b.command)}, std::string(b.name) == "static", 4000);
    check_refused(counts, {});
    CHECK(counts.signals == 2);
  }
}

constexpr const char* kJumps = R"(
#include <setjmp.h>
static jmp_buf place;
static volatile int sink;
__attribute__((noinline)) void deep(int n) { volatile int k[4]; k[0] = n; if (n) deep(n - 1); else longjmp(place, 7); sink += k[0]; }
__attribute__((noinline)) int once(void) { if (!setjmp(place)) deep(4); return sink; }
int main(void) { for (int i = 0; i < 3; i++) sink += once(); return 0; })";

constexpr const char* kThrows = R"(
static volatile int sink;
struct Cleanup { int n; ~Cleanup() { sink += n; } };
__attribute__((noinline)) void deep(int n) { Cleanup c{n}; if (n) deep(n - 1); else throw 7; sink += n; }
int main() { try { deep(2); } catch (int) { sink++; } return 0; })";

TEST_CASE("step: while longjmp loads registers the walk is refused, never wrong") {
  Counts counts = check({build("jumps", kJumps, "gcc -O2")}, false, 1000);
  CHECK(counts.refused > 0);
  check_refused(counts, {"__longjmp"});
}

TEST_CASE("step: while an exception is on its way the walk is right or refused") {
  Counts counts = check({build("throws", kThrows, "g++ -O2 -static-libgcc")}, false, 20000);
  CHECK(counts.refused * 20 < counts.steps);
}

// For more programs than a test run has time for: SONDE_STEP="program arguments" SONDE_STEPS=limit host_tests -tc="step: by hand"
TEST_CASE("step: by hand") {
  const char* program = getenv("SONDE_STEP");
  if (!program) {
    MESSAGE("SKIPPED: SONDE_STEP names no program");
    return;
  }
  std::vector<std::string> words;
  std::istringstream in(program);
  for (std::string w; in >> w;) words.push_back(w);
  check(words, true, 1, getenv("SONDE_STEPS") ? strtoull(getenv("SONDE_STEPS"), nullptr, 10) : 200000);
}

}  // namespace sonde::host
