// See test_code.h. Lies among the tests so that it is linked with them only.
#include "host/plan/test_code.h"

#include <algorithm>
#include <cstring>

#define F(name) "test_" #name ":\n"
#define E(name) "test_" #name "_end:\n"

asm(".pushsection sonde_plan_test, \"aw\", @progbits\n"
    ".balign 64\n plan_test_begin:\n"
    // Shorter than any jump, without padding.
    F(ret) " ret\n" E(ret)
    F(ret2) " rep ret\n" E(ret2)
    F(zero) " xor %eax,%eax\n ret\n" E(zero)
    F(id) " mov %edi,%eax\n ret\n" E(id)
    F(inc) " lea 1(%rdi),%eax\n ret\n" E(inc)
    F(jmp) " jmp test_id\n" E(jmp)
    F(ind) " jmp *test_to_inc(%rip)\n" E(ind)
    F(push) " push %rdi\n pop %rax\n ret\n" E(push)
    F(leave) " push %rbp\n mov %rsp,%rbp\n leave\n ret\n" E(leave)
    F(endbr) " endbr64\n ret\n" E(endbr)
    F(seven) " mov $7,%eax\n ret\n" E(seven)
    F(last) " sub $-128,%edi\n mov %edi,%eax\n ret\n" E(last)
    // The same with padding behind.
    ".balign 16, 0x90\n"
    F(pad_ret) " ret\n" E(pad_ret) ".balign 16, 0x90\n"
    F(pad_id) " mov %edi,%eax\n ret\n" E(pad_id) ".balign 16, 0xcc\n"
    F(pad_tail) " jmp test_inc\n" E(pad_tail) ".balign 16, 0x90\n"
    F(pad_falls) " mov %edi,%eax\n" E(pad_falls) ".balign 16, 0x90\n"  // runs into its padding
    F(pad_next) " add $3,%eax\n ret\n" E(pad_next) ".balign 16, 0x90\n"
    // Jumped into.
    F(loop3) " xor %eax,%eax\n1: inc %eax\n dec %edi\n jnz 1b\n ret\n" E(loop3)
    F(loop1) " push %rdi\n2: add $3,%esi\n dec %edi\n jnz 2b\n mov %esi,%eax\n pop %rdi\n ret\n" E(loop1)
    F(mid) " mov %edi,%eax\ntest_mid_in: add %eax,%eax\n add $1,%eax\n ret\n" E(mid)
    F(outsider) " mov $100,%eax\n jmp test_mid_in\n" E(outsider)
    F(tab) " nop\n3: nop\n4: nop\n5: lea (%rdi,%rsi),%eax\n ret\n" E(tab)
    F(viatab) " lea test_table(%rip),%rcx\n and $3,%edi\n movslq %edi,%rdx\n movslq (%rcx,%rdx,4),%rdx\n add %rcx,%rdx\n jmp *%rdx\n" E(viatab)
    F(viaptr) " jmp *test_to_mid_in(%rip)\n" E(viaptr)
    ".balign 4\ntest_table: .long test_tab-test_table, 3b-test_table, 4b-test_table, 5b-test_table\n"
    F(rec) " test %edi,%edi\n jz 6f\n dec %edi\n call test_rec\n inc %eax\n ret\n6: xor %eax,%eax\n ret\n" E(rec)
    F(lock) " xor %eax,%eax\n jmp 7f+1\n7: lock incl -4(%rsp)\n mov -4(%rsp),%ecx\n ret\n" E(lock)
    // What depends on where it stands.
    ".balign 16, 0xcc\n"
    F(load) " mov test_cell(%rip),%eax\n add %edi,%eax\n ret\n" E(load) ".balign 16, 0xcc\n"
    F(lea) " lea test_cell(%rip),%rax\n mov (%rax),%eax\n add %edi,%eax\n ret\n" E(lea) ".balign 16, 0xcc\n"
    F(cmpi) " cmpl $1000,test_cell(%rip)\n jle 1f\n xor %eax,%eax\n ret\n1: mov %edi,%eax\n ret\n" E(cmpi) ".balign 16, 0xcc\n"
    F(stor) " movl $5,test_cell2(%rip)\n mov test_cell2(%rip),%eax\n add %edi,%eax\n ret\n" E(stor) ".balign 16, 0xcc\n"
    F(calli) " push %rdi\n call *test_to_helper(%rip)\n pop %rdi\n add %edi,%eax\n ret\n" E(calli) ".balign 16, 0xcc\n"
    F(call) " push %rbx\n call test_helper\n mov %eax,%ebx\n add %edi,%eax\n pop %rbx\n ret\n" E(call) ".balign 16, 0xcc\n"
    F(callr) " lea test_helper(%rip),%rax\n call test_via_rax\n add %edi,%eax\n ret\n" E(callr) ".balign 16, 0xcc\n"
    F(via_rax) " call *%rax\n add $2,%eax\n ret\n" E(via_rax) ".balign 16, 0xcc\n"
    F(callsp) " push test_to_helper(%rip)\n call test_via_sp\n pop %rcx\n ret\n" E(callsp) ".balign 16, 0xcc\n"
    F(via_sp) " call *8(%rsp)\n add $4,%eax\n ret\n" E(via_sp) ".balign 16, 0xcc\n"
    F(jcc) " test %edi,%edi\n js 2f\n lea 1(%rdi),%eax\n ret\n2: mov %edi,%eax\n neg %eax\n ret\n" E(jcc) ".balign 16, 0xcc\n"
    F(jccn) " cmp $7,%edi\n .byte 0x0f,0x84\n .long test_far-.-4\n mov %edi,%eax\n ret\n" E(jccn) ".balign 16, 0xcc\n"
    F(rcx) " mov %edi,%ecx\n jrcxz 3f\n mov %ecx,%eax\n ret\n3: mov $-1,%eax\n ret\n" E(rcx) ".balign 16, 0xcc\n"
    F(ecx) " jecxz 3f\n mov %ecx,%eax\n ret\n3: mov $-1,%eax\n ret\n" E(ecx) ".balign 16, 0xcc\n"
    F(loop) " mov $3,%cl\n movzbl %cl,%ecx\n4: add %ecx,%edi\n loop 4b\n mov %edi,%eax\n ret\n" E(loop) ".balign 16, 0xcc\n"
    F(loopw) " xor %eax,%eax\n loopne 8f\n inc %eax\n8: ret\n" E(loopw) ".balign 16, 0xcc\n"
    F(getpc) " call 5f\n5: pop %rdx\n add $(test_cell-5b),%rdx\n mov (%rdx),%eax\n add %edi,%eax\n ret\n" E(getpc) ".balign 16, 0xcc\n"
    F(spush) " push %rsp\n pop %rax\n sub %rsp,%rax\n add %edi,%eax\n ret\n" E(spush) ".balign 16, 0xcc\n"
    F(pushf) " pushfq\n pop %rax\n ret\n" E(pushf) ".balign 16, 0xcc\n"
    F(sse) " movss test_float(%rip),%xmm0\n cvttss2si %xmm0,%eax\n add %edi,%eax\n ret\n" E(sse) ".balign 16, 0xcc\n"
    F(ext) " pshufd $0x1b,test_vec(%rip),%xmm0\n movd %xmm0,%eax\n add %edi,%eax\n ret\n" E(ext) ".balign 16, 0xcc\n"
    F(jmpi) " jmp *test_to_inc(%rip)\n" E(jmpi) ".balign 16, 0xcc\n"
    F(helper) " mov $11,%eax\n ret\n" E(helper) ".balign 16, 0xcc\n"
    F(far) " mov $777,%eax\n ret\n" E(far) ".balign 16, 0xcc\n"
    // Red zone and flags live at the entry's displaced instructions.
    F(red) " mov %rdi,-8(%rsp)\n movq $77,-128(%rsp)\n mov -8(%rsp),%rax\n imul -128(%rsp),%rax\n ret\n" E(red) ".balign 16, 0xcc\n"
    F(carry) " adc %rsi,%rdi\n mov %rdi,%rax\n sbb %rdx,%rdx\n ret\n" E(carry) ".balign 16, 0xcc\n"
    F(flags) " setl %al\n setb %cl\n sete %dl\n seto %sil\n ret\n" E(flags) ".balign 16, 0xcc\n"
    // Compilers' nops.
    F(nop5) " .byte 0x0f,0x1f,0x44,0,0\n lea 5(%rdi),%eax\n ret\n" E(nop5) ".balign 16, 0xcc\n"
    F(nops) " endbr64\n nop\n nop\n nop\n nop\n nop\n nop\n lea 6(%rdi),%eax\n ret\n" E(nops) ".balign 16, 0xcc\n"
    F(nop3) " nop\n nop\n nop\n lea 9(%rdi),%eax\n ret\n" E(nop3) ".balign 16, 0xcc\n"
    ".balign 16\ntest_vec: .long 1,2,3,4\ntest_cell: .long 40\ntest_cell2: .long 0\ntest_float: .float 9.5\n"
    ".balign 8\ntest_to_helper: .quad 0\ntest_to_inc: .quad 0\ntest_to_mid_in: .quad 0\n"
    "plan_test_end:\n .popsection\n");

