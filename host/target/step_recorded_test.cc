// S3, S10, S12: a program is recorded, every function of it hooked, and single-stepped through everything that the probes
// add: detours, the entry trampoline, the hit path, return trampolines and the code behind them, on the thread's stack and on
// a signal stack. At each instruction the walk equals the truth. The engine's hand-written code is seen whole.
#include <Zydis/Zydis.h>
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <map>
#include <set>

#include "core/probe/handlers.h"
#include "host/target/stepper_test.h"

namespace sonde::host {
namespace {

namespace fs = std::filesystem;

constexpr const char* kProgram = R"(
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <unistd.h>
#define NOINLINE __attribute__((noinline))
volatile int go;
static volatile int sink;
NOINLINE int leaf(int a) { sink = a; return a * 3; }
NOINLINE int tail(int n) { sink = n; return leaf(n + 1); }
NOINLINE int recurse(int n) { volatile int keep = n; return n ? recurse(n - 1) + keep : tail(2); }
NOINLINE double real(double x, int n) { return n ? real(x * 1.5, n - 1) + leaf(n) : x; }
// The patch displaces the call.
int calls_first(void);
__asm__(".globl calls_first; .type calls_first,@function; calls_first: .cfi_startproc; push %rbx; .cfi_def_cfa_offset 16;"
        ".cfi_offset %rbx,-16; call leaf; pop %rbx; .cfi_def_cfa_offset 8; ret; .cfi_endproc; .size calls_first,.-calls_first");
static int little;
static void handler(int s) { sink += little ? leaf(s) : recurse(1) + s; }
// From here on nothing is recorded, and returns that are hooked already go another way.
NOINLINE int forbids_ticks(void) { return prctl(PR_SET_TSC, PR_TSC_SIGSEGV); }
NOINLINE void work(void) {
  sink += calls_first();
  if (little) {
    raise(SIGUSR2);
    return;
  }
  sink += recurse(12) + (int)real(1.0, 1);  // deep enough for the thread's list of entries to run empty
  raise(SIGUSR1);
  raise(SIGUSR2);
  sink += forbids_ticks();
}
NOINLINE void done(void) { for (;;) sink++; }
int main(int argc, char **argv) {
  little = argc > 1;
  static char alternate[65536];
  stack_t stack = {.ss_sp = alternate, .ss_size = sizeof alternate};
  struct sigaction action = {.sa_handler = handler};
  sigaction(SIGUSR1, &action, 0);
  sigaltstack(&stack, 0);
  action.sa_flags = SA_ONSTACK;
  sigaction(SIGUSR2, &action, 0);
  alarm(300);
  if (write(1, "r", 1) != 1) return 1;
  while (!go) ;
  work();
  done();
})";

struct Recording {
  pid_t recorder, target = 0;
  Recording(const fs::path& program, bool stacks) {
    int out[2];
    REQUIRE(pipe(out) == 0);
    std::string sonde = fs::path(SONDE_BINARY_DIR) / "sonde", trace = program.string() + ".trace";
    recorder = fork();
    if (recorder == 0) {
      dup2(out[1], 1);
      close(out[0]);
      if (stacks)
        execl(sonde.c_str(), "sonde", "record", "-s", "-o", trace.c_str(), "--", program.c_str(), "little", nullptr);
      execl(sonde.c_str(), "sonde", "record", "-o", trace.c_str(), "--", program.c_str(), nullptr);
      _exit(127);
    }
    close(out[1]);
    char c;
    bool ready = ::read(out[0], &c, 1) == 1;
    close(out[0]);
    REQUIRE(ready);
    std::ifstream("/proc/" + std::to_string(recorder) + "/task/" + std::to_string(recorder) + "/children") >> target;
    REQUIRE(target != 0);
  }
  ~Recording() {
    if (target) kill(target, SIGKILL);
    waitpid(recorder, nullptr, 0);
  }
};

// Instructions of a function, one after the other from its start.
std::vector<uint64_t> instructions(AddrRange range, const std::vector<uint8_t>& bytes) {
  ZydisDecoder decoder;
  ZydisDecoderInit(&decoder, ZYDIS_MACHINE_MODE_LONG_64, ZYDIS_STACK_WIDTH_64);
  std::vector<uint64_t> starts;
  for (size_t at = 0; at < bytes.size();) {
    ZydisDecodedInstruction insn;
    if (!ZYAN_SUCCESS(ZydisDecoderDecodeInstruction(&decoder, nullptr, bytes.data() + at, bytes.size() - at, &insn)))
      break;
    if (insn.mnemonic != ZYDIS_MNEMONIC_NOP) starts.push_back(range.begin.value + at);
    at += insn.length;
  }
  return starts;
}

}  // namespace

