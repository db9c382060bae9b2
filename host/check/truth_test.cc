// The checker's verdicts against real executions. What is true of a frame is known from its call alone: the slot that the
// call pushed, the address in it, and the registers at that moment. No unwind table has a part in it. Rows called right
// must give exactly that at every instruction; rows called wrong must fail to.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/ptrace.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <random>
#include <set>

#include "core/unwind/step.h"
#include "host/check/testing.h"
#include "host/image/maps.h"
#include "host/plan/insn.h"
#include "host/tables/print.h"

namespace sonde::host::check {
namespace {

RegSet<X86_64> registers_of(const user_regs_struct& r) {
  RegSet<X86_64> set;
  const unsigned long long values[] = {r.rax, r.rdx, r.rcx, r.rbx, r.rsi, r.rdi, r.rbp, r.rsp, r.r8,
                                       r.r9,  r.r10, r.r11, r.r12, r.r13, r.r14, r.r15, r.rip};
  for (unsigned i = 0; i < X86_64::kRegs; i++) set.set(i, values[i]);
  return set;
}

// What a call left: where its return address is, and the registers that the caller expects back.
struct Activation {
  uint64_t slot, return_address;
  RegSet<X86_64> regs;
};

class Process {
 public:
  explicit Process(std::vector<std::string> arguments) {
    std::vector<char*> argv;
    for (auto& a : arguments) argv.push_back(a.data());
    argv.push_back(nullptr);
    pid_ = fork();
    if (pid_ == 0) {
      alarm(900);
      int null = open("/dev/null", O_RDWR);
      dup2(null, 0), dup2(null, 1);
      ptrace(PTRACE_TRACEME, 0, nullptr, nullptr);
      execv(argv[0], argv.data());
      _exit(127);
    }
    wait();
    REQUIRE(WIFSTOPPED(status));
  }
  ~Process() {
    if (!ended()) kill(pid_, SIGKILL), waitpid(pid_, nullptr, 0);
  }
  Process(const Process&) = delete;

  int status = 0;
  user_regs_struct regs{};
  bool ended() const { return WIFEXITED(status) || WIFSIGNALED(status); }
  pid_t pid() const { return pid_; }

  uint64_t word(uint64_t at) const { return static_cast<uint64_t>(ptrace(PTRACE_PEEKDATA, pid_, at, nullptr)); }
  bool read(Addr at, uint64_t* value) const {
    errno = 0;
    *value = word(at.value);
    return errno == 0;
  }
  void set_byte(uint64_t at, uint8_t byte) {
    ptrace(PTRACE_POKETEXT, pid_, at, (static_cast<long>(word(at)) & ~0xffL) | byte);
  }
  void set_pc(uint64_t pc) {
    regs.rip = pc;
    ptrace(PTRACE_SETREGS, pid_, nullptr, &regs);
  }
  // A signal that the program gets is passed on.
  void resume(bool one_step) {
    int stopped_by = WIFSTOPPED(status) ? WSTOPSIG(status) : 0;
    long signal = stopped_by == SIGTRAP ? 0 : stopped_by;
    ptrace(one_step ? PTRACE_SINGLESTEP : PTRACE_CONT, pid_, nullptr, signal);
    wait();
  }
  bool is_call() const {
    uint8_t code[16];
    for (size_t i = 0; i < 16; i += 8) {
      uint64_t part = word(regs.rip + i);
      std::memcpy(code + i, &part, 8);
    }
    auto insn = decode({code, 15}, regs.rip);
    return insn && (insn->flow == Flow::call || insn->flow == Flow::call_indirect);
  }
  void run_to(uint64_t pc) {
    uint8_t saved = static_cast<uint8_t>(word(pc));
    set_byte(pc, 0xcc);
    resume(false);
    set_byte(pc, saved);
    REQUIRE(!ended());
    set_pc(pc);
  }
  uint64_t bias_of(const std::string& path) const {
    auto images = loaded_images(pid_, nullptr);
    REQUIRE(images);
    for (auto& loaded : *images)
      if (std::filesystem::equivalent(loaded.image->path(), path)) return loaded.bias;
    FAIL(path, " is not loaded");
    return 0;
  }

