// In-target walks over the kernel's signal frames on AArch64, started by a handler and from the registers that it was given. Run
// under `qemu-aarch64 -singlestep`, where a timer's signal may come at any instruction.
//
// usage: aarch64_signals ARENA SIGNALS
//   ARENA   the block of core/unwind/arena.h about this very program (arena_of.cc), which is linked to fixed addresses
//
// The truth is not found by unwinding: functions call each other in a fixed order, each from one place, which is read from their
// instructions. So where a signal came says who called.
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <unistd.h>

#include <bitset>
#include <iterator>

#include "core/isa/code.h"
#include "core/walk/reason.h"
#include "core/walk/walker.h"

using namespace sonde;

extern "C" [[noreturn]] void _start();
extern void* __libc_stack_end;
// The C library leaves it to the kernel where handlers return to; in qemu that is in no file.
extern "C" void return_from_signal();
asm(".text\n.p2align 2\nnop\n.globl return_from_signal\nreturn_from_signal: mov x8, #139\nsvc #0\n");

namespace {

volatile long sink;

#define LEVEL [[gnu::noinline, gnu::noclone]]
LEVEL long level0(long x) {
  sink = sink + x;
  return x * 3 + 1;
}
LEVEL long level1(long x) { return level0(x + 1) + x; }
[[gnu::optimize("omit-frame-pointer")]] LEVEL long level2(long x) { return level1(x ^ 5) * x; }
LEVEL long level3(long x) {
  volatile char big[70000];
  big[x & 0xffff] = 1;
  long r = level2(x);
  return r + big[x & 0xffff];
}
LEVEL long level4(long x) {
  auto* p = static_cast<char*>(__builtin_alloca(static_cast<size_t>(x & 63) + 16));
  memset(p, static_cast<int>(x), static_cast<size_t>(x & 63) + 1);
  long r = level3(p[x & 15] + x);
  sink = p[0];
  return r;
}
LEVEL long level5(long x) {
  if (x & 1) return x;  // no frame on this way
  long a = x * 3, b = x ^ 77, c = x + 5;
  for (int i = 0; i < 3; i++) a += b ^ c, b -= a, c += i;
  long r = level4(x);
  return r + a + b + c;
}
LEVEL double level6(double y) {
  double r = y * 1.5;
  r += static_cast<double>(level5(static_cast<long>(y)));
  return r * y;
}
LEVEL long level7(long x) {
  sink = x;
  return static_cast<long>(level6(static_cast<double>(x & 1023)));
}
LEVEL long rounds(long n) {
  long sum = 0;
  for (long i = 0; i < n; i++) sum += level7(i);
  return sum;
}
uint64_t work_returns_to, main_returns_to;
extern unsigned long signals;
// Until so many more signals have come.
LEVEL long work(unsigned long more) {
  work_returns_to = reinterpret_cast<uint64_t>(__builtin_extract_return_addr(__builtin_return_address(0)));
  long sum = 0;
  for (unsigned long until = signals + more; *const_cast<volatile unsigned long*>(&signals) < until;) sum += rounds(20);
  return sum;
}
LEVEL void after_all() { sink = 0; }

#define CODE(f) reinterpret_cast<uint64_t>(&f)
const uint64_t kFunctions[] = {CODE(level0), CODE(level1), CODE(level2), CODE(level3), CODE(level4),
                               CODE(level5), CODE(level6), CODE(level7), CODE(rounds), CODE(work)};
constexpr unsigned kLevels = std::size(kFunctions);
uint64_t ends[kLevels];  // of the functions' code
uint64_t returns_to[kLevels];  // of each but the last: behind its one call
unsigned long signals;

uint32_t insn(uint64_t at) { return *reinterpret_cast<const uint32_t*>(at); }

// The functions follow each other in this order.
void read_truth() {
  for (unsigned i = 0; i < kLevels; i++) {
    ends[i] = i + 1 < kLevels ? kFunctions[i + 1] : CODE(after_all);
    unsigned calls = 0;
    for (uint64_t at = kFunctions[i]; i > 0 && at < ends[i]; at += 4) {
      int64_t distance = static_cast<int32_t>(insn(at) << 6) >> 6;
      if (insn(at) >> 26 == 0x25 && at + static_cast<uint64_t>(distance * 4) == kFunctions[i - 1])
        returns_to[i - 1] = at + 4, calls++;
    }
    if (ends[i] <= kFunctions[i] || (i > 0 && calls != 1))
      fprintf(stderr, "function %u: %u calls\n", i, calls), exit(2);
  }
}
// Which of the functions; kLevels: none.
unsigned level_of(uint64_t pc) {
  for (unsigned i = 0; i < kLevels; i++)
    if (kFunctions[i] <= pc && pc < ends[i]) return i;
  return kLevels;
}

const TableArena* arena;
RowCache cache;
RawMemory memory;

struct Counts {
  unsigned long in_functions, without_frame, elsewhere, alternate, wrong;
} counts;
std::bitset<1 << 14> seen;  // instructions of the functions that were interrupted

void wrong(const char* what, const Frame* frames, const WalkResult& result, uint64_t pc) {
  if (counts.wrong++ > 3) return;
  printf("WRONG: %s; interrupted at %#lx (function %u), %s\n", what, pc, level_of(pc), describe(result.reason));
  for (unsigned i = 0; i < result.frames; i++)
    printf("  #%u %#lx cfa %#lx %s\n", i, frames[i].pc.value, frames[i].cfa.value, describe(frames[i].reason));
}

// `frames` begin with the interrupted one.
const char* fault(const Frame* frames, unsigned count, uint64_t pc) {
  if (count < 3 || frames[0].pc.value != pc || frames[0].is_return) return "the interrupted pc";
  unsigned at = 0, level = level_of(pc);
  // In a function of the C library that one of these has called, or its caller.
  if (level == kLevels && (at = 1, level = level_of(frames[1].pc.value - 1)) == kLevels) return nullptr;
  for (; level < kLevels; level++)
    if (++at >= count || frames[at].pc.value != (level + 1 < kLevels ? returns_to[level] : work_returns_to))
      return "a caller";
  if (++at >= count || frames[at].pc.value != main_returns_to) return "main's caller";
  if (frames[count - 1].pc.value - CODE(_start) > 64) return "the end";
  for (unsigned i = 0; i < count; i++)
    if (!is_reliable(frames[i])) return "not reliable";
  return nullptr;
}

[[gnu::always_inline]] inline void capture(RegSet<Aarch64>* regs) {
  asm volatile(
      "stp x19, x20, [%0, #152]\n stp x21, x22, [%0, #168]\n stp x23, x24, [%0, #184]\n stp x25, x26, [%0, #200]\n"
      "stp x27, x28, [%0, #216]\n stp x29, x30, [%0, #232]\n mov x9, sp\n adr x10, .\n stp x9, x10, [%0, #248]\n"
      :
      : "r"(regs->value)
      : "x9", "x10", "memory");
  regs->valid = uint64_t{0x1fff} << 19 | uint64_t{3} << 31;
}

// One signal, at some time soon. A timer that goes on by itself would send the next while a slow handler still runs: nothing but
// handlers would run then.
int timer;  // ITIMER_REAL or ITIMER_PROF
void next_signal() {
  static uint32_t random = 1;
  random = random * 1664525 + 1013904223;
  itimerval once{{0, 0}, {0, static_cast<long>(100 + random / 65536 % 512)}};
  setitimer(static_cast<__itimer_which_t>(timer), &once, nullptr);
}

[[gnu::noinline]] void handler(int number, siginfo_t*, void* context) {
  static Frame frames[64], given[64];
  auto& machine = static_cast<ucontext_t*>(context)->uc_mcontext;
  signals++;
  const unsigned level = level_of(machine.pc);
  WalkStart<Aarch64> own;
  capture(&own.regs);
  own.reliable_only = number == SIGALRM;
  WalkResult result = walk(arena, signals % 2 ? &cache : nullptr, memory, own, std::span<Frame>(frames));
  const char* what = nullptr;
  if (!result.whole()) what = "not whole";
  else if (result.frames < 5 || level_of(frames[0].pc.value) != kLevels) what = "the handler";
  else what = fault(frames + 2, result.frames - 2, machine.pc);
  if (!what && frames[1].cfa.value != machine.sp) what = "the interrupted sp";
  if (what) wrong(what, frames, result, machine.pc);

  WalkStart<Aarch64> start;
  for (unsigned reg = 0; reg < 31; reg++) start.regs.set(reg, machine.regs[reg]);
  start.regs.set(Aarch64::sp, machine.sp), start.regs.set(Aarch64::pc, machine.pc);
  WalkResult again = walk(arena, &cache, memory, start, std::span<Frame>(given));
  what = again.whole() ? fault(given, again.frames, machine.pc) : "not whole";
  if (!what && again.frames + 2 != result.frames) what = "as many as over the signal frame";
  if (what) wrong(what, given, again, machine.pc);

  if (level < kLevels) counts.in_functions++, seen[(machine.pc - kFunctions[0]) / 4 % seen.size()] = true;
  else counts.elsewhere++;
  counts.without_frame += level < kLevels && given[0].cfa.value == machine.sp;
  counts.alternate += number == SIGPROF;
  next_signal();
}

void handle(int signal, int flags) {
  constexpr unsigned long kRestorer = 0x04000000;
  struct {
    void (*handler)(int, siginfo_t*, void*);
    unsigned long flags;
    void (*restorer)();
    unsigned long mask;
  } action{handler, SA_SIGINFO | kRestorer | static_cast<unsigned long>(flags), return_from_signal, 0};
  action.mask = 1ul << (SIGALRM - 1) | 1ul << (SIGPROF - 1);
  if (syscall(SYS_rt_sigaction, signal, &action, nullptr, sizeof action.mask)) perror("rt_sigaction"), exit(2);
}

const TableArena* map(const char* path) {
  int fd = open(path, O_RDONLY);
  struct stat st;
  if (fd < 0 || fstat(fd, &st)) perror(path), exit(2);
  void* at = mmap(nullptr, static_cast<size_t>(st.st_size), PROT_READ, MAP_PRIVATE, fd, 0);
  if (at == MAP_FAILED) perror(path), exit(2);
  return static_cast<const TableArena*>(at);
}

}  // namespace

