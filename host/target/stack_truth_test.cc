// Whole stacks of real programs, held against gdb's: same threads, same pcs in the same order (gdb's inline and tail-call
// frames left out), and every frame reliable. Programs are built here, or are Debian's.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <sstream>

#include "core/unwind/arena.h"
#include "core/walk/reason.h"
#include "host/target/agent_view.h"
#include "host/target/stack_target.h"

namespace sonde::host {
namespace {

namespace fs = std::filesystem;
using Stacks = std::map<pid_t, std::vector<uint64_t>>;

const fs::path& folder() {
  static const fs::path path = [] {
    fs::path p = fs::path(SONDE_BINARY_DIR) / "test-programs" / "stacks";
    fs::create_directories(p);
    return p;
  }();
  return path;
}

std::string build(const std::string& name, const std::string& source, const std::string& flags) {
  fs::path file = folder() / name, text = folder() / (name + (flags.find("++") != flags.npos ? ".cc" : ".c"));
  std::ofstream(text) << source;
  std::string compiler = flags.find("++") != flags.npos ? "g++ " : "gcc ";
  std::string command = compiler + "-pthread -o " + file.string() + " " + text.string() + " " + flags;
  REQUIRE(std::system(command.c_str()) == 0);
  return file;
}

// Gone at the end of the test. Started with its standard input open and silent, standard output into a pipe.
struct Process {
  pid_t pid;
  int in[2], out[2];
  explicit Process(std::vector<std::string> arguments) {
    REQUIRE(pipe(in) == 0);
    REQUIRE(pipe(out) == 0);
    std::vector<char*> argv;
    for (auto& a : arguments) argv.push_back(a.data());
    argv.push_back(nullptr);
    pid = fork();
    if (pid == 0) {
      alarm(60);
      dup2(in[0], 0), dup2(out[1], 1);
      close(in[1]), close(out[0]);
      rlimit unlimited{RLIM_INFINITY, RLIM_INFINITY};
      setrlimit(RLIMIT_CORE, &unlimited);
      if (chdir(folder().c_str()) == 0) execvp(argv[0], argv.data());
      _exit(127);
    }
    close(in[0]), close(out[1]);
  }
  // Until it has written a byte, and sleeps.
  void wait_ready() const {
    char c;
    REQUIRE(::read(out[0], &c, 1) == 1);
    wait_asleep();
  }
  void wait_asleep() const {
    for (int i = 0, asleep = 0; i < 5000 && asleep < 20; i++, usleep(1000)) {
      bool all = true;
      for (auto& task : fs::directory_iterator("/proc/" + std::to_string(pid) + "/task")) {
        std::ifstream stat(task.path() / "stat");
        std::string text((std::istreambuf_iterator<char>(stat)), {});
        all &= text.size() > 2 && text[text.rfind(')') + 2] == 'S';
      }
      asleep = all ? asleep + 1 : 0;
    }
  }
  ~Process() {
    if (pid > 0) kill(pid, SIGKILL), waitpid(pid, nullptr, 0);
    close(in[1]), close(out[0]);
  }
};

bool have_gdb() {
  static const bool have = std::system("gdb -batch -nx -ex 'python print(1)' >/dev/null 2>&1") == 0;
  if (!have) MESSAGE("SKIPPED: gdb with Python is not installed");
  return have;
}

// What gdb says, by thread.
Stacks stacks_by_gdb(const std::string& target) {
  fs::path script = folder() / ("gdb." + std::to_string(getpid()) + ".py");
  std::ofstream(script) << R"(
import gdb
gdb.execute("set backtrace past-main on")
gdb.execute("set backtrace limit unlimited")
for thread in gdb.selected_inferior().threads():
    thread.switch()
    frame, pcs = gdb.newest_frame(), []
    while frame:
        if frame.type() not in (gdb.INLINE_FRAME, gdb.TAILCALL_FRAME):
            pcs.append("%x" % frame.pc())
        frame = frame.older()
    print("STACK", thread.ptid[1] or thread.ptid[0], *pcs)
)";
  std::string command =
      "gdb -batch -nx -ex 'set debuginfod enabled off' " + target + " -x " + script.string() + " 2>/dev/null";
  Stacks stacks;
  FILE* pipe = popen(command.c_str(), "r");
  REQUIRE(pipe != nullptr);
  std::string text;
  char buffer[4096];
  while (size_t n = fread(buffer, 1, sizeof buffer, pipe)) text.append(buffer, n);
  pclose(pipe);
  fs::remove(script);
  std::istringstream lines(text);
  for (std::string line, word; std::getline(lines, line);) {
    if (!line.starts_with("STACK ")) continue;
    std::istringstream words(line.substr(6));
    pid_t tid;
    words >> tid;
    while (words >> word) stacks[tid].push_back(std::stoull(word, nullptr, 16));
  }
  return stacks;
}

// gdb shows an inline function's frame instead of the function it is in when that is the innermost: same pc, so nothing is
// lost by leaving inline frames out, as the function's own frame follows with the same pc.
void compare(StackTarget& target, const Stacks& truth) {
  CHECK(target.threads().size() == truth.size());
  for (const StoppedThread& thread : target.threads()) {
    ThreadStack stack = target.walk(thread, {.max_frames = 100000, .reliable_only = true});
    std::vector<uint64_t> pcs;
    for (const Frame& frame : stack.frames) pcs.push_back(frame.pc.value);
    INFO("thread ", thread.tid, " ends with ", std::string(sonde::describe(stack.result.reason)), " after ", pcs.size(),
         " frames");
    REQUIRE(truth.contains(thread.tid));
    const auto& expected = truth.at(thread.tid);
    CHECK(pcs.size() == expected.size());
    bool equal = pcs == expected;
    CHECK(equal);
    CHECK(stack.result.whole());
    for (size_t i = 0; !equal && i < std::max(pcs.size(), expected.size()); i++)
      if (i >= pcs.size() || i >= expected.size() || pcs[i] != expected[i]) {
        MESSAGE("first difference at #", i, ": ", i < pcs.size() ? pcs[i] : 0,
                ", gdb: ", i < expected.size() ? expected[i] : 0);
        break;
      }
  }
}

void compare_process(pid_t pid, size_t least_frames) {
  auto target = StackTarget::of_process(pid);
  REQUIRE(target);
  for (auto& problem : target->problems()) MESSAGE(problem);
  Stacks truth = stacks_by_gdb("-p " + std::to_string(pid));
  size_t longest = 0;
  for (auto& [tid, pcs] : truth) longest = std::max(longest, pcs.size());
  REQUIRE(longest >= least_frames);
  compare(*target, truth);
}

void compare_core(const std::string& core, const std::string& program, size_t least_frames) {
  auto target = StackTarget::of_core(core, "");
  REQUIRE(target);
  for (auto& problem : target->problems()) MESSAGE(problem);
  Stacks truth = stacks_by_gdb(program + " " + core);
  size_t longest = 0;
  for (auto& [tid, pcs] : truth) longest = std::max(longest, pcs.size());
  REQUIRE(longest >= least_frames);
  compare(*target, truth);
}

void skip(const std::string& why) { MESSAGE("SKIPPED: ", why); }

constexpr const char* kThreads = R"(
#include <pthread.h>
#include <stdio.h>
#include <unistd.h>
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
__attribute__((noinline)) int work(int n) {
  volatile char room[100 + 8 * (n & 7)];
  room[0] = n;
  if (n > 0) return work(n - 1) + room[0];
  pthread_mutex_lock(&lock);
  return pthread_mutex_unlock(&lock);
}
static void *start(void *depth) { return (void *)(long)work((int)(long)depth); }
int main(void) {
  pthread_t threads[6];
  pthread_mutex_lock(&lock);
  for (long i = 0; i < 6; i++) pthread_create(&threads[i], 0, start, (void *)(i * 50));
  write(1, "r", 1);
  for (int i = 0; i < 6; i++) pthread_join(threads[i], 0);
})";