 private:
  void wait() {
    waitpid(pid_, &status, 0);
    if (WIFSTOPPED(status)) ptrace(PTRACE_GETREGS, pid_, nullptr, &regs);
  }
  pid_t pid_;
};

// What the row at this pc says wrongly of the activation.
uint8_t lies_of(const Table& table, const Row& row, const Process& process, const Activation& true_one) {
  RegSet<X86_64> regs = registers_of(process.regs), caller;
  auto memory = [&](Addr at, uint64_t* value) { return process.read(at, value); };
  struct Memory {
    decltype(memory)& through;
    bool read(Addr at, uint64_t* value) { return through(at, value); }
  } reader{memory};
  if (step(table, row, regs, reader, 0, &caller) != StepStatus::ok) return kWrongCfa;
  if (caller.sp().value != true_one.slot + 8) return kWrongCfa;
  uint8_t lies = caller.pc().value != true_one.return_address ? kWrongReturn : 0;
  for (unsigned i = 0; i < X86_64::kSaved.size(); i++) {
    unsigned reg = X86_64::kSaved[i];
    if (row.saved[i].kind != ValueKind::undefined && (!caller.has(reg) || caller.get(reg) != true_one.regs.get(reg)))
      lies |= static_cast<uint8_t>(1u << i);
  }
  return lies;
}

struct Tally {
  uint64_t steps = 0, right = 0, wrong = 0, unknown = 0;
};

// Single-steps `program` from main until main returns, or so many steps; judges what `checked` says of its instructions.
Tally step_all(const Checked& checked, const std::string& path, std::vector<std::string> program, uint64_t limit) {
  Checked own(program[0]);
  Process process(program);
  uint64_t entry = process.bias_of(program[0]) + own.image->symbol("main")->value;
  process.run_to(entry);
  uint64_t bias = process.bias_of(path);
  std::vector<Activation> calls{{process.regs.rsp, process.word(process.regs.rsp), registers_of(process.regs)}};
  Tally tally;
  while (!calls.empty() && tally.steps < limit) {
    ImageAddr pc(process.regs.rip - bias);
    Verdict verdict = checked.report.at(pc);
    if (verdict == Verdict::right || verdict == Verdict::wrong) {
      const Row* row = checked.table().lookup(pc);
      REQUIRE(row);
      uint8_t lies = lies_of(checked.table(), *row, process, calls.back());
      INFO(path, " ", pc.value, " ", describe_wrong(lies), " ", format_row(checked.table(), row));
      if (verdict == Verdict::right) CHECK(int{lies} == 0);
      else CHECK(int{lies} != 0);
      (verdict == Verdict::right ? tally.right : tally.wrong)++;
    } else if (verdict == Verdict::unknown) {
      tally.unknown++;
    }
    uint64_t sp = process.regs.rsp, at = process.regs.rip;
    bool is_call = process.is_call();
    process.resume(true);
    REQUIRE(WIFSTOPPED(process.status));
    tally.steps++;
    if (is_call && process.regs.rsp == sp - 8) {
      calls.push_back({process.regs.rsp, process.word(process.regs.rsp), registers_of(process.regs)});
    } else {
      while (!calls.empty() && process.regs.rip != at && calls.back().slot < process.regs.rsp) calls.pop_back();
    }
  }
  MESSAGE(path, ": ", tally.steps, " steps, ", tally.right, " on right rows, ", tally.wrong, " on wrong ones, ",
          tally.unknown, " on unknown ones");
  return tally;
}

constexpr const char* kShapes = R"(
#include <alloca.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#define NOINLINE __attribute__((noinline))
static volatile int sink;
NOINLINE int leaf(int a) { sink = a; return a * 3; }
NOINLINE int with_alloca(int n) { char *p = alloca(n * 16 + 1); memset(p, n, n * 16 + 1); sink = p[n]; return leaf(p[0]); }
NOINLINE int aligned(int n) { int x[8] __attribute__((aligned(64))); for (int i = 0; i < 8; i++) x[i] = leaf(n + i); return x[n & 7]; }
NOINLINE int realigned(int n) { int x[8] __attribute__((aligned(64))); char *p = alloca(n + 1); p[n] = 1; for (int i = 0; i < 8; i++) x[i] = leaf(n + i); return x[n & 7] + p[n]; }
NOINLINE int choose(int n) { switch (n) { case 0: return leaf(1); case 1: return aligned(2); case 2: return with_alloca(3); case 3: return realigned(4); case 4: return leaf(9) + 1; default: return -1; } }
NOINLINE int tail(int n) { return n > 3 ? choose(2) : choose(n); }
NOINLINE int many(int a, int b, int c, int d, int e, int f, int g, int h) { return leaf(a + b + c + d) + leaf(e + f + g + h); }
static int order(const void *a, const void *b) { return *(const int *)a - *(const int *)b; }
int main(void) {
  int sorted[5] = {4, 1, 3, 2, 0};
  char text[80];
  for (int i = 0; i < 6; i++) sink += tail(i) + choose(i);
  sink += many(1, 2, 3, 4, 5, 6, 7, 8);
  qsort(sorted, 5, sizeof sorted[0], order);
  snprintf(text, sizeof text, "%d %s %.40f", sorted[2], "text", 1e30 / 3);
  sink += (int)strtod(text, NULL);
  return 0;
})";

TEST_CASE("check: at every instruction that is executed, right rows are right and wrong ones are wrong") {
  for (const char* command : {"gcc -O2", "gcc -O0", "gcc -Os", "gcc -O2 -fno-omit-frame-pointer -fstack-protector-all",
                              "gcc -O2 -mstackrealign -fno-shrink-wrap", "clang-19 -O2"}) {
    if (std::system((std::string("command -v ") + command + " >/dev/null 2>&1").c_str()) && *command == 'c') {
      MESSAGE("SKIPPED: ", command);
      continue;
    }
    CAPTURE(std::string(command));
    Built built(kShapes, ".c", command);
    Checked checked(built.path());
    Tally tally = step_all(checked, built.path(), {built.path()}, 60000);
    CHECK(tally.right > 300);
    CHECK(tally.unknown == 0);
    // Behind `leave` where the frame's address was kept in r10.
    bool keeps_frame_address =
        std::string(command) == "gcc -O0" || std::string(command).find("realign") != std::string::npos;
    CHECK((tally.wrong > 0) == keeps_frame_address);
  }
}

const std::string kLibc = "/lib/x86_64-linux-gnu/libc.so.6", kLibcrypto = "/usr/lib/x86_64-linux-gnu/libcrypto.so.3",
                  kLibstdcxx = "/usr/lib/x86_64-linux-gnu/libstdc++.so.6";

TEST_CASE("check: libc's rows at every instruction that a program executes there") {
  Built built(kShapes, ".c", "gcc -O2 -Wl,-z,now");
  Checked libc(kLibc);
  Tally tally = step_all(libc, kLibc, {built.path()}, 60000);
  CHECK(tally.right > 1000);
}

// Functions with findings are single-stepped when they are entered, the functions that they call are not; at each chosen
// finding the row must lie. What jumps into the middle of such a function is not judged: its call was another one.
struct Judge {
  const Checked& checked;
  const std::string path;
  std::map<uint64_t, const Finding*> chosen;  // by address in the file
  std::map<uint64_t, uint64_t> functions;  // begin and end
  std::map<uint64_t, uint64_t> hits, lies;  // of the chosen

