// Plans for hand-written functions, then runs original and patched code on the same registers: nothing may differ but
// the hits counted.
#include "host/plan/planner.h"
#include "core/isa/x86_64_detour.h"

#include <doctest/doctest.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <cstring>
#include <fstream>
#include <map>
#include <random>

#include "host/plan/test_code.h"

using namespace sonde;
using namespace sonde::host;
using namespace sonde::host::test;

namespace {

constexpr size_t kStackBytes = 65536;

std::vector<AddrRange> own_mappings() {
  std::vector<AddrRange> used;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    size_t dash = line.find('-');
    used.push_back({Addr(std::stoull(line, nullptr, 16)), Addr(std::stoull(line.substr(dash + 1), nullptr, 16))});
  }
  return used;
}

void* map_at(uint64_t at, size_t bytes, int more = 0) {
  void* p = mmap(reinterpret_cast<void*>(at), bytes, PROT_READ | PROT_WRITE | PROT_EXEC,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | more, -1, 0);
  REQUIRE(p != MAP_FAILED);
  return p;
}

// The block of test code in memory of its own, planned and patched there.
class Laboratory {
 public:
  Laboratory() {
    auto block = code_block();
    size_ = (block.size() + 4095) & ~size_t{4095};
    base_ = reinterpret_cast<uint64_t>(map_at(0x7e0012340000, size_, MAP_FIXED_NOREPLACE));
    stack_ = static_cast<uint8_t*>(map_at(0, kStackBytes));
    functions_ = test_functions();
    restore();
    file_.assign(memory(), memory() + block.size());
    view_.pieces = {{base_, file_, true}};
    view_.begin = base_, view_.end = base_ + size_;
    for (auto& f : functions_) view_.functions.push_back({base_ + f.begin, base_ + f.end});
    view_.finish();
  }
  ~Laboratory() {
    unmap();
    munmap(memory(), size_), munmap(stack_, kStackBytes);
  }

  const std::vector<TestFunction>& functions() const { return functions_; }
  uint64_t address(const TestFunction& f) const { return base_ + f.begin; }
  const TestFunction& named(std::string_view name) const {
    for (auto& f : functions_)
      if (name == f.name) return f;
    FAIL("no such function");
    return functions_[0];
  }

  // Site numbers are indices into functions().
  const std::vector<SitePlan>& plan(const std::vector<std::string>& names, bool allow_traps, bool force_traps = false) {
    PlanRequest request{.image = nullptr,
                        .functions = {},
                        .first_site = 0,
                        .entry_trampoline = Addr(counting_entry()),
                        .used = own_mappings(),
                        .allow_traps = allow_traps,
                        .force_traps = force_traps};
    plan_ = {};
    std::vector<CodeRange> ranges;
    numbers_.clear();
    for (size_t i = 0; i < functions_.size(); i++) {
      if (!names.empty() && std::find(names.begin(), names.end(), functions_[i].name) == names.end()) continue;
      SitePlan site;
      site.function = static_cast<uint32_t>(i);
      site.entry = site.patch = Addr(address(functions_[i]));
      plan_.sites.push_back(site);
      ranges.push_back({address(functions_[i]), base_ + functions_[i].end});
      request.functions.push_back(site.function);
    }
    Planner planner(view_, request);
    planner.plan(plan_.sites, ranges);
    planner.finish(plan_);
    return plan_.sites;
  }

  void arm() {
    for (auto& a : plan_.arenas) {
      map_at(a.begin.value, a.size(), MAP_FIXED_NOREPLACE);
      mapped_.push_back(a);
    }
    for (auto& [at, bytes] : plan_.writes) std::memcpy(reinterpret_cast<void*>(at.value), bytes.data(), bytes.size());
    for (auto& s : plan_.sites) {
      write(s.island, s.island_original, s.island_bytes);
      write(s.patch, s.original, s.bytes);
      CHECK(std::equal(
          s.detour_bytes.begin(), s.detour_bytes.end(),
          reinterpret_cast<uint8_t*>(s.detour.value - (s.detour_bytes.empty() ? 0 : x86_64_detour::kHeader))));
    }
  }
  void disarm() {
    restore();
    unmap();
  }