TEST_CASE("step: at every instruction of detours, trampolines and the hit path the walk is the truth (S3, S10, S12)") {
  if (!fs::exists(fs::path(SONDE_BINARY_DIR) / "sonde")) {
    MESSAGE("SKIPPED: sonde itself is not built");
    return;
  }
  fs::path folder = fs::path(SONDE_BINARY_DIR) / "test-programs" / "step", program = folder / "recorded";
  fs::create_directories(folder);
  std::ofstream(folder / "recorded.c") << kProgram;
  REQUIRE(std::system(
              ("gcc -O2 -fcf-protection=full -o " + program.string() + " " + program.string() + ".c").c_str()) == 0);
  struct Seen {
    std::set<uint64_t> offsets;
    size_t all = 0;
  };
  std::map<std::string, Seen> seen;  // in the agent's code that is written by hand
  for (bool stacks : {false, true}) {
    CAPTURE(stacks);
    Recording recording(program, stacks);
    Stepper stepper(program, recording.target, "go");
    Counts counts = stepper.compare_to("done");
    std::string refused;
    for (auto& [where, n] : counts.refused_in) refused += " " + where + ":" + std::to_string(n);
    for (auto& [where, n] : counts.wrong_in) refused += " WRONG " + where + ":" + std::to_string(n);
    MESSAGE(counts.steps, " steps, ", counts.in_detours, " in detours, ", counts.displaced_calls, " displaced calls, ",
            stepper.seen_in_agent().size(), " addresses of the agent, ", counts.whole, " whole, ", counts.refused,
            " refused, ", counts.wrong, " wrong;", refused);
    INFO("first wrong:", counts.first_wrong);
    CHECK(counts.wrong == 0);
    CHECK(counts.refused == 0);
    CHECK(counts.signals == (stacks ? 1 : 2));
    CHECK(counts.in_detours > (stacks ? 20 : 100));
    CHECK(counts.displaced_calls >= 1);
    for (const char* name : {"sonde_entry", "sonde_entry_full", "sonde_through", "sonde_return_common"}) {
      AddrRange range = stepper.function_of_agent(name);
      auto all = instructions(range, stepper.code(range));
      seen[name].all = all.size();
      for (uint64_t at : all)
        if (stepper.seen_in_agent().contains(at)) seen[name].offsets.insert(at - range.begin.value);
    }
    // One handler, so one entrance: endbr64, mov, jmp; and the common part behind all of them.
    AddrRange entrances = stepper.function_of_agent("sonde_handlers");
    constexpr uint64_t kStride = 16;
    REQUIRE(entrances.size() > kHandlers * kStride);
    auto parts = {AddrRange{entrances.begin, entrances.begin + kStride},
                  AddrRange{entrances.begin + kHandlers * kStride, entrances.end}};
    for (AddrRange part : parts) {
      auto all = instructions(part, stepper.code(part));
      REQUIRE(all.size() >= 3);
      for (uint64_t at : all) CHECK(stepper.seen_in_agent().contains(at));
    }
  }
  for (auto& [name, here] : seen) {
    std::string offsets;
    for (uint64_t at : here.offsets) offsets += " " + std::to_string(at);
    INFO(name, ": ", here.offsets.size(), " of ", here.all, " instructions seen:", offsets);
    CHECK(here.all >= 1);
    // Where a record finds no room, two instructions with the row of those around them.
    CHECK(here.offsets.size() == here.all - (name == "sonde_return_common" ? 2 : 0));
  }
}

}  // namespace sonde::host
