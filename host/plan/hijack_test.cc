// The functions judged are this file's own: compiled ones, whose source says whether they look at their return address,
// and hand-written ones.
#include "host/plan/hijack.h"

#include <alloca.h>
#include <doctest/doctest.h>

#include <cstdarg>
#include <cstdlib>
#include <cstring>

using namespace sonde;
using namespace sonde::host;

#define SUBJECT extern "C" [[gnu::noinline, gnu::noclone, gnu::optimize("O2"), gnu::used]]
#define SUBJECT_O0 extern "C" [[gnu::noinline, gnu::noclone, gnu::optimize("O0"), gnu::used]]

extern "C" void plan_test_sink(void*);
extern "C" [[gnu::noinline, gnu::used]] void plan_test_sink(void* p) { asm volatile("" : : "r"(p) : "memory"); }

SUBJECT void* plan_test_who() { return __builtin_return_address(0); }
SUBJECT_O0 void* plan_test_who_frame() { return __builtin_return_address(0); }
SUBJECT int plan_test_who_late(int n) {
  char buffer[200];
  for (int i = 0; i < n; i++) plan_test_sink(buffer + i);
  plan_test_sink(__builtin_return_address(0));
  return buffer[n % 200];
}
SUBJECT void plan_test_who_cold(int n) {
  plan_test_sink(&n);
  if (__builtin_expect(n == 7, 0)) {
    plan_test_sink(__builtin_return_address(0));
    abort();
  }
  plan_test_sink(&n);
}

SUBJECT int plan_test_plain(int n) { return n * 3; }
SUBJECT int plan_test_alloca(int n) {
  auto* p = static_cast<char*>(alloca(static_cast<size_t>(n)));
  plan_test_sink(p);
  return p[n / 2];
}
SUBJECT int plan_test_vla_scopes(int n) {
  int sum = 0;
  for (int i = 1; i < n; i++) {
    char scope[i];
    plan_test_sink(scope);
    sum += scope[i / 2];
  }
  return sum;
}
SUBJECT int plan_test_aligned(int n) {
  alignas(128) char buffer[256];
  plan_test_sink(buffer + n);
  return buffer[n & 255];
}
SUBJECT int plan_test_varargs(int n, ...) {
  va_list list;
  va_start(list, n);
  int sum = 0;
  while (n-- > 0) sum += va_arg(list, int);
  va_end(list);
  return sum;
}
SUBJECT int plan_test_switch(int n, int m) {
  char buffer[40];
  plan_test_sink(buffer);
  switch (n) {
    case 0: return m + buffer[1];
    case 1: plan_test_sink(&n); return m * 2;
    case 2: return buffer[m & 31] * 3;
    case 3: return m / 7;
    case 4: plan_test_sink(&m); return m << 3;
    case 5: return buffer[3] - m;
    case 6: return m % 9;
    default: abort();
  }
}
SUBJECT int plan_test_dies(int n) {
  if (n < 0) abort();
  char buffer[64];
  plan_test_sink(buffer);
  if (buffer[n & 63] == 1) abort();
  return n;
}
SUBJECT void plan_test_stack_arguments(long a, long b, long c, long d, long e, long f, long g, long h) {
  long sum[2] = {a + b + c + d, e + f + g * h};
  plan_test_sink(sum);
}