  Judge(const Checked& c, std::string p, size_t count) : checked(c), path(std::move(p)) {
    std::vector<const Finding*> all;
    std::map<const Finding*, ImageRange> function_of;
    for (const FunctionReport& f : c.report.functions)
      for (const Finding& finding : f.findings)
        if (finding.verdict == Verdict::wrong)
          all.push_back(&finding), function_of[&finding] = c.image->functions()[f.function].range;
    std::mt19937_64 random(50);
    std::ranges::shuffle(all, random);
    // Some of each function, so that large ones do not hide the others.
    std::map<uint64_t, size_t> taken;
    std::map<const Finding*, size_t> order;
    for (const Finding* f : all) order[f] = taken[function_of[f].begin.value]++;
    std::ranges::stable_sort(all, {}, [&](const Finding* f) { return order[f]; });
    for (const Finding* f : std::span(all).first(std::min(count, all.size())))
      chosen[f->pc.value] = f, functions[function_of[f].begin.value] = function_of[f].end.value;
  }

  void run(std::vector<std::string> program, const std::string& ready) {
    constexpr int kOften = 64;  // each function is followed so many times
    Process process(program);
    Checked own(program[0]);
    process.run_to(process.bias_of(program[0]) + own.image->symbol(ready)->value);
    uint64_t bias = process.bias_of(path);
    std::map<uint64_t, uint8_t> saved;  // first bytes of functions that are still waited for
    for (auto [begin, end] : functions) saved[begin] = static_cast<uint8_t>(process.word(begin + bias));
    std::map<uint64_t, int> followed;
    for (;;) {
      for (auto [begin, byte] : saved) process.set_byte(begin + bias, 0xcc);
      process.resume(false);
      if (process.ended()) break;
      uint64_t at = process.regs.rip - 1 - bias;
      if (WSTOPSIG(process.status) != SIGTRAP || !saved.contains(at)) continue;
      for (auto [begin, byte] : saved) process.set_byte(begin + bias, byte);
      process.set_pc(at + bias);
      follow(process, at, bias);
      if (++followed[at] == kOften) saved.erase(at);
      if (process.ended()) break;
    }
    CHECK(WIFEXITED(process.status));
    CHECK(WEXITSTATUS(process.status) == 0);
  }

