#include "core/isa/code.h"

#include <doctest/doctest.h>
#include <ucontext.h>

#include <cstddef>
#include <initializer_list>

using namespace sonde;

namespace {
// The eight bytes that end with `bytes`, the rest filled with nops.
uint64_t ending_with(std::initializer_list<int> bytes) {
  uint64_t word = 0x9090909090909090;
  for (int b : bytes) word = word >> 8 | static_cast<uint64_t>(b) << 56;
  return word;
}
}  // namespace

TEST_CASE("code: x86-64 call encodings end before a return address") {
  using C = Code<X86_64>;
  for (auto bytes :
       std::initializer_list<std::initializer_list<int>>{{0xe8, 1, 2, 3, 4},                          // call rel32
                                                         {0xff, 0xd0},                                // call *%rax
                                                         {0x41, 0xff, 0xd7},                          // call *%r15
                                                         {0xff, 0x10},                                // call *(%rax)
                                                         {0xff, 0x14, 0xc3},  // call *(%rbx,%rax,8)
                                                         {0xff, 0x50, 0x18},  // call *24(%rax)
                                                         {0x41, 0xff, 0x54, 0x24, 8},  // call *8(%r12)
                                                         {0xff, 0x15, 1, 2, 3, 0},  // call *disp(%rip)
                                                         {0xff, 0x90, 0, 1, 0, 0},  // call *256(%rax)
                                                         {0xff, 0x94, 0xc3, 0, 1, 0, 0},  // call *256(%rbx,%rax,8)
                                                         {0xff, 0x14, 0xc5, 0, 1, 0, 0}})  // call *256(,%rax,8)
    CHECK(C::may_end_call(ending_with(bytes)));
  CHECK(!C::may_end_call(ending_with({0xc3})));
  CHECK(!C::may_end_call(ending_with({0xff, 0xe0})));  // jmp *%rax
  CHECK(!C::may_end_call(ending_with({0xff, 0x25, 1, 2, 3, 0})));  // jmp *disp(%rip)
  CHECK(!C::may_end_call(ending_with({0xe9, 1, 2, 3, 4})));
  CHECK(!C::may_end_call(ending_with({})));
}

TEST_CASE("code: AArch64 calls") {
  using C = Code<Aarch64>;
  auto after = [](uint32_t insn) { return uint64_t{insn} << 32 | 0xd503201f; };
  for (uint32_t insn : {0x94000001u, 0x97ffffffu, 0xd63f0000u, 0xd63f03c0u, 0xd73f0a21u, 0xd63f083fu, 0xd63f0c3fu})
    CHECK(C::may_end_call(after(insn)));
  for (uint32_t insn : {0x14000001u, 0xd61f0000u, 0xd65f03c0u, 0xd503201fu}) CHECK(!C::may_end_call(after(insn)));
  CHECK(C::is_return(0xd65f03c0));
  CHECK(C::is_return(0xd65f0bff));
  CHECK(!C::is_return(0xd61f0000));
}

TEST_CASE("code: x86-64 functions that end by throwing") {
  using C = Code<X86_64>;
  CHECK(C::is_eh_return(0, 0xe1ff59cc8948));
  CHECK(C::is_eh_return(0, 0x9090c3cc8948));
  CHECK(C::is_eh_return(0, 0x9090e1ff59));
  CHECK(!C::is_eh_return(0, 0x9090905dcc8948));
  CHECK(C::is_eh_return(ending_with({0x59}), 0x9090e1ff));
  CHECK(!C::is_eh_return(ending_with({0x5a}), 0x9090e1ff));
  CHECK(!C::is_eh_return(0, 0x90c359));
}

TEST_CASE("code: signal return sequences of the kernel's ABI") {
  CHECK(Code<X86_64>::is_signal_return(0x0f0000000fc0c748, 0x05));
  CHECK(Code<X86_64>::is_signal_return(0x90050f0000000fb8, 0));
  CHECK(!Code<X86_64>::is_signal_return(0x0f00000010c0c748, 0x05));
  CHECK(Code<Aarch64>::is_signal_return(0xd4000001d2801168, 0));
}