  MachineState call(const TestFunction& f, const MachineState& in, std::vector<uint8_t>* stack) {
    std::memset(stack_, 0x5a, kStackBytes);
    uint64_t top = reinterpret_cast<uint64_t>(stack_) + kStackBytes - 256;
    MachineState out = run(address(f), in, top);
    // From the red zone of the callee up.
    stack->assign(stack_ + kStackBytes - 256 - 8 - 128, stack_ + kStackBytes);
    return out;
  }

 private:
  uint8_t* memory() const { return reinterpret_cast<uint8_t*>(base_); }
  void restore() {
    auto block = code_block();
    std::memcpy(memory(), block.data(), block.size());
    bind_pointers(memory(), base_);
  }
  void write(Addr at, const std::vector<uint8_t>& before, const std::vector<uint8_t>& after) {
    REQUIRE(before.size() == after.size());
    CHECK(std::equal(before.begin(), before.end(), reinterpret_cast<uint8_t*>(at.value)));
    std::copy(after.begin(), after.end(), reinterpret_cast<uint8_t*>(at.value));
  }
  void unmap() {
    for (auto& a : mapped_) munmap(reinterpret_cast<void*>(a.begin.value), a.size());
    mapped_.clear();
  }

  uint64_t base_ = 0;
  size_t size_ = 0;
  uint8_t* stack_ = nullptr;
  std::vector<uint8_t> file_;
  std::vector<TestFunction> functions_;
  std::vector<uint32_t> numbers_;
  CodeView view_;
  ImagePlan plan_;
  std::vector<AddrRange> mapped_;
};

MachineState random_state(std::mt19937_64& random, uint64_t round) {
  MachineState s{};
  for (auto& r : s.reg) r = random();
  // Loop counters end soon.
  s.reg[7] = round % 3 ? random() % 60 + 1 : (random() & ~uint64_t{0xffffffff}) | (random() % 20 + 1);
  s.reg[1] = round % 4 ? random() : round % 8 ? 0 : 1;
  s.flags = (random() & 0xcd5) | 0x202;  // carry parity adjust zero sign direction overflow
  return s;
}

// These take a code address that only callr and callsp give them.
bool needs_caller(const TestFunction& f) {
  std::string_view name = f.name;
  return name == "via_rax" || name == "via_sp";
}

struct Outcome {
  MachineState state;
  std::vector<uint8_t> stack;
};

const std::vector<SitePlan>* trap_sites = nullptr;
void on_trap(int, siginfo_t*, void* context) {
  auto& pc = static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_RIP];
  for (auto& s : *trap_sites)
    if (s.patch.value + 1 == static_cast<uint64_t>(pc)) {
      pc = static_cast<greg_t>(s.detour.value);
      return;
    }
  abort();
}

class TrapHandler {
 public:
  explicit TrapHandler(const std::vector<SitePlan>& sites) {
    trap_sites = &sites;
    stack_t alternate{.ss_sp = memory_, .ss_flags = 0, .ss_size = sizeof memory_};
    sigaltstack(&alternate, nullptr);
    struct sigaction action{};
    action.sa_sigaction = on_trap;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGTRAP, &action, &old_);
  }
  ~TrapHandler() {
    sigaction(SIGTRAP, &old_, nullptr);
    stack_t none{.ss_sp = nullptr, .ss_flags = SS_DISABLE, .ss_size = 0};
    sigaltstack(&none, nullptr);
  }

 private:
  static inline char memory_[65536];
  struct sigaction old_;
};

// Runs every function, unpatched and patched; only registers, flags and stack count.
void check_same(Laboratory& lab, const std::vector<SitePlan>& sites, int rounds) {
  std::vector<Outcome> before;
  auto each = [&](auto&& visit) {
    std::mt19937_64 random(12345);
    for (int round = 0; round < rounds; round++)
      for (auto& f : lab.functions()) {
        if (needs_caller(f)) continue;
        MachineState in = random_state(random, static_cast<uint64_t>(round));
        Outcome out;
        out.state = lab.call(f, in, &out.stack);
        visit(f, out);
      }
  };
  each([&](const TestFunction&, Outcome& out) { before.push_back(std::move(out)); });
  lab.arm();
  TrapHandler handler(sites);
  size_t i = 0, different = 0;
  each([&](const TestFunction& f, Outcome& out) {
    bool same = out.state == before[i].state && out.stack == before[i].stack;
    if (!same && different++ < 10) FAIL_CHECK(std::string(f.name) << " behaves differently");
    i++;
  });
  CHECK(different == 0);
  lab.disarm();
}