  // From its first instruction until control leaves it other than by a call.
  void follow(Process& process, uint64_t begin, uint64_t bias) {
    const uint64_t end = functions.at(begin);
    const Activation call{process.regs.rsp, process.word(process.regs.rsp), registers_of(process.regs)};
    for (int steps = 0; steps < 20000; steps++) {
      uint64_t pc = process.regs.rip, sp = process.regs.rsp, at = pc - bias;
      if (at < begin || at >= end) return;
      if (chosen.contains(at)) {
        const Row* row = checked.table().lookup(ImageAddr(at));
        REQUIRE(row);
        hits[at]++, lies[at] += lies_of(checked.table(), *row, process, call) != 0;
      }
      bool is_call = process.is_call();
      process.resume(true);
      if (process.ended()) return;
      if (is_call && process.regs.rsp == sp - 8) process.run_to(process.word(sp - 8));
    }
  }

  // A value that happens to be the caller's own hides a lie now and then, but not each time.
  void verdict() {
    size_t confirmed = 0;
    for (auto& [pc, n] : hits) {
      INFO(path, " ", pc, ": ", chosen[pc]->insn, " row ", chosen[pc]->row, " code ", chosen[pc]->truth);
      CHECK(lies[pc] > 0);
      confirmed += lies[pc] > 0;
    }
    for (auto& [pc, finding] : chosen)
      if (!hits.contains(pc))
        MESSAGE("not executed: ",
                fmt::format("{:#x} {}  row {}  code {}", pc, finding->insn, finding->row, finding->truth));
    MESSAGE(path, ": ", confirmed, " findings confirmed by execution, of ", chosen.size(), " chosen");
  }
};

constexpr const char* kLibcUser = R"(
#include <pthread.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>
static jmp_buf buffer;
static ucontext_t here, there;
static char stack[65536];
static volatile int sink;
extern void __longjmp_chk(jmp_buf, int) __attribute__((noreturn));
__attribute__((noinline)) void ready(void) { sink++; }
// With a context that cannot be read: it fails, and r12 is not what it was.
__attribute__((noinline)) static int fail(void) {
  int result = swapcontext(&here, (ucontext_t *)8);
  __asm__ volatile("" ::: "r12");
  return result;
}
static void other(void) { swapcontext(&there, &here); }
int main(void) {
  ready();
  char text[400];
  for (int i = 0; i < 40; i++) {
    double large = 1;
    for (int digits = 0; digits < 7 * i; digits++) large *= 10;
    snprintf(text, sizeof text, "%.120f %.17g", large / 3, 1 / large);
    sink += strtod(text, NULL) > 0 && strtod(strchr(text, ' '), NULL) > 0;
    sink += strtod(text, NULL) > 0;
    sink += strtod("1.2345678901234567890123456789012345678901234567890123456789e-290", NULL) > 0;
  }
  for (int i = 0; i < 3; i++) {
    if (setjmp(buffer) == 0) longjmp(buffer, 1);
    if (setjmp(buffer) == 0) __longjmp_chk(buffer, 1);
  }
  if (fail() != -1) return 3;
  getcontext(&there);
  there.uc_stack.ss_sp = stack, there.uc_stack.ss_size = sizeof stack, there.uc_link = &here;
  makecontext(&there, other, 0);
  swapcontext(&here, &there);
  volatile int again = 0;
  getcontext(&here);
  if (again++ == 0) setcontext(&here);
  pthread_exit(NULL);  // leaves by a longjmp of its own
})";

