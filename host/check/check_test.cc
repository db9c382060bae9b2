// Small functions with right and wrong tables. Which instructions are wrong follows from their text.
#include "host/check/check.h"

#include <algorithm>

#include "host/check/proven_table.h"
#include "host/check/testing.h"
#include "host/tables/cache.h"
#include "host/tables/refute.h"

namespace sonde::host::check {
namespace {

// One function `f`, its body in assembly.
std::string function(const std::string& body) {
  return ".text\n.globl f\n.type f, @function\nf:\n.cfi_startproc\n" + body +
         "\n.cfi_endproc\n.size f, . - f\n.section .note.GNU-stack, \"\", @progbits\n";
}

Checked check(const std::string& body) {
  Built built(function(body), ".S", "gcc -nostdlib -shared -Wl,--build-id=none");
  return Checked(built.path());
}

void all_right(const std::string& body) {
  CAPTURE(body);
  Checked c = check(body);
  CHECK(c.wrong("f") == "");
  const Counts& counts = c.function("f").counts;
  CHECK(counts[static_cast<unsigned>(Verdict::right)] > 0);
  for (Verdict v : {Verdict::wrong, Verdict::missing, Verdict::unknown, Verdict::unreached})
    CHECK(counts[static_cast<unsigned>(v)] == 0);
}

TEST_CASE("check: tables that say what the code does") {
  all_right("ret");
  all_right(
      "push %rbx; .cfi_def_cfa_offset 16; .cfi_offset 3,-16; xor %ebx,%ebx; pop %rbx; .cfi_def_cfa_offset 8; "
      ".cfi_restore 3; ret");
  // The row of a popped register may stay: its word is still there, in the red zone.
  all_right("push %rbx; .cfi_def_cfa_offset 16; .cfi_offset 3,-16; pop %rbx; .cfi_def_cfa_offset 8; ret");
  all_right(
      "push %rbp; .cfi_def_cfa_offset 16; .cfi_offset 6,-16; mov %rsp,%rbp; .cfi_def_cfa_register 6; sub %rdi,%rsp;"
      "call *%rsi; leave; .cfi_def_cfa 7,8; .cfi_restore 6; ret");
  all_right(
      "lea 8(%rsp),%r10; .cfi_def_cfa 10,0; and $-32,%rsp; push -8(%r10); push %rbp; mov %rsp,%rbp;"
      ".cfi_escape 0x10,6,2,0x76,0; push %r10; .cfi_escape 0x0f,3,0x76,0x78,6; call *%rdi;"
      "mov -8(%rbp),%r10; .cfi_def_cfa 10,0; leave; .cfi_restore 6; lea -8(%r10),%rsp; .cfi_def_cfa 7,8; ret");
  // Two ways to one place, and a way that ends in a call which does not return.
  all_right("test %edi,%edi; je 1f; sub $24,%rsp; .cfi_def_cfa_offset 32; call g@plt; .cfi_def_cfa_offset 8; 1: ret");
  all_right(
      "mov (%rsp),%rax; pop %rcx; .cfi_def_cfa_offset 0; .cfi_register 16,2; push %rcx; .cfi_def_cfa_offset 8; "
      ".cfi_offset 16,-8; ret");
  all_right("mov $-4096,%rax; add %rax,%rsp; .cfi_def_cfa_offset 4104; sub %rax,%rsp; .cfi_def_cfa_offset 8; ret");
}

TEST_CASE("check: functions that calls enter in the midst of another are judged, where its first row claims a frame") {
  // As in an interpreter: one row for `f`, whose code others jump to with the frame made, except where they call.
  auto source = [](const char* first_row) {
    return function(std::string(first_row) + R"(
      mov %rdi, %rax
      jmp *(%rsi)
    inner: push %rbx
      push %rbp
      sub $24, %rsp
      mov %rdi, %rbx
      call small
      add $24, %rsp
      pop %rbp
      pop %rbx
      ret
    small: mov %rdi, %rax
      ret
    )") + ".text\n.globl g\n.type g, @function\ng:\n.cfi_startproc\nsub $8,%rsp\n.cfi_def_cfa_offset 16\ncall inner\n"
          "add $8,%rsp\n.cfi_def_cfa_offset 8\nret\n.cfi_endproc\n.size g, . - g\n";
  };
  Built built(source(".cfi_def_cfa_offset 48; .cfi_offset 3,-16; .cfi_offset 6,-24;"), ".S", "gcc -nostdlib -shared");
  Checked c(built.path());
  // Right are only the three instructions that stand inside the frame; f's own two would be right for nobody who calls it.
  CHECK(c.wrong("f") == "0 cfa\n3 cfa\n5 cfa\n6 cfa\n7 cfa\n23 cfa\n24 cfa\n25 cfa\n26 cfa\n29 cfa\n");
  CHECK(c.wrong("g") == "");
  CHECK(contradicts_a_prologue(*c.image, c.table()));
  // The rows that are left say nothing of a prologue any more, so a second look finds nothing.
  auto marked = mark_refuted(c.table(), c.report.refuted());
  REQUIRE(marked);
  CHECK(!contradicts_a_prologue(*c.image, Table::at(marked->data())));

  // A function that begins as one that was called is judged as a whole.
  Built usual(source(""), ".S", "gcc -nostdlib -shared");
  Checked u(usual.path());
  CHECK(u.wrong("f") == "");
  CHECK(!contradicts_a_prologue(*u.image, u.table()));
}

TEST_CASE("check: a file whose rows contradict a prologue is checked before its table is used, once") {
  Built built(function(".cfi_def_cfa_offset 48; jmp *%rax; inner: push %rbx; push %rbp; sub $24,%rsp; jmp *%rsi; "
                       ".cfi_endproc; .globl h; .type h,@function; h: .cfi_startproc; jmp *%rdi; call inner; ret"),
              ".S", "gcc -nostdlib -shared -Wl,--build-id");
  auto image = Image::open(built.path());
  REQUIRE(image);
  Built folder("", ".c", "true");  // for its folder
  auto refuted = [&](const SharedTable& table) {
    size_t bytes = 0;
    table->table().for_each([&](ImageAddr begin, ImageAddr end, const Row* row) {
      if (row && row->flags & kRowRefuted) bytes += static_cast<size_t>(end - begin);
    });
    return bytes;
  };
  std::string cache = std::filesystem::path(folder.path()).parent_path() / "cache";
  std::filesystem::create_directory(cache);
  auto first = load_proven_table(**image, cache), second = load_proven_table(**image, cache),
       without = load_proven_table(**image, "");
  REQUIRE((first && second && without));
  CHECK(!(*first)->from_cache());
  CHECK((*second)->from_cache());
  for (auto& table : {*first, *second, *without}) CHECK(refuted(table) == 8);  // f's jump; push, push, sub
}

TEST_CASE("check: jump tables are followed") {
  const char* body = R"(
    push %rbx
    .cfi_def_cfa_offset 16
    .cfi_offset 3,-16
    cmp $1, %edi
    ja 2f
    mov %edi, %edi
    lea table(%rip), %rdx
    movslq (%rdx,%rdi,4), %rax
    add %rdx, %rax
    jmp *%rax
 0: add $8, %rsp
    .cfi_def_cfa_offset 8
    ret
    .cfi_def_cfa_offset 16
 1: mov $1, %ebx
 2: pop %rbx
    .cfi_def_cfa_offset 8
    ret
    .pushsection .rodata
table: .long 0b-table, 1b-table
    .long 0x12345678
    .popsection
  )";
  Checked c = check(body);
  CHECK(c.count("f", Verdict::unreached) == 0);
  CHECK(c.wrong("f") == "");
  CHECK(c.count("f", Verdict::unknown) == 0);
}

TEST_CASE("check: each kind of contradiction is found, at its instructions only") {
  SUBCASE("a push that the table does not know") {
    Checked c = check("push %rbx; nop; pop %rbx; ret");
    CHECK(c.wrong("f") == "1 cfa\n2 cfa\n");
    const Finding& finding = c.function("f").findings.at(0);
    CHECK(finding.row == "cfa=rsp+8 ra=[cfa-8]");
    CHECK(finding.truth == "cfa=rsp+16 ra=[cfa-8]");
    CHECK(finding.insn == "nop");
    CHECK(finding.length == 1);
  }
  SUBCASE("a register that is changed and saved, but not in the table") {
    Checked c = check("mov %rbx,-8(%rsp); mov %rdi,%rbx; mov -8(%rsp),%rbx; ret");
    CHECK(c.wrong("f") == "8 rbx\n");
    CHECK(c.function("f").findings.at(0).truth == "cfa=rsp+8 ra=[cfa-8] rbx=[cfa-16]");
  }
  SUBCASE("a register said to be saved before it is") {
    CHECK(check(".cfi_offset 12,-16; mov %rdi,%rax; push %r12; .cfi_def_cfa_offset 16; pop %r12; .cfi_def_cfa_offset "
                "8; ret")
              .wrong("f") == "0 r12\n3 r12\n");
  }
  SUBCASE("two registers' places mixed up") {
    CHECK(
        check("push %rbx; .cfi_def_cfa_offset 16; .cfi_offset 6,-16; push %rbp; .cfi_def_cfa_offset 24; .cfi_offset "
              "3,-24;"
              "pop %rbp; .cfi_def_cfa_offset 16; pop %rbx; .cfi_def_cfa_offset 8; .cfi_restore 3; .cfi_restore 6; ret")
            .wrong("f") == "1 rbp\n2 rbp, rbx\n3 rbp, rbx\n");
  }
  SUBCASE("the rule of a realigned frame that stays behind leave") {
    Checked c = check(
        "lea 8(%rsp),%r10; .cfi_def_cfa 10,0; and $-32,%rsp; push -8(%r10); push %rbp; mov %rsp,%rbp;"
        ".cfi_escape 0x10,6,2,0x76,0; push %r10; .cfi_escape 0x0f,3,0x76,0x78,6;"
        "mov -8(%rbp),%r10; .cfi_def_cfa 10,0; leave; lea -8(%r10),%rsp; .cfi_def_cfa 7,8; ret");
    CHECK(c.wrong("f") == "24 rbp\n28 rbp\n");
  }
  SUBCASE("aligned, and still found by the stack pointer") {
    CHECK(
        check(
            "mov %rsp,%rax; .cfi_def_cfa_register 0; and $-64,%rsp; .cfi_def_cfa 7,8; sub $64,%rsp; mov %rax,%rsp; ret")
            .wrong("f") == "11 cfa\n");
  }
  SUBCASE("a return address that lies elsewhere") { CHECK(check(".cfi_offset 16,-16; ret").wrong("f") == "0 ra\n"); }
}

TEST_CASE("check: what cannot be proven is never called wrong") {
  auto none_wrong = [](const std::string& body) {
    CAPTURE(body);
    Checked c = check(body);
    CHECK(c.wrong("f") == "");
    return c.count("f", Verdict::unknown) + c.count("f", Verdict::unreached);
  };
  // Two ways with frames of different sizes to one place: on one of them the row is right.
  CHECK(none_wrong("test %edi,%edi; je 1f; push %rbx; .cfi_def_cfa_offset 16; 1: mov (%rsp),%rax; ret") > 0);
  // The same, where the way on which it is right leads through a call that might not return.
  CHECK(none_wrong("push %rbx; .cfi_def_cfa_offset 16; .cfi_offset 3,-16; test %edi,%edi; je 1f; call *%rsi; pop %rbx;"
                   ".cfi_def_cfa_offset 8; 1: ret") > 0);
  // A stack that somebody else has laid out.
  CHECK(none_wrong("mov %rdi,%rsp; .cfi_def_cfa 7,8; pop %rbx; ret") > 0);
  // Behind a jump that leads nobody knows where.
  CHECK(none_wrong("jmp *%rdi; push %rbx; ret") > 0);
  // The frame's size is a number that memory holds.
  CHECK(none_wrong(
            "sub (%rdi),%rsp; .cfi_def_cfa_offset 48; mov (%rsp),%rax; add (%rdi),%rsp; .cfi_def_cfa_offset 8; ret") >
        0);
  // Registers kept where a pointer leads.
  CHECK(none_wrong("mov %rbx,(%rdi); mov $1,%ebx; .cfi_undefined 3; mov (%rdi),%rbx; .cfi_restore 3; ret") > 0);
}

// Its caller's return address has left the stack: a return trampoline.
TEST_CASE("check: code that is entered by a return begins with the stack as its caller had it") {
  const char* expression =
      ".cfi_escape 0x16,16,3,0x38,0x1c,0x06;";  // RA is the word below the CFA, as a computed value
  std::string begin = std::string(".cfi_def_cfa 7,0;") + expression;
  Checked right = check(begin +
                        "lea -8(%rsp),%rsp; .cfi_def_cfa_offset 8; push %rax; .cfi_def_cfa_offset 16;"
                        "pop %rax; .cfi_def_cfa_offset 8; ret");
  CHECK(right.wrong("f") == "");
  CHECK(right.count("f", Verdict::unknown) == 4);
  Checked late = check(begin + "lea -8(%rsp),%rsp; .cfi_def_cfa_offset 8; push %rax; pop %rax; ret");
  CHECK(late.wrong("f") == "6 cfa\n");
}

TEST_CASE("check: code without a row is missing, outermost and signal frames are not judged") {
  Built built(
      ".text\n.globl f\n.type f,@function\nf: nop; ret\n.size f,.-f\n.globl g\n.type g,@function\ng: .cfi_startproc; "
      ".cfi_undefined 16; push %rbx; hlt; .cfi_endproc; .size g,.-g\n.globl h\n.type h,@function\nh: .cfi_startproc; "
      ".cfi_signal_frame; push %rbx; ret; .cfi_endproc; .size h,.-h\n",
      ".S", "gcc -nostdlib -shared -Wl,--build-id=none");
  Checked c(built.path());
  CHECK(c.count("f", Verdict::missing) == 2);
  CHECK(c.count("g", Verdict::unknown) == 2);
  CHECK(c.count("h", Verdict::unknown) == 2);
  CHECK(c.report.refuted().empty());
}

TEST_CASE("check: a local function may have a calling convention of its own, an exported one not") {
  const std::string body = ": .cfi_startproc; mov %rdi,%rbx; nop; ret; .cfi_endproc\n";
  Built built(
      ".text\n.type own,@function\nown" + body + ".size own,.-own\n.globl shown\n.type shown,@function\nshown" + body +
          ".size shown,.-shown\n.globl user\n.type user,@function\nuser: .cfi_startproc; call own; ret; .cfi_endproc\n",
      ".S", "gcc -nostdlib -shared -Wl,--build-id=none");
  Checked c(built.path());
  CHECK(c.wrong("own") == "");
  CHECK(describe_wrong(c.function("own").clobbered) == "rbx");
  CHECK(c.wrong("shown") == "3 rbx\n4 rbx\n");
}

TEST_CASE("check: exceptions come back with the frame of their call") {
  Built built(R"(
    struct Guard { ~Guard(); int n[20]; };
    int may_throw(Guard&);
    int f(int a) {
      Guard guard;
      try { return may_throw(guard) + a; } catch (int n) { return n * may_throw(guard); } catch (...) { return 3; }
    })",
              ".cc", "g++ -O2 -fPIC -shared");
  Checked c(built.path());
  CHECK(c.count("_Z1fi", Verdict::right) > 15);
  CHECK(c.count("_Z1fi", Verdict::unreached) == 0);
  CHECK(c.count("_Z1fi", Verdict::unknown) == 0);
  for (const FunctionReport& f : c.report.functions)
    if (c.image->functions()[f.function].name == "_Z1fi.cold")
      CHECK(f.counts[static_cast<unsigned>(Verdict::right)] > 3);
}