// A fault in a leaf on the thread's stack; its handler runs on another stack, raises a second signal there, and waits.
constexpr const char* kSignals = R"(
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>
__attribute__((noinline)) int fault(int *p) { return *p + 1; }
__attribute__((noinline)) int outer(int n, int *p) { volatile int x[64]; x[0] = n; return (n ? outer(n - 1, p) : fault(p)) + x[0]; }
static void second(int s) { write(1, "r", 1); for (;;) pause(); }
static void first(int s) { raise(SIGUSR1); }
int main(void) {
  stack_t stack = {.ss_sp = malloc(65536), .ss_size = 65536};
  sigaltstack(&stack, 0);
  struct sigaction action = {.sa_handler = first, .sa_flags = SA_ONSTACK};
  sigaction(SIGSEGV, &action, 0);
  action.sa_handler = second;
  sigaction(SIGUSR1, &action, 0);
  return outer(5, 0);
})";

constexpr const char* kAbort = R"(
#include <cstdio>
#include <cstdlib>
#include <unistd.h>
#include <pthread.h>
#include <stdexcept>
struct Shape { virtual ~Shape() {} virtual int area(int n) = 0; };
struct Square : Shape { int area(int n) override { volatile int keep = n; if (n == 0) throw std::runtime_error("no area"); return area(n - 1) + keep; } };
static void *idle(void *) { for (;;) pause(); }
int main(int argc, char **argv) {
  pthread_t t; pthread_create(&t, 0, idle, 0);
  usleep(20000);
  Shape *s = new Square;
  return s->area(argc + 5);
})";

}  // namespace