uint64_t seen[4096][2], seen_count;
void on_step(int signal, siginfo_t* info, void* context) {
  auto& regs = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  if (info->si_code != TRAP_TRACE) return on_trap(signal, info, context);
  if (seen_count < 4096)
    seen[seen_count][0] = static_cast<uint64_t>(regs[REG_RIP]),
    seen[seen_count++][1] = static_cast<uint64_t>(regs[REG_RSP]);
}

// Stack pointers at pcs of [begin, end), the first time each is passed, seen by single-stepping.
std::map<uint64_t, uint64_t> step_through(Laboratory& lab, const TestFunction& f, uint64_t begin, uint64_t end) {
  static char memory[65536];
  stack_t alternate{.ss_sp = memory, .ss_flags = 0, .ss_size = sizeof memory};
  sigaltstack(&alternate, nullptr);
  struct sigaction action{}, old{};
  action.sa_sigaction = on_step;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGTRAP, &action, &old);
  MachineState in{};
  in.reg[7] = 3, in.reg[1] = 2, in.flags = 0x302;  // trap flag
  std::vector<uint8_t> stack;
  seen_count = 0;
  lab.call(f, in, &stack);
  asm volatile("pushfq\n andq $~0x100,(%%rsp)\n popfq" : : : "memory", "cc");
  sigaction(SIGTRAP, &old, nullptr);
  std::map<uint64_t, uint64_t> sp;
  for (size_t i = 0; i < seen_count; i++)
    if (begin <= seen[i][0] && seen[i][0] < end) sp.try_emplace(seen[i][0], seen[i][1]);
  return sp;
}

size_t count(const std::vector<SitePlan>& sites, Method method) {
  return static_cast<size_t>(std::count_if(sites.begin(), sites.end(), [&](auto& s) { return s.method == method; }));
}

}  // namespace

TEST_CASE("patched functions behave as before, all at once") {
  Laboratory lab;
  for (bool traps : {false, true}) {
    CAPTURE(traps);
    auto& sites = lab.plan({}, traps);
    if (traps) CHECK(count(sites, Method::refused) == 0);
    check_same(lab, sites, 50);
  }
}

TEST_CASE("patched functions behave as before, each alone, and are hit once a call") {
  Laboratory lab;
  for (auto& f : lab.functions()) {
    CAPTURE(std::string(f.name));
    auto& sites = lab.plan({f.name}, true);
    REQUIRE(sites.size() == 1);
    CHECK(sites[0].method != Method::refused);
    std::memset(plan_test_hits, 0, sizeof plan_test_hits);
    lab.arm();
    TrapHandler handler(sites);
    MachineState in{};
    in.reg[7] = 3, in.reg[1] = 2, in.flags = 0x202;
    std::vector<uint8_t> stack;
    auto& entered = !needs_caller(f) ? f : lab.named(std::string_view(f.name) == "via_rax" ? "callr" : "callsp");
    for (int i = 0; i < 10; i++) lab.call(entered, in, &stack);
    // rec calls itself three times more.
    CHECK(plan_test_hits[0] == (std::string_view(f.name) == "rec" ? 40 : 10));
    lab.disarm();
    check_same(lab, sites, 10);
  }
}