asm(".pushsection .text\n"
#define F(name) ".type plan_test_" #name ",@function\nplan_test_" #name ":\n"
#define E(name) ".size plan_test_" #name ",.-plan_test_" #name "\n"
    F(pops) " pop %rcx\n jmp *%rcx\n" E(pops)
    F(writes) " mov %rdi,(%rsp)\n ret\n" E(writes)
    F(swaps) " xchg %rdi,(%rsp)\n ret\n" E(swaps)
    F(retpoline) " call 1f\n2: pause\n lfence\n jmp 2b\n1: mov %rax,(%rsp)\n ret\n" E(retpoline)
    F(push_ret) " push %rdi\n ret\n" E(push_ret)
    F(fiber) " push %rbx\n push %rbp\n mov %rsp,(%rdi)\n mov (%rsi),%rsp\n pop %rbp\n pop %rbx\n ret\n" E(fiber)
    F(fiber2) " mov %rsp,(%rdi)\n mov %rsi,%rsp\n pop %rcx\n jmp *%rcx\n" E(fiber2)
    F(drops) " mov %edi,%eax\n ret $8\n" E(drops)
    F(gives_slot) " lea (%rsp),%rdi\n jmp plan_test_sink\n" E(gives_slot)
    F(gives_slot2) " push %rbx\n lea 8(%rsp),%rdi\n call plan_test_sink\n pop %rbx\n ret\n" E(gives_slot2)
    F(copies_slot) " movups -8(%rsp),%xmm0\n ret\n" E(copies_slot)
    F(calls_slot) " call *(%rsp)\n ret\n" E(calls_slot)
    F(barrier) " lock orq $0,(%rsp)\n ret\n" E(barrier)
    F(getpc) " call 3f\n3: pop %rax\n ret\n" E(getpc)
    F(red_zone) " mov %rdi,-8(%rsp)\n mov -8(%rsp),%rax\n ret\n" E(red_zone)
    F(probes) " lea -0x5000(%rsp),%r11\n4: sub $0x1000,%rsp\n orq $0,(%rsp)\n cmp %r11,%rsp\n jne 4b\n add $0x5000,%rsp\n ret\n" E(probes)
    F(drap) " lea 8(%rsp),%r10\n and $-32,%rsp\n push -8(%r10)\n push %rbp\n mov %rsp,%rbp\n push %r10\n sub $40,%rsp\n"
            " call plan_test_sink\n mov -8(%rbp),%r10\n leave\n lea -8(%r10),%rsp\n ret\n" E(drap)
    F(drap_who) " lea 8(%rsp),%r10\n and $-32,%rsp\n push -8(%r10)\n push %rbp\n mov %rsp,%rbp\n push %r10\n"
                " mov 8(%rbp),%rax\n mov -8(%rbp),%r10\n leave\n lea -8(%r10),%rsp\n ret\n" E(drap_who)
    ".popsection\n");

namespace {

NoHijack judge(const std::string& name) {
  static const auto image = Image::open("/proc/self/exe");
  REQUIRE(image);
  static const LoadedImage loaded{*image, 0, {Addr(0), Addr(0)}};
  static const CodeView view = view_code(loaded);
  for (auto& f : (*image)->functions())
    if (f.name == "plan_test_" + name) return no_hijack_by_code(view, {f.range.begin.value, f.range.end.value});
  FAIL("no such function: " << name);
  return NoHijack::none;
}

}  // namespace

TEST_CASE("compiled functions that look at their return address are found") {
  for (const char* name : {"who", "who_frame", "who_late", "who_cold"}) {
    CAPTURE(name);
    CHECK(judge(name) == NoHijack::reads_return_address);
  }
}

TEST_CASE("ordinary compiled functions may be hijacked") {
  for (const char* name :
       {"plain", "alloca", "vla_scopes", "aligned", "varargs", "switch", "dies", "stack_arguments"}) {
    CAPTURE(name);
    CHECK(judge(name) == NoHijack::none);
  }
}

TEST_CASE("hand-written functions are judged by what they do to the slot") {
  CHECK(judge("pops") == NoHijack::pops_return_address);
  CHECK(judge("writes") == NoHijack::pops_return_address);
  CHECK(judge("swaps") == NoHijack::reads_return_address);
  CHECK(judge("retpoline") == NoHijack::returns_elsewhere);
  CHECK(judge("push_ret") == NoHijack::returns_elsewhere);
  CHECK(judge("fiber") == NoHijack::returns_elsewhere);
  CHECK(judge("fiber2") == NoHijack::returns_elsewhere);
  CHECK(judge("drops") == NoHijack::pops_arguments);
  CHECK(judge("gives_slot") == NoHijack::reads_return_address);
  CHECK(judge("gives_slot2") == NoHijack::reads_return_address);
  CHECK(judge("copies_slot") == NoHijack::reads_return_address);
  CHECK(judge("calls_slot") == NoHijack::reads_return_address);
  for (const char* name : {"barrier", "getpc", "red_zone", "probes"}) {
    CAPTURE(name);
    CHECK(judge(name) == NoHijack::none);
  }
  // Realigned frames push a copy above the saved frame pointer.
  CHECK(judge("drap") == NoHijack::none);
  CHECK(judge("drap_who") == NoHijack::reads_return_address);
}

TEST_CASE("known names") {
  CHECK(no_hijack_by_name("dlopen") == NoHijack::reads_return_address);
  CHECK(no_hijack_by_name("__sigsetjmp") == NoHijack::returns_twice);
  CHECK(no_hijack_by_name("vfork") == NoHijack::returns_twice);
  CHECK(no_hijack_by_name("clone3") == NoHijack::returns_elsewhere);
  CHECK(no_hijack_by_name("_Unwind_RaiseException") == NoHijack::returns_elsewhere);
  CHECK(no_hijack_by_name("__asan_report_load4") == NoHijack::sanitizer_entry);
  CHECK(no_hijack_by_name("__interceptor_memcpy") == NoHijack::sanitizer_entry);
  CHECK(no_hijack_by_name("memcpy") == NoHijack::none);
  CHECK(no_hijack_by_name("") == NoHijack::none);
}
