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

#include "core/walk/reason.h"
#include "core/walk/walker.h"
#include "host/tables/arena.h"
#include "host/target/memory.h"
#include "host/target/threads.h"

namespace sonde::host {
namespace {

namespace fs = std::filesystem;

// Memory of a tracee that changes with each step: what can be written is read anew, in one piece around sp; the rest once.
class SteppedMemory : public TargetMemory {
 public:
  SteppedMemory(pid_t pid, std::vector<Mapping> mappings) : constant_(pid, std::move(mappings)) {}
  void at(Addr sp) {
    window_begin_ = sp - 256;
    window_.resize(8192);
    window_.resize(constant_.read_now(window_begin_, window_));
  }
  bool read(Addr at, std::span<uint8_t> into) override {
    uint64_t offset = static_cast<uint64_t>(at - window_begin_);
    if (offset < window_.size() && window_.size() - offset >= into.size())
      return std::memcpy(into.data(), window_.data() + offset, into.size()), true;
    const Mapping* mapping = constant_.mapping(at);
    if (mapping && !mapping->writable) return constant_.read(at, into);
    return constant_.read_now(at, into) == into.size();
  }
  bool stack_at(Addr sp, AddrRange* stack) override { return constant_.stack_at(sp, stack); }

 private:
  ProcessMemory constant_;
  Addr window_begin_;
  std::vector<uint8_t> window_;
};

struct Counts {
  uint64_t steps = 0, whole = 0, refused = 0, wrong = 0, signals = 0;
  size_t deepest = 0;
  std::map<std::string, uint64_t> reasons;
  std::map<std::string, uint64_t> refused_in, wrong_in;  // by function
  std::string first_wrong;
};

class Stepper {
 public:
  explicit Stepper(std::vector<std::string> arguments) : program_(fs::canonical(arguments[0])) {
    std::vector<char*> argv;
    for (auto& a : arguments) argv.push_back(a.data());
    argv.push_back(nullptr);
    pid_ = fork();
    if (pid_ == 0) {
      alarm(600);
      int null = open("/dev/null", O_RDWR);
      dup2(null, 0), dup2(null, 1);
      ptrace(PTRACE_TRACEME, 0, nullptr, nullptr);
      execv(argv[0], argv.data());
      _exit(127);
    }
    waitpid(pid_, &status_, 0);
    REQUIRE(WIFSTOPPED(status_));
    get_regs();
  }
  ~Stepper() {
    if (!WIFEXITED(status_) && !WIFSIGNALED(status_)) kill(pid_, SIGKILL), waitpid(pid_, nullptr, 0);
  }

  // To the first instruction of main by a breakpoint. The truth begins with main's return address; what lies above it is
  // taken from the walk there, and stays as it is (run_to_entry leaves nothing to be taken).
  void run_to_main() {
    auto image = Image::open(program_);
    REQUIRE(image);
    auto main = (*image)->symbol("main");
    REQUIRE(main);
    uint64_t entry = in_target(*main);
    long saved = ptrace(PTRACE_PEEKTEXT, pid_, entry, nullptr);
    ptrace(PTRACE_POKETEXT, pid_, entry, (saved & ~0xffL) | 0xcc);
    ptrace(PTRACE_CONT, pid_, nullptr, nullptr);
    waitpid(pid_, &status_, 0);
    ptrace(PTRACE_POKETEXT, pid_, entry, saved);
    get_regs();
    regs_.rip = entry;
    ptrace(PTRACE_SETREGS, pid_, nullptr, &regs_);
    truth_.push_back({regs_.rsp, word(regs_.rsp), false});
    describe();
    auto stack = walk();
    REQUIRE(stack.size() > 2);
    above_.assign(stack.begin() + 2, stack.end());
  }

  // To the program's own first instruction, behind the dynamic linker; nobody called it.
  void run_to_entry() {
    auto image = Image::open(program_);
    REQUIRE(image);
    uint64_t entry = in_target((*image)->entry());
    while (regs_.rip != entry) REQUIRE(step());
    truth_.clear();
    describe();
  }

  // From here until the caller of main is reached, the program has ended, or so many steps; every instruction is compared.
  Counts compare_all(uint64_t limit) {
    size_t depth = truth_.size();
    do compare();
    while (step() && truth_.size() >= depth && counts_.steps < limit);
    if (!WIFEXITED(status_)) {
      ptrace(PTRACE_CONT, pid_, nullptr, nullptr);
      waitpid(pid_, &status_, 0);
    }
    REQUIRE(WIFEXITED(status_));
    CHECK(WEXITSTATUS(status_) == 0);
    return counts_;
  }

 private:
  struct Call {
    uint64_t slot, pc;
    bool interrupted;  // pc is where a signal hit; slot is the kernel's frame
  };

  uint64_t word(uint64_t at) const { return static_cast<uint64_t>(ptrace(PTRACE_PEEKDATA, pid_, at, nullptr)); }
  uint64_t in_target(ImageAddr address) const {
    auto images = loaded_images(pid_, nullptr);
    REQUIRE(images);
    for (auto& loaded : *images)
      if (loaded.image->path() == program_) return loaded.to_target(address).value;
    FAIL("the program is not among its images");
    return 0;
  }
  void get_regs() { ptrace(PTRACE_GETREGS, pid_, nullptr, &regs_); }

  static bool is_call(uint64_t code) {
    auto byte = [&](unsigned i) { return static_cast<uint8_t>(code >> 8 * i); };
    unsigned i = 0;
    while (byte(i) == 0xf2 || byte(i) == 0x3e || byte(i) == 0x67 || byte(i) == 0x66 || (byte(i) & 0xf0) == 0x40) i++;
    return byte(i) == 0xe8 || (byte(i) == 0xff && (byte(i + 1) >> 3 & 7) == 2);
  }