TEST_CASE("the steps of a detour say where each of its instructions stands, by single-stepping") {
  Laboratory lab;
  size_t compared = 0;
  for (auto& f : lab.functions()) {
    if (needs_caller(f)) continue;
    CAPTURE(std::string(f.name));
    auto truth = step_through(lab, f, lab.address(f), lab.address(f) + f.end - f.begin + 16);
    for (bool force : {false, true}) {
      auto& site = lab.plan({f.name}, true, force)[0];
      trap_sites = &lab.plan({f.name}, true, force);
      lab.arm();
      auto inside = step_through(lab, f, site.detour.value, site.detour.value - 8 + site.detour_bytes.size());
      lab.disarm();
      CHECK(inside.size() >= 4);  // a trap leads to the first without a step
      uint64_t at_entry = truth.begin()->second;
      for (auto [pc, sp] : inside) {
        auto step = std::find_if(site.steps.begin(), site.steps.end(),
                                 [&](auto& s) { return s.offset == pc - site.detour.value; });
        REQUIRE(step != site.steps.end());
        uint64_t original = site.patch.value + static_cast<uint64_t>(std::max<int>(step->original, 0));
        uint64_t expected = step->original < 0 ? at_entry : truth.contains(original) ? truth[original] : 0;
        // The place behind the nops of an entry, or behind a window, may be passed in the detour only.
        if (expected == 0) continue;
        CHECK(sp + static_cast<uint64_t>(int64_t{step->sp_adjust}) == expected);
        compared++;
      }
    }
  }
  CHECK(compared > 500);
}

TEST_CASE("traps everywhere behave as before") {
  Laboratory lab;
  auto& sites = lab.plan({}, true, true);
  CHECK(count(sites, Method::trap) == sites.size());
  check_same(lab, sites, 10);
}

TEST_CASE("an entry by a jump into the middle is no hit") {
  Laboratory lab;
  auto& sites = lab.plan({"mid", "tab"}, true);
  for (auto& s : sites) CHECK(s.method != Method::jump);
  std::memset(plan_test_hits, 0, sizeof plan_test_hits);
  lab.arm();
  TrapHandler handler(sites);
  std::vector<uint8_t> stack;
  MachineState in{};
  in.flags = 0x202;
  for (uint64_t i = 0; i < 4; i++) {
    in.reg[7] = i;
    lab.call(lab.named("outsider"), in, &stack);
    lab.call(lab.named("viaptr"), in, &stack);
    lab.call(lab.named("viatab"), in, &stack);
  }
  CHECK(plan_test_hits[0] == 0);  // mid
  CHECK(plan_test_hits[1] == 1);  // tab's first entry is its start
  lab.disarm();
}

TEST_CASE("methods are the cheapest that are right") {
  Laboratory lab;
  auto method_of = [&](const char* name) { return lab.plan({name}, true)[0].method; };
  CHECK(method_of("nop5") == Method::nops);
  CHECK(method_of("nops") == Method::nops);
  CHECK(method_of("call") == Method::jump);
  CHECK(method_of("pad_ret") == Method::jump);   // over its padding
  CHECK(method_of("pad_id") == Method::jump);
  CHECK(method_of("pad_tail") == Method::jump);
  CHECK(method_of("pad_falls") != Method::jump);  // its padding is executed
  CHECK(method_of("via_rax") != Method::jump);    // the call comes back to the third byte
  CHECK(method_of("loop3") == Method::short_jump);
  CHECK(method_of("loop1") != Method::jump);
}

TEST_CASE("what an exception or an indirect jump may lead to is never covered") {
  // A cold part: a nop, then a landing pad at offset 1. An endbr64 in a function's second instruction.
  const std::vector<uint8_t> code = {
      0x90, 0x48, 0x89, 0xc7, 0x48, 0x31, 0xc0, 0xc3,   // nop; mov %rax,%rdi; xor %rax,%rax; ret
      0x31, 0xc0, 0xf3, 0x0f, 0x1e, 0xfa, 0xc3, 0xcc,   // xor %eax,%eax; endbr64; ret
      0x90, 0x90, 0x90, 0x90, 0x90, 0xc3, 0xcc, 0xcc};  // room for a patch: no pad behind it
  CodeView view;
  view.pieces = {{0x10000, code, true}};
  view.begin = 0x10000, view.end = 0x11000;
  view.functions = {{0x10000, 0x10008}, {0x10008, 0x1000f}, {0x10010, 0x10016}};
  view.finish();
  Targets targets(view);
  CHECK(targets.marked(0x10001));
  CHECK(targets.marked(0x1000a));
  CHECK_FALSE(targets.any(0x10011, 0x10016));
}