TEST_CASE("stacks: python in deep recursion, as gdb sees it") {
  if (!have_gdb()) return;
  if (!fs::exists("/usr/bin/python3")) return skip("/usr/bin/python3 is not installed");
  Process python({"/usr/bin/python3", "-c",
                  "import os, time, sys\nsys.setrecursionlimit(10000)\n"
                  "def f(n):\n  if n: return list(map(f, [n - 1]))\n  os.write(1, b'r'); time.sleep(60)\nf(80)"});
  python.wait_ready();
  compare_process(python.pid, 250);
}

TEST_CASE("stacks: sqlite3 waiting for input, as gdb sees it") {
  if (!have_gdb()) return;
  if (!fs::exists("/usr/bin/sqlite3")) return skip("/usr/bin/sqlite3 is not installed");
  Process sqlite({"/usr/bin/sqlite3", "-batch", ":memory:"});
  usleep(50000);
  sqlite.wait_asleep();
  compare_process(sqlite.pid, 6);
}

TEST_CASE("stacks: threads that wait for a lock, as gdb sees them") {
  if (!have_gdb()) return;
  for (const char* flags : {"-O2", "-O0 -fno-omit-frame-pointer", "-O2 -static"}) {
    CAPTURE(flags);
    Process threads({build("threads", kThreads, flags)});
    threads.wait_ready();
    compare_process(threads.pid, 250);
  }
}

TEST_CASE("stacks: handlers on an alternate stack over a fault, as gdb sees them") {
  if (!have_gdb()) return;
  Process signals({build("signals", kSignals, "-O2 -fno-optimize-sibling-calls")});
  signals.wait_ready();
  compare_process(signals.pid, 14);
}

// Fibers: the innermost function runs on a stack from makecontext, entered from another such.
constexpr const char* kFibers = R"(
#include <stdlib.h>
#include <ucontext.h>
#include <unistd.h>
static ucontext_t home, first, second;
__attribute__((noinline)) void deep(int n) { volatile int k = n; if (n) deep(n - 1); else { write(1, "r", 1); for (;;) pause(); } k++; }
static void run_second(void) { deep(9); }
static void run_first(void) { swapcontext(&first, &second); }
static void make(ucontext_t *c, void (*f)(void)) { getcontext(c); c->uc_stack.ss_sp = malloc(65536); c->uc_stack.ss_size = 65536; c->uc_link = &home; makecontext(c, f, 0); }
int main(void) { make(&first, run_first); make(&second, run_second); swapcontext(&home, &first); return 0; })";