constexpr const char* kCryptoUser = R"(
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
static volatile int sink;
__attribute__((noinline)) void ready(void) { sink++; }
static void *lib;
#define CALL(type, name) ((type)dlsym(lib, name))
int main(int argc, char **argv) {
  lib = dlopen("libcrypto.so.3", RTLD_NOW);
  if (!lib) return 77;
  ready();
  static unsigned char key[512] __attribute__((aligned(64))) = {1, 2, 3}, in[4096], out[4096], iv[16];
  CALL(int (*)(const unsigned char *, int, void *), "AES_set_decrypt_key")(key, 128, key + 64);
  CALL(void (*)(const void *, void *, size_t, const void *, void *, int), "AES_cbc_encrypt")(in, out, sizeof in, key + 64, iv, 0);
  void *pkey = CALL(void *(*)(void *, const char *, const char *), "EVP_PKEY_Q_keygen")(NULL, NULL, "X25519");
  void *derive = CALL(void *(*)(void *, void *), "EVP_PKEY_CTX_new")(pkey, NULL);
  size_t size = sizeof out;
  if (!pkey || !derive || CALL(int (*)(void *), "EVP_PKEY_derive_init")(derive) != 1 ||
      CALL(int (*)(void *, void *), "EVP_PKEY_derive_set_peer")(derive, pkey) != 1 ||
      CALL(int (*)(void *, void *, void *), "EVP_PKEY_derive")(derive, out, &size) != 1)
    return 3;
  void *ctx = CALL(void *(*)(void), "BN_CTX_new")();
  void *(*bn)(void) = CALL(void *(*)(void), "BN_new");
  void *a = bn(), *p = bn(), *m = bn(), *r = bn();
  int (*bits)(void *, int) = CALL(int (*)(void *, int), "BN_set_bit");
  for (int i = 0; i < 1024; i += 3) bits(m, i), bits(p, i), bits(a, i / 2);
  bits(m, 0), bits(m, 1023);
  if (!CALL(int (*)(void *, void *, void *, void *, void *, void *), "BN_mod_exp_mont_consttime")(r, a, p, m, ctx, NULL)) return 4;
  // A function for several messages at once, which only TLS calls: by its address.
  if (argc > 1) {
    char *base = (char *)dlsym(lib, "AES_encrypt") - strtoull(argv[2], NULL, 16);
    static uint32_t state[5 * 8 + 64];
    static unsigned char message[4][64];
    struct { const void *at; int blocks; } messages[8] = {{message[0], 1}, {message[1], 1}, {message[2], 1}, {message[3], 1}};
    ((void (*)(void *, void *, int))(base + strtoull(argv[1], NULL, 16)))(state, messages, 1);
  }
  return 0;
})";

