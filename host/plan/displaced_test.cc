// Every form of instruction that some of the machine's libraries hold, executed where it stands and as a displaced copy, on
// the same random registers (vector and mask registers too) and memory: registers, flags, memory, the place where control
// goes on, and faults with their place are the same.
//
// Left out: what leaves no result to compare (time stamps, random numbers, system calls) or takes the test's own state away
// (%fs, protection keys). The address of the last x87 instruction, which only fnstenv and fxsave show, is the copy's.
#include <cpuid.h>
#include <doctest/doctest.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <random>
#include <set>
#include <unordered_set>

#include "core/isa/x86_64_detour.h"
#include "host/image/image.h"
#include "host/plan/detour.h"

using namespace sonde;
using namespace sonde::host;

namespace {

constexpr size_t kDataBytes = 32768, kCodeBytes = 8192, kAlternateBytes = 65536;
constexpr size_t kLegacyBytes = 512, kBvOffset = 512, kLastInsn = 8;  // of an XSAVE area (SDM volume 1, section 13.4)
constexpr int kBreakpoint = 0xcc;

// Components of the XSAVE area: SSE, AVX, opmask, ZMM_Hi256, Hi16_ZMM.
struct Component {
  unsigned number;
  size_t offset, size;
};

std::vector<Component> vector_components(uint64_t enabled) {
  std::vector<Component> found{{1, 160, 256}};
  for (unsigned number : {2u, 5u, 6u, 7u}) {
    unsigned size = 0, offset = 0, c, d;
    if (enabled >> number & 1 && __get_cpuid_count(13, number, &size, &offset, &c, &d))
      found.push_back({number, offset, size});
  }
  return found;
}

struct Input {
  std::array<greg_t, 16> regs;  // as in gregs, REG_R8 to REG_RSP
  greg_t flags;
  std::vector<uint8_t> vectors;  // laid out as the components, one behind the other
};

struct Outcome {
  int signal = 0;
  gregset_t regs{};
  std::vector<uint8_t> state, data;
};

// One run: enters by a signal frame, whatever the instruction does ends it by another.
struct Run {
  const Input* in = nullptr;
  uint64_t pc = 0;
  bool running = false;
  ucontext_t before;
  std::vector<uint8_t> before_state;
  Outcome* out = nullptr;
};
Run current;
uint8_t* data;
std::vector<Component> components;

uint8_t* area_of(ucontext_t* context) { return reinterpret_cast<uint8_t*>(context->uc_mcontext.fpregs); }
size_t area_bytes() {
  size_t end = kLegacyBytes + 64;
  for (const Component& c : components) end = std::max(end, c.offset + c.size);
  return end;
}

void begin(ucontext_t* context) {
  uint8_t* area = area_of(context);
  std::memcpy(current.before.uc_mcontext.gregs, context->uc_mcontext.gregs, sizeof(gregset_t));
  current.before_state.assign(area, area + area_bytes());
  std::copy(current.in->regs.begin(), current.in->regs.end(), context->uc_mcontext.gregs);
  context->uc_mcontext.gregs[REG_EFL] = current.in->flags;
  context->uc_mcontext.gregs[REG_RIP] = static_cast<greg_t>(current.pc);
  const uint8_t* from = current.in->vectors.data();
  uint64_t bv;
  std::memcpy(&bv, area + kBvOffset, sizeof bv);
  for (const Component& c : components) {
    std::memcpy(area + c.offset, from, c.size);
    from += c.size;
    bv |= uint64_t{1} << c.number;
  }
  std::memcpy(area + kBvOffset, &bv, sizeof bv);
  current.running = true;
}

void end(int signal, ucontext_t* context) {
  current.running = false;
  Outcome& out = *current.out;
  out.signal = signal;
  std::memcpy(out.regs, context->uc_mcontext.gregs, sizeof out.regs);
  uint8_t* area = area_of(context);
  uint64_t bv;
  std::memcpy(&bv, area + kBvOffset, sizeof bv);
  // A component that is in its first state has no bytes.
  for (const Component& c : components)
    if (!(bv >> c.number & 1)) std::memset(area + c.offset, 0, c.size);
  if (!(bv & 1)) std::memset(area, 0, 24), std::memset(area + 32, 0, 128);
  std::memset(area + kLastInsn, 0, 8);
  out.state.assign(area, area + 464);  // what follows is the kernel's
  for (const Component& c : components) out.state.insert(out.state.end(), area + c.offset, area + c.offset + c.size);
  std::memcpy(context->uc_mcontext.gregs, current.before.uc_mcontext.gregs, sizeof(gregset_t));
  std::memcpy(area, current.before_state.data(), current.before_state.size());
}

void on_signal(int signal, siginfo_t*, void* context) {
  if (current.running) end(signal, static_cast<ucontext_t*>(context));
  else begin(static_cast<ucontext_t*>(context));
}

class Laboratory {
 public:
  Laboratory() {
    // Guards around the data: a repeated store ends there.
    auto* p = static_cast<uint8_t*>(mmap(reinterpret_cast<void*>(0x7e0056780000), 3 * kDataBytes, PROT_NONE,
                                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0));
    REQUIRE(p != MAP_FAILED);
    data = p + kDataBytes;
    mprotect(data, kDataBytes, PROT_READ | PROT_WRITE);
    code_ = static_cast<uint8_t*>(mmap(reinterpret_cast<void*>(0x7e0012340000), 2 * kCodeBytes,
                                       PROT_READ | PROT_WRITE | PROT_EXEC,
                                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0));
    REQUIRE(code_ != MAP_FAILED);
    std::memset(code_, kBreakpoint, 2 * kCodeBytes);
    stack_t alternate{.ss_sp = alternate_.data(), .ss_flags = 0, .ss_size = alternate_.size()};
    sigaltstack(&alternate, &old_stack_);
    struct sigaction action{};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    for (int signal : kSignals) sigaction(signal, &action, &old_[signal]);
    unsigned a, b, c, d;
    uint64_t enabled = 0;
    if (__get_cpuid(1, &a, &b, &c, &d) && c & bit_OSXSAVE) {
      uint32_t low, high;
      asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
      enabled = low;
    }
    components = vector_components(enabled);
  }
  ~Laboratory() {
    for (int signal : kSignals) sigaction(signal, &old_[signal], nullptr);
    sigaltstack(&old_stack_, nullptr);
    munmap(data - kDataBytes, 3 * kDataBytes), munmap(code_, 2 * kCodeBytes);
  }