TEST_CASE("stacks: a fiber's stack is gdb's up to where its context began, and ends there") {
  if (!have_gdb()) return;
  Process fibers({build("fibers", kFibers, "-O2")});
  fibers.wait_ready();
  auto target = StackTarget::of_process(fibers.pid);
  REQUIRE(target);
  auto truth = stacks_by_gdb("-p " + std::to_string(fibers.pid))[fibers.pid];
  ThreadStack stack = target->walk(target->threads()[0], {});
  CHECK(stack.result.whole());
  CHECK(stack.frames.size() == 12);  // pause, 10 times deep, the context's start; gdb reads on into the context's link
  CHECK(truth.size() >= stack.frames.size());
  for (size_t i = 0; i < stack.frames.size() && i < truth.size(); i++) CHECK(stack.frames[i].pc.value == truth[i]);
}

// Function and offset of each frame, by file.
using Chain = std::vector<std::pair<std::string, uint64_t>>;
std::multiset<Chain> chains_of(pid_t pid, bool* whole, unsigned* recovered) {
  auto target = StackTarget::of_process(pid);
  REQUIRE(target);
  std::multiset<Chain> chains;
  *whole = true, *recovered = 0;
  for (const StoppedThread& thread : target->threads()) {
    ThreadStack stack = target->walk(thread, {.max_frames = 100000, .reliable_only = true});
    *whole &= stack.result.whole();
    Chain chain;
    for (const Frame& frame : stack.frames) {
      const LoadedImage* image = target->image_at(frame.pc);
      chain.emplace_back(image ? image->image->path() : "", image ? image->to_image(frame.pc).value : frame.pc.value);
      *recovered += (frame.recovered & kRecoveredReturn) != 0;
    }
    chains.insert(chain);
  }
  return chains;
}

pid_t child_of(pid_t parent) {
  std::ifstream in("/proc/" + std::to_string(parent) + "/task/" + std::to_string(parent) + "/children");
  pid_t child = 0;
  in >> child;
  return child;
}

TEST_CASE("stacks: of a program that is being recorded, as of the same program alone (S1, S5)") {
  fs::path sonde = fs::path(SONDE_BINARY_DIR) / "sonde";
  if (!fs::exists(sonde)) return skip("sonde itself is not built");
  for (const char* source : {kThreads, kSignals}) {
    std::string program = build("recorded", source, "-O2 -fno-optimize-sibling-calls");
    Process alone({program});
    alone.wait_ready();
    bool whole;
    unsigned recovered;
    auto truth = chains_of(alone.pid, &whole, &recovered);
    REQUIRE(whole);
    REQUIRE(recovered == 0);
    for (bool with_stacks : {false, true}) {
      CAPTURE(with_stacks);
      std::vector<std::string> command = {sonde, "record", "-o", folder() / "recorded.trace", "--", program};
      if (with_stacks) command.insert(command.begin() + 2, "-s");
      Process recorder(command);
      char c;
      REQUIRE(::read(recorder.out[0], &c, 1) == 1);
      pid_t pid = child_of(recorder.pid);
      REQUIRE(pid != 0);
      for (int i = 0; i < 1000 && chains_of(pid, &whole, &recovered) != truth; i++) usleep(5000);
      CHECK(chains_of(pid, &whole, &recovered) == truth);
      CHECK(whole);
      CHECK(recovered >= (source == kThreads ? 250u : 7u));
      kill(pid, SIGKILL);
    }
  }
}