// Exactly these functions have wrong rows. By hand, from their instructions:
//   __mpn_addmul_1, __mpn_submul_1  push %rbx and %rbp without a word in the table
//   longjmp's and the contexts'     rows describe the context that is switched to; swapcontext changes r12 unsaved
std::set<std::string> wrong_functions(const Checked& c) {
  std::set<std::string> names;
  for (const FunctionReport& f : c.report.functions)
    if (f.counts[static_cast<unsigned>(Verdict::wrong)])
      names.insert(display_name(*c.image, c.image->functions()[f.function]));
  return names;
}

TEST_CASE("check slow: what is wrong in libc, each of fifty findings judged by execution" * doctest::skip()) {
  Checked libc(kLibc);
  std::set<std::string> allowed = {"__longjmp",      "__longjmp_cancel", "____longjmp_chk", "setcontext",
                                   "__mpn_addmul_1", "__mpn_submul_1",   "swapcontext"};
  for (const std::string& name : wrong_functions(libc)) {
    CAPTURE(name);
    CHECK((allowed.contains(name) || name.starts_with("libc.so.6+")));
  }
  Built built(kLibcUser, ".c", "gcc -O2 -fno-builtin");
  Judge judge(libc, kLibc, 50);
  judge.run({built.path()}, "ready");
  judge.verdict();
  CHECK(judge.hits.size() >= 45);
}

TEST_CASE("check slow: what is wrong in libcrypto, each of fifty findings judged by execution" * doctest::skip()) {
  if (access(kLibcrypto.c_str(), R_OK)) {
    MESSAGE("SKIPPED: ", kLibcrypto, " is not installed");
    return;
  }
  Checked crypto(kLibcrypto);
  Built built(kCryptoUser, ".c", "gcc -O2");
  Judge judge(crypto, kLibcrypto, 50);
  // The multi-message hash: registers saved in one order, described in the other.
  std::string multi;
  for (const FunctionReport& f : crypto.report.functions)
    if (f.counts[static_cast<unsigned>(Verdict::wrong)] > 1000)
      multi = fmt::format("{:x}", crypto.image->functions()[f.function].range.begin.value);
  std::vector<std::string> program{built.path()};
  if (!multi.empty())
    program.insert(program.end(), {multi, fmt::format("{:x}", crypto.image->symbol("AES_encrypt")->value)});
  judge.run(program, "ready");
  // The functions for older processors: without hyper-threading, AVX, AVX2, ADX and SHA instructions.
  setenv("OPENSSL_ia32cap", "~0x1000000010000000:~0x20080020", 1);
  judge.run(program, "ready");
  unsetenv("OPENSSL_ia32cap");
  judge.verdict();
  CHECK(judge.hits.size() >= 45);
}

TEST_CASE("check slow: nothing is wrong in what compilers made" * doctest::skip()) {
  for (const std::string& path : {kLibstdcxx, std::string("/usr/bin/python3")}) {
    if (access(path.c_str(), R_OK)) {
      MESSAGE("SKIPPED: ", path, " is not installed");
      continue;
    }
    Checked checked(path);
    CAPTURE(path);
    CHECK(wrong_functions(checked).empty());
    uint64_t all = 0, right = checked.report.counts[static_cast<unsigned>(Verdict::right)];
    for (uint64_t n : checked.report.counts) all += n;
    CHECK(right * 100 > all * 99);
  }
}

}  // namespace
}  // namespace sonde::host::check