int main(int count, char** words) {
  if (count != 3) return 2;
  arena = map(words[1]);
  const unsigned long enough = strtoul(words[2], nullptr, 10);
  read_truth();
  static char alternate[1 << 16];
  auto stack_end = (reinterpret_cast<uint64_t>(__libc_stack_end) | 0xfff) + 1;
  memory.stacks[0] = {Addr(stack_end - (4 << 20)), Addr(stack_end)};
  memory.stacks[1] = {Addr(reinterpret_cast<uint64_t>(alternate)),
                      Addr(reinterpret_cast<uint64_t>(alternate) + sizeof alternate)};
  memory.stack_count = 2;
  stack_t other{};
  other.ss_sp = alternate, other.ss_size = sizeof alternate;
  sigaltstack(&other, nullptr);
  handle(SIGALRM, 0), handle(SIGPROF, SA_ONSTACK);
  main_returns_to = reinterpret_cast<uint64_t>(__builtin_extract_return_addr(__builtin_return_address(0)));
  long sum = 0;
  volatile unsigned long more = 0;  // before any signal comes work() has noted who called it
  while (signals < enough) {
    sum += work(more);
    if (more) timer = timer == ITIMER_REAL ? ITIMER_PROF : ITIMER_REAL;  // from the next signal on
    else next_signal();
    more = 50;
  }
  printf(
      "%lu signals, %lu of them on another stack, %lu in these functions at %zu places, %lu without a frame of their "
      "own, "
      "%lu elsewhere, %lu wrong\n",
      signals, counts.alternate, counts.in_functions, seen.count(), counts.without_frame, counts.elsewhere,
      counts.wrong);
  if (sum == 42) puts("");
  bool enough_kinds =
      counts.in_functions * 2 > signals && counts.without_frame > 10 && counts.alternate > 10 && seen.count() > 100;
  if (!enough_kinds) puts("too few of a kind");
  return counts.wrong || !enough_kinds ? 1 : 0;
}