#define NAMES(X) \
  X(ret) X(ret2) X(zero) X(id) X(inc) X(jmp) X(ind) X(push) X(leave) X(endbr) X(seven) X(last) X(pad_ret) X(pad_id) \
  X(pad_tail) X(pad_falls) X(pad_next) X(loop3) X(loop1) X(mid) X(outsider) X(tab) X(viatab) X(viaptr) X(rec) X(lock) \
  X(load) X(lea) X(cmpi) X(stor) X(calli) X(call) X(callr) X(via_rax) X(callsp) X(via_sp) X(jcc) X(jccn) X(rcx) X(ecx) \
  X(loop) X(loopw) X(getpc) X(spush) X(pushf) X(sse) X(ext) X(jmpi) X(helper) X(far) X(red) X(carry) X(flags) X(nop5) \
  X(nops) X(nop3)
extern "C" {
extern const uint8_t plan_test_begin[], plan_test_end[], test_to_helper[], test_to_inc[], test_to_mid_in[], test_mid_in[];
#define X(name) extern const uint8_t test_##name[], test_##name##_end[];
NAMES(X)
#undef X

// Registers in and out, by the numbers of MachineState; read and written by plan_test_run.
uint64_t plan_test_regs[17], plan_test_function, plan_test_stack, plan_test_saved_sp;
uint64_t plan_test_hits[65536];
void plan_test_run();
void plan_test_entry();
}