  uint64_t original() const { return reinterpret_cast<uint64_t>(code_) + kCodeBytes / 2; }
  uint64_t copy() const { return reinterpret_cast<uint64_t>(code_) + kCodeBytes + kCodeBytes / 2; }
  uint64_t landing() const { return original() + 1024; }

  void put(uint64_t at, std::span<const uint8_t> bytes) {
    std::memcpy(reinterpret_cast<uint8_t*>(at), bytes.data(), bytes.size());
  }
  void clear(uint64_t at, size_t bytes) { std::memset(reinterpret_cast<uint8_t*>(at), kBreakpoint, bytes); }

  Input random_input(std::mt19937_64& random) const {
    Input in;
    for (auto& r : in.regs) {
      uint64_t value = random();
      // An address in the data, a small number, anything.
      uint64_t kind = random() % 8;
      if (kind < 4) value = reinterpret_cast<uint64_t>(data) + kDataBytes / 2 + value % 64 * 64;
      else if (kind < 7) value %= 40;
      r = static_cast<greg_t>(value);
    }
    auto middle = reinterpret_cast<uint64_t>(data) + kDataBytes / 2;
    in.regs[REG_RSP] = static_cast<greg_t>(middle - 2048 + random() % 8 * 8);
    in.flags = static_cast<greg_t>((random() & 0x8d5) | 0x202);
    size_t bytes = 0;
    for (const Component& c : components) bytes += c.size;
    in.vectors.resize(bytes);
    for (auto& byte : in.vectors) byte = static_cast<uint8_t>(random());
    return in;
  }
  // Words that are mostly places where control may go on; none of them sets the flags TF or AC if it is popped as flags.
  std::vector<uint8_t> random_data(std::mt19937_64& random) const {
    std::vector<uint8_t> bytes(kDataBytes);
    for (size_t i = 0; i < bytes.size(); i += 8) {
      uint64_t word = random() % 4 ? landing() + random() % 4 * 16 : random();
      word &= ~uint64_t{0x40100};
      std::memcpy(bytes.data() + i, &word, 8);
    }
    return bytes;
  }