TEST_CASE("check: marked tables say the same, and which of it is refuted") {
  Checked c = check("push %rbx; nop; pop %rbx; ret");
  auto refuted = c.report.refuted();
  REQUIRE(refuted.size() == 2);
  auto marked = mark_refuted(c.table(), refuted);
  REQUIRE(marked);
  auto table = Table::open(*marked);
  REQUIRE(table);
  int marks = 0;
  c.table().for_each([&](ImageAddr begin, ImageAddr end, const Row* row) {
    for (ImageAddr at = begin; at < end; at += 1) {
      const Row* now = table->lookup(at);
      REQUIRE(!now == !row);
      if (!row) continue;
      bool wrong = std::ranges::any_of(refuted, [&](auto& r) { return r.contains(at); });
      marks += wrong;
      Row expected = *row;
      if (wrong) expected.flags |= kRowRefuted;
      REQUIRE(*now == expected);
    }
  });
  CHECK(marks == 2);
  CHECK(table->header().base + table->header().span == c.table().header().base + c.table().header().span);
}

TEST_CASE("check: a marked table stays in the cache and is what the next walk gets") {
  Built built(function("push %rbx; nop; pop %rbx; ret"), ".S", "gcc -nostdlib -shared -Wl,--build-id=sha1");
  Checked c(built.path());
  std::string folder = std::filesystem::path(built.path()).parent_path();
  auto before = load_table(*c.image, folder);
  REQUIRE(before);
  auto marked = mark_refuted(c.table(), c.report.refuted());
  REQUIRE(marked);
  CHECK(keep_checked_table(*c.image, *marked, folder));
  auto after = load_table(*c.image, folder);
  REQUIRE(after);
  CHECK((*after)->from_cache());
  ImageAddr nop = c.function("f").findings.at(0).pc;
  CHECK(int{(*before)->table().lookup(nop)->flags} == 0);
  CHECK(int{(*after)->table().lookup(nop)->flags} == kRowRefuted);
  CHECK(int{(*after)->table().lookup(nop - 1)->flags} == 0);
  CHECK(!keep_checked_table(*c.image, *marked, ""));
}

}  // namespace
}  // namespace sonde::host::check