TEST_CASE("tables: read-only where walks read them, as are ranges that a program declares (S22)") {
  auto mapping_of = [](pid_t pid, uint64_t at) {
    auto maps = read_maps(pid);
    REQUIRE(maps);
    auto found = std::ranges::find_if(*maps, [&](const Mapping& m) { return m.range.contains(Addr(at)); });
    REQUIRE(found != maps->end());
    return *found;
  };
  // This program's own, by special.h: where the linker put them, without a relocation.
  std::vector<std::string> problems;
  auto own = loaded_images(getpid(), &problems);
  REQUIRE(own);
  bool declared = false;
  for (const LoadedImage& loaded : *own) {
    const Section* section = loaded.image->section("sonde_special");
    if (!section) continue;
    declared = true;
    Mapping mapping = mapping_of(getpid(), loaded.to_target(section->addr).value);
    CHECK(mapping.readable);
    CHECK(!mapping.writable);
  }
  CHECK(declared);
  fs::path sonde = fs::path(SONDE_BINARY_DIR) / "sonde";
  if (!fs::exists(sonde)) return skip("sonde itself is not built");
  std::string program = build("read_only", kThreads, "-O2");
  Process recorder({sonde, "record", "-s", "-o", folder() / "read_only.trace", "--", program});
  recorder.wait_ready();
  pid_t pid = child_of(recorder.pid);
  REQUIRE(pid != 0);
  auto images = loaded_images(pid, &problems);
  auto maps = read_maps(pid);
  REQUIRE(images);
  REQUIRE(maps);
  ProcessMemory memory(pid, *maps);
  std::optional<AgentView> agent;
  for (const LoadedImage& loaded : *images)
    if (!agent) agent = view_agent(loaded);
  REQUIRE(agent);
  Addr arena = published_arena(*agent, memory);
  TableArena header;
  REQUIRE(arena);
  REQUIRE(memory.read_as(arena, &header));
  CHECK(header.image_count >= 3);
  CHECK(header.special_count > 10);
  Mapping mapping = mapping_of(pid, arena.value);
  CHECK(mapping.readable);
  CHECK(!mapping.writable);
  CHECK(!mapping.executable);
  CHECK(arena.value + header.size <= mapping.range.end.value);
  kill(pid, SIGKILL);
}

TEST_CASE("stacks: a core file by gcore, as gdb sees it") {
  if (!have_gdb()) return;
  for (bool signal : {false, true}) {
    std::string program = signal ? build("gcore_signals", kSignals, "-O2") : build("gcore_threads", kThreads, "-O2");
    Process process({program});
    process.wait_ready();
    std::string prefix = (folder() / "gcore").string(), core = prefix + "." + std::to_string(process.pid);
    REQUIRE(std::system(("gcore -o " + prefix + " " + std::to_string(process.pid) + " >/dev/null 2>&1").c_str()) == 0);
    compare_core(core, program, 10);
    fs::remove(core);
  }
}

TEST_CASE("stacks: a core file by the kernel, as gdb sees it") {
  if (!have_gdb()) return;
  std::ifstream in("/proc/sys/kernel/core_pattern");
  std::string pattern;
  std::getline(in, pattern);
  if (pattern.empty() || pattern[0] == '|' || pattern.find('/') != pattern.npos)
    return skip("/proc/sys/kernel/core_pattern sends core files elsewhere: " + pattern);
  std::string program = build("abort", kAbort, "-O2 -xc++ -lstdc++");
  for (auto& entry : fs::directory_iterator(folder()))
    if (entry.path().filename().string().starts_with("core")) fs::remove(entry.path());
  Process process({program});
  int status;
  REQUIRE(waitpid(process.pid, &status, 0) == process.pid);
  process.pid = 0;
  REQUIRE(WIFSIGNALED(status));
  REQUIRE(WCOREDUMP(status));
  std::string core;
  for (auto& entry : fs::directory_iterator(folder()))
    if (entry.path().filename().string().starts_with("core")) core = entry.path();
  REQUIRE(!core.empty());
  compare_core(core, program, 12);

  // Cut off anywhere: an error or a shorter answer, never a crash.
  auto whole = fs::file_size(core);
  for (int i = 20; i >= 0; i--) {
    fs::resize_file(core, whole * static_cast<uintmax_t>(i) / 21);
    CAPTURE(i);
    auto target = StackTarget::of_core(core, "");
    if (!target) continue;
    for (const StoppedThread& thread : target->threads()) CHECK(target->walk(thread, {}).frames.size() > 0);
  }
  fs::remove(core);
}

TEST_CASE("stacks: what is no core file is refused in words") {
  std::string program = build("not_a_core", "int main() { return 0; }", "");
  auto target = StackTarget::of_core(program, "");
  REQUIRE(!target);
  CHECK(target.error().message.find("not a core file") != std::string::npos);
  CHECK(StackTarget::of_core("/dev/null", "").error().message == "/dev/null: not a file");
  CHECK(!StackTarget::of_core("/nonexistent", ""));
}

}  // namespace sonde::host