asm(".pushsection .text\n"
    "plan_test_run:\n"
    " push %rbp\n push %rbx\n push %r12\n push %r13\n push %r14\n push %r15\n"
    " mov %rsp,plan_test_saved_sp(%rip)\n mov plan_test_stack(%rip),%rsp\n push plan_test_regs+128(%rip)\n popfq\n"
#define LOAD(n, r) " mov plan_test_regs+" #n "*8(%rip),%" #r "\n"
#define STORE(n, r) " mov %" #r ",plan_test_regs+" #n "*8(%rip)\n"
#define ALL(X) X(0, rax) X(1, rcx) X(2, rdx) X(3, rbx) X(5, rbp) X(6, rsi) X(7, rdi) X(8, r8) X(9, r9) X(10, r10) \
  X(11, r11) X(12, r12) X(13, r13) X(14, r14) X(15, r15)
    ALL(LOAD)
    " call *plan_test_function(%rip)\n"
    ALL(STORE) STORE(4, rsp)
    " mov plan_test_saved_sp(%rip),%rsp\n pushfq\n pop plan_test_regs+128(%rip)\n cld\n"
    " pop %r15\n pop %r14\n pop %r13\n pop %r12\n pop %rbx\n pop %rbp\n ret\n"
    // In: return point at (%rsp), site number at 8(%rsp).
    "plan_test_entry:\n"
    " push %rax\n push %rcx\n pushfq\n mov 32(%rsp),%eax\n lea plan_test_hits(%rip),%rcx\n incq (%rcx,%rax,8)\n"
    " popfq\n pop %rcx\n pop %rax\n ret\n"
    ".popsection\n");

namespace sonde::host::test {

std::span<const uint8_t> code_block() { return {plan_test_begin, plan_test_end}; }

std::vector<TestFunction> test_functions() {
  auto offset = [](const uint8_t* p) { return static_cast<uint64_t>(p - plan_test_begin); };
#define X(name) {#name, offset(test_##name), offset(test_##name##_end)},
  std::vector<TestFunction> all = {NAMES(X)};
#undef X
  std::sort(all.begin(), all.end(), [](const TestFunction& a, const TestFunction& b) { return a.begin < b.begin; });
  return all;
}

void bind_pointers(uint8_t* block, uint64_t base) {
  auto bind = [&](const uint8_t* cell, const uint8_t* target) {
    uint64_t value = base + static_cast<uint64_t>(target - plan_test_begin);
    std::memcpy(block + (cell - plan_test_begin), &value, 8);
  };
  bind(test_to_helper, test_helper), bind(test_to_inc, test_inc), bind(test_to_mid_in, test_mid_in);
}

MachineState run(uint64_t function, const MachineState& in, uint64_t stack_top) {
  std::memcpy(plan_test_regs, in.reg, sizeof in.reg);
  plan_test_regs[16] = in.flags;
  plan_test_function = function, plan_test_stack = stack_top;
  plan_test_run();
  MachineState out;
  std::memcpy(out.reg, plan_test_regs, sizeof out.reg);
  out.flags = plan_test_regs[16];
  return out;
}

uint64_t counting_entry() { return reinterpret_cast<uint64_t>(&plan_test_entry); }

}  // namespace sonde::host::test