TEST_CASE("code: x86-64 PLT stubs have pushed nothing, the relocation number, or that and the link map") {
  using C = Code<X86_64>;
  auto starting_with = [](std::initializer_list<int> bytes) {
    uint64_t word = 0, shift = 0;
    for (int b : bytes) word |= static_cast<uint64_t>(b) << shift, shift += 8;
    return word;
  };
  uint64_t entry_end = ending_with({0xe9, 0xe0, 0xff, 0xff, 0xff});
  CHECK(C::plt_words(entry_end, starting_with({0xff, 0x25, 1, 2, 3, 0, 0x68, 0})) == 0);
  CHECK(C::plt_words(ending_with({0xff, 0x25, 1, 2, 3, 0}), starting_with({0x68, 4, 0, 0, 0, 0xe9})) == 0);
  CHECK(C::plt_words(ending_with({0x68, 4, 0, 0, 0}), starting_with({0xe9, 1, 2, 3, 0})) == 1);
  CHECK(C::plt_words(ending_with({0x68, 4, 0, 0, 0}), starting_with({0xf2, 0xe9, 1, 2, 3, 0})) == 1);
  CHECK(C::plt_words(0, starting_with({0xff, 0x35, 1, 2, 3, 0})) == 1);
  CHECK(C::plt_words(ending_with({0xff, 0x35, 1, 2, 3, 0}), starting_with({0xff, 0x25, 1, 2, 3, 0})) == 2);
  CHECK(C::plt_words(ending_with({0xff, 0x35, 1, 2, 3, 0}), starting_with({0xf2, 0xff, 0x25, 1, 2, 3, 0})) == 2);
  CHECK(C::plt_words(entry_end, starting_with({0xf3, 0x0f, 0x1e, 0xfa})) == 0);
  CHECK(C::plt_words(entry_end, starting_with({0xe9, 1, 2, 3, 0})) == -1);
  CHECK(C::plt_words(entry_end, starting_with({0x48, 0x89, 0xe5})) == -1);
}

TEST_CASE("code: what an AArch64 PLT stub has pushed") {
  using C = Code<Aarch64>;
  auto two = [](uint32_t first, uint32_t second) { return uint64_t{second} << 32 | first; };
  constexpr uint32_t kPush = 0xa9bf7bf0, kPage = 0x90000090, kLoad = 0xf947fe11, kAdd = 0x913fe210, kJump = 0xd61f0220;
  constexpr uint32_t kNop = 0xd503201f;
  CHECK(C::plt_words(two(kNop, kNop), kPush, 0) == 0);
  CHECK(C::plt_words(two(kNop, kPush), kPage, 0) == 2);
  CHECK(C::plt_words(two(kLoad, kAdd), kJump, two(kPush, kPage)) == 2);
  CHECK(C::plt_words(two(kLoad, kAdd), kJump, two(kJump, kPage)) == 0);
  CHECK(C::plt_words(two(kNop, kNop), kPage, two(kJump, kNop)) == 0);
  CHECK(C::plt_words(two(kPush, kJump), kPage, 0) == 0);  // the header ends with its jump
  CHECK(C::plt_words(0, 0xf9000011, 0) == -1);  // str x17,[x0]
  CHECK(C::plt_words(0, 0xd65f03c0, 0) == -1);
}

#if defined(__x86_64__)
TEST_CASE("code: offsets in the x86-64 signal frame are those of struct ucontext") {
  using R = X86_64;
  constexpr std::pair<unsigned, int> kPairs[] = {
      {R::rax, REG_RAX}, {R::rbx, REG_RBX}, {R::rsp, REG_RSP}, {R::rip, REG_RIP}, {R::rbp, REG_RBP}, {R::r15, REG_R15},
      {R::r8, REG_R8},   {R::rdi, REG_RDI}, {R::r12, REG_R12}, {R::r13, REG_R13}, {R::r14, REG_R14}, {R::rcx, REG_RCX},
      {R::rdx, REG_RDX}, {R::rsi, REG_RSI}, {R::r9, REG_R9},   {R::r10, REG_R10}, {R::r11, REG_R11}};
  for (auto [reg, index] : kPairs)
    CHECK(Code<X86_64>::signal_register(reg) ==
          offsetof(ucontext_t, uc_mcontext.gregs) + 8 * static_cast<size_t>(index));
  CHECK(Code<X86_64>::kSignalStackBase == offsetof(ucontext_t, uc_stack.ss_sp));
  CHECK(Code<X86_64>::kSignalStackSize == offsetof(ucontext_t, uc_stack.ss_size));
}
#elif defined(__aarch64__)
TEST_CASE("code: offsets in the AArch64 signal frame are those of struct ucontext") {
  CHECK(Code<Aarch64>::signal_register(0) == 128 + offsetof(ucontext_t, uc_mcontext.regs));
  CHECK(Code<Aarch64>::signal_register(Aarch64::sp) == 128 + offsetof(ucontext_t, uc_mcontext.sp));
  CHECK(Code<Aarch64>::signal_register(Aarch64::pc) == 128 + offsetof(ucontext_t, uc_mcontext.pc));
  CHECK(Code<Aarch64>::kSignalStackBase == 128 + offsetof(ucontext_t, uc_stack.ss_sp));
  CHECK(Code<Aarch64>::kSignalStackSize == 128 + offsetof(ucontext_t, uc_stack.ss_size));
}
#endif