  // False when the program has ended.
  bool step() {
    uint64_t sp = regs_.rsp, code = word(regs_.rip), pc = regs_.rip;
    bool maps_code = (code & 0xffff) == 0x050f && regs_.rax == 9 && (regs_.rdx & 4);
    bool sigreturn = (code & 0xffff) == 0x050f && regs_.rax == 15;
    ptrace(PTRACE_SINGLESTEP, pid_, nullptr, nullptr);
    waitpid(pid_, &status_, 0);
    if (!WIFSTOPPED(status_)) return false;
    get_regs();
    if (sigreturn) {
      REQUIRE(truth_.back().interrupted);
      truth_.pop_back();
    } else if (is_call(code) && regs_.rsp == sp - 8) {
      truth_.push_back({regs_.rsp, word(regs_.rsp), false});
    } else {
      // A return, or code that leaves frames otherwise. Frames on a stack that a signal came in on stay.
      while (!truth_.empty() && !truth_.back().interrupted && regs_.rip != pc && truth_.back().slot < regs_.rsp &&
             regs_.rsp - truth_.back().slot < (1 << 20))
        truth_.pop_back();
    }
    while (WSTOPSIG(status_) != SIGTRAP) deliver(WSTOPSIG(status_));
    if (maps_code && memory_) describe();
    return true;
  }

  void deliver(int signal) {
    uint64_t pc = regs_.rip;
    ptrace(PTRACE_SINGLESTEP, pid_, nullptr, static_cast<long>(signal));
    waitpid(pid_, &status_, 0);
    REQUIRE(WIFSTOPPED(status_));
    get_regs();
    truth_.push_back({regs_.rsp + 8, pc, true});
    truth_.push_back({regs_.rsp, word(regs_.rsp), false});
    counts_.signals++;
  }

  void describe() {
    auto images = loaded_images(pid_, nullptr);
    REQUIRE(images);
    images_ = *images;
    ArenaInput input;
    for (auto& loaded : images_) {
      auto table = load_table(*loaded.image);
      REQUIRE(table);
      Table view = (*table)->table();
      auto specials = find_specials(loaded, &view);
      input.specials.insert(input.specials.end(), specials.begin(), specials.end());
      input.images.push_back({loaded, *table});
    }
    arena_ = *build_arena(input);
    memory_ = std::make_unique<SteppedMemory>(pid_, *read_maps(pid_));
  }

  std::vector<Frame> walk(WalkResult* result = nullptr) {
    memory_->at(Addr(regs_.rsp));
    WalkStart<X86_64> start{.regs = regset_of(regs_)};
    start.reliable_only = true;
    AnyMemory any = memory_->any_memory();
    std::vector<Frame> frames(1000);
    WalkResult got =
        sonde::walk(reinterpret_cast<const TableArena*>(arena_.data()), &cache_, any, start, std::span<Frame>(frames));
    frames.resize(got.frames);
    if (result) *result = got;
    return frames;
  }

  void compare() {
    WalkResult result;
    std::vector<Frame> frames = walk(&result);
    std::vector<uint64_t> truth = {regs_.rip};
    // A slot's own content counts: the runtime that throws an exception rewrites return addresses of its own frames.
    for (size_t i = truth_.size(); i-- > 0;) {
      uint64_t now = truth_[i].pc;
      if (!truth_[i].interrupted) memory_->read_as(Addr(truth_[i].slot), &now);
      truth.push_back(now);
    }
    for (const Frame& frame : above_) truth.push_back(frame.pc.value);
    counts_.steps++;
    counts_.deepest = std::max(counts_.deepest, truth.size());
    bool wrong = result.whole() && frames.size() != truth.size();
    for (size_t i = 0; i < frames.size(); i++)
      if (is_reliable(frames[i].reason)) wrong |= i >= truth.size() || frames[i].pc.value != truth[i];
    if (wrong) counts_.wrong_in[name(frames.front().pc)]++;
    if (wrong && counts_.wrong++ == 0) counts_.first_wrong = show(frames, truth);
    if (result.whole()) return void(counts_.whole++);
    counts_.refused++;
    counts_.reasons[sonde::describe(result.reason)]++;
    counts_.refused_in[name(frames.back().pc, false)]++;
  }

  std::string name(Addr pc, bool offset = true) const {
    for (auto& loaded : images_)
      if (loaded.range.contains(pc)) {
        auto hit = loaded.image->find(loaded.to_image(pc));
        return hit ? display_name(*loaded.image, *hit->function) + (offset ? "+" + std::to_string(hit->offset) : "")
                   : loaded.image->path();
      }
    return "?";
  }
  std::string show(const std::vector<Frame>& frames, const std::vector<uint64_t>& truth) const {
    std::string text;
    for (size_t i = 0; i < std::max(frames.size(), truth.size()); i++) {
      text += "\n  walk " + (i < frames.size() ? name(frames[i].pc) + " " + sonde::describe(frames[i].reason) : "-");
      text += "   truth " + (i < truth.size() ? name(Addr(truth[i])) : "-");
    }
    return text;
  }

  std::string program_;
  pid_t pid_;
  int status_ = 0;
  user_regs_struct regs_;
  std::vector<Call> truth_;
  std::vector<Frame> above_;
  std::vector<LoadedImage> images_;
  std::vector<uint8_t> arena_;
  std::unique_ptr<SteppedMemory> memory_;
  RowCache cache_;
  Counts counts_;
};

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
    CHECK(std::ranges::find(names, where) != names.end());
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
    check_refused(counts, {"_init", "_fini", "__do_global_dtors_aux", "register_tm_clones", "deregister_tm_clones",
                           "frame_dummy"});
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