  Outcome run(uint64_t pc, const Input& in, const std::vector<uint8_t>& memory) {
    Outcome out;
    std::memcpy(data, memory.data(), memory.size());
    current.in = &in, current.pc = pc, current.out = &out;
    raise(SIGUSR1);
    out.data.assign(data, data + kDataBytes);
    return out;
  }

 private:
  static constexpr int kSignals[] = {SIGUSR1, SIGTRAP, SIGSEGV, SIGBUS, SIGILL, SIGFPE};
  uint8_t* code_ = nullptr;
  std::vector<uint8_t> alternate_ = std::vector<uint8_t>(kAlternateBytes);
  stack_t old_stack_{};
  std::map<int, struct sigaction> old_;
};

bool is_left_out(const Insn& insn) {
  auto code = insn.code();
  size_t i = 0;
  auto segment = [](uint8_t byte) { return byte == 0x64 || byte == 0x65; };
  while (i + 1 < code.size() && (segment(code[i]) || code[i] == 0x66 || code[i] == 0xf2 || code[i] == 0xf3 ||
                                 code[i] == 0xf0 || code[i] == 0x2e || code[i] == 0x3e || (code[i] & 0xf0) == 0x40))
    i++;
  if (std::ranges::any_of(code.first(i), segment)) return true;
  if (code[i] == 0xcd || insn.flow == Flow::transaction) return true;
  if (code[i] != 0x0f || i + 1 >= code.size()) return false;
  uint8_t second = code[i + 1], modrm = i + 2 < code.size() ? code[i + 2] : 0;
  bool memory = modrm >> 6 != 3;
  switch (second) {
    case 0x05:  // syscall
    case 0x34:
    case 0x31:  // rdtsc
    case 0x33:  // rdpmc
    case 0xa2: return true;  // cpuid
    case 0x01: return modrm == 0xf9 || modrm == 0xef || modrm == 0xee;  // rdtscp, wrpkru, rdpkru
    case 0xc7: return !memory || (modrm >> 3 & 7) >= 3;  // rdrand, rdseed, rdpid; xrstors, xsavec
    case 0xae: return memory ? (modrm >> 3 & 7) >= 4 : i > 0;  // xsave, xrstor, clflush; wrfsbase
    default: return false;
  }
}

// The form: all bytes but the displacement and immediates.
std::string form_of(const Insn& insn) {
  size_t end = insn.length;
  if (insn.imm_size) end = std::min<size_t>(end, insn.imm_offset);
  if (insn.disp_size) end = std::min<size_t>(end, insn.disp_offset);
  return {reinterpret_cast<const char*>(insn.bytes.data()), end};
}

// The same form with a displacement that leads to the data or, if it is a branch, to a place where control may go on.
Insn settle(Laboratory& lab, Insn insn) {
  auto set32 = [&](size_t at, uint64_t value) {
    for (size_t i = 0; i < 4; i++) insn.bytes[at + i] = static_cast<uint8_t>(value >> (8 * i));
  };
  uint64_t next = lab.original() + insn.length;
  if (insn.pc_relative_memory) set32(insn.disp_offset, reinterpret_cast<uint64_t>(data) + kDataBytes / 2 - next);
  else if (insn.disp_size == 4) set32(insn.disp_offset, 0x40);
  if (is_direct(insn.flow) && insn.imm_size == 4) set32(insn.imm_offset, lab.landing() - next);
  auto settled = decode(insn.code(), lab.original());
  REQUIRE(settled);
  return *settled;
}

std::vector<Insn> forms_of(const char* file, std::unordered_set<std::string>& known) {
  std::vector<Insn> found;
  auto image = Image::open(file);
  if (!image) return found;
  for (const Function& f : (*image)->functions()) {
    auto code = (*image)->bytes(f.range);
    for (size_t i = 0; i < code.size();) {
      auto insn = decode(code.subspan(i), f.range.begin.value + i);
      if (!insn) break;
      i += insn->length;
      if (can_move(*insn) && !is_left_out(*insn) && known.insert(form_of(*insn)).second) found.push_back(*insn);
    }
  }
  return found;
}

// In the copy's outcome: a fault stands where the instruction does, with the sp that it would have.
void rewind(Outcome& out, uint64_t at, const Detour& detour, uint64_t patch) {
  auto pc = static_cast<uint64_t>(out.regs[REG_RIP]);
  if (pc < at || pc >= at + detour.bytes.size()) return;
  for (const DetourStep& s : detour.steps) {
    if (s.offset != pc - at || s.original < 0) continue;
    out.regs[REG_RIP] = static_cast<greg_t>(patch + static_cast<uint64_t>(s.original));
    out.regs[REG_RSP] += s.sp_adjust;
  }
}

std::string differing(const Insn& insn, const Outcome& a, const Outcome& b) {
  std::string what;
  if (a.signal != b.signal) what += fmt::format(" signal {} {}", a.signal, b.signal);
  for (int r : {REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15,    REG_RDI, REG_RSI, REG_RBP,
                REG_RBX, REG_RDX, REG_RAX, REG_RCX, REG_RSP, REG_RIP, REG_EFL, REG_TRAPNO, REG_ERR, REG_CR2})
    if (a.regs[r] != b.regs[r]) what += fmt::format(" greg {} {:#x} {:#x}", r, a.regs[r], b.regs[r]);
  if (a.state != b.state) what += " vector or x87 state";
  std::vector<uint8_t> x = a.data, y = b.data;
  // A call that faulted has pushed nothing, its copy has: below the stack pointer.
  auto below = static_cast<size_t>(a.regs[REG_RSP]) - reinterpret_cast<size_t>(data) - 8;
  if (insn.flow == Flow::call_indirect && a.signal != SIGTRAP && below < kDataBytes - 8)
    std::fill_n(x.begin() + static_cast<ptrdiff_t>(below), 8, 0),
        std::fill_n(y.begin() + static_cast<ptrdiff_t>(below), 8, 0);
  if (x != y) what += " memory";
  return what;
}

}  // namespace

TEST_CASE("displaced: every form of instruction of four libraries does what it does where it stands") {
  std::unordered_set<std::string> known;
  std::vector<Insn> forms;
  for (const char* file : {"/usr/lib/x86_64-linux-gnu/libc.so.6", "/usr/lib/x86_64-linux-gnu/libcrypto.so.3",
                           "/usr/lib/x86_64-linux-gnu/libsqlite3.so.0", "/usr/bin/python3"}) {
    auto more = forms_of(file, known);
    forms.insert(forms.end(), more.begin(), more.end());
  }
  CHECK(forms.size() > 20000);
  Laboratory lab;
  std::mt19937_64 random(20260101);
  constexpr int kRounds = 3;
  std::vector<std::vector<uint8_t>> memories;
  for (int i = 0; i < 8; i++) memories.push_back(lab.random_data(random));
  std::vector<Input> inputs;
  for (int i = 0; i < 200; i++) inputs.push_back(lab.random_input(random));
  size_t runs = 0, faults = 0, wrong = 0, evex = 0, relative = 0;
  for (const Insn& form : forms) {
    Insn insn = settle(lab, form);
    Displaced displaced;
    displaced.insns = {insn};
    displaced.length = insn.length;
    Detour detour;
    REQUIRE(build_detour(lab.copy(), lab.copy() + 512, 0, insn.pc, displaced, &detour) == Moved::yes);
    lab.put(lab.original(), insn.code());
    lab.put(lab.copy() - x86_64_detour::kHeader, detour.bytes);
    evex += insn.bytes[0] == 0x62, relative += insn.pc_relative_memory;
    for (int round = 0; round < kRounds; round++) {
      const Input& in = inputs[random() % inputs.size()];
      const auto& memory = memories[random() % memories.size()];
      Outcome there = lab.run(lab.original(), in, memory);
      Outcome here = lab.run(lab.copy() + x86_64_detour::kResumeOffset, in, memory);
      rewind(here, lab.copy(), detour, insn.pc);
      runs++, faults += there.signal != SIGTRAP;
      std::string what = differing(insn, there, here);
      if (!what.empty() && wrong++ < 20) FAIL_CHECK(fmt::format("{:02x}:{}", fmt::join(insn.code(), " "), what));
    }
    lab.clear(lab.original(), 16);
    lab.clear(lab.copy() - x86_64_detour::kHeader, detour.bytes.size());
  }
  CHECK(wrong == 0);
  CHECK(evex > 300);
  CHECK(relative > 300);
  CHECK(runs > 2 * faults);
  MESSAGE(fmt::format("{} forms, {} with EVEX, {} pc-relative; {} runs, {} ended by a fault", forms.size(), evex,
                      relative, runs, faults));
}
