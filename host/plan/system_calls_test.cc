// The truth about which instructions are system calls is objdump's; which numbers they have is known for written
// code.
#include "host/plan/system_calls.h"
#include "core/isa/x86_64_detour.h"

#include <fmt/format.h>
#include <sys/syscall.h>

#include <filesystem>
#include <map>
#include <set>

#include "host/image/testing.h"
#include "host/plan/plan.h"
#include "host/plan/trap_safety.h"

using namespace sonde;
using namespace sonde::host;
using namespace sonde::host::testing;

namespace {

LoadedImage place(const std::string& path) {
  auto image = open_image(path);
  uint64_t bias = image->type() == 2 ? 0 : 0x7ffff7000000;
  LoadedImage loaded{image, bias, {}};
  loaded.range = {loaded.to_target(image->segments().front().range.begin),
                  loaded.to_target(image->segments().back().range.end)};
  return loaded;
}

ImagePlan plan(const LoadedImage& loaded, std::vector<uint32_t> functions, bool force_traps = false) {
  PlanRequest request{.image = &loaded,
                      .functions = std::move(functions),
                      .first_site = 0,
                      .entry_trampoline = Addr(0x7ffff7ff0000),
                      .used = {{Addr(0x7ffff7f00000), Addr(0x7ffff7fff000)}},
                      .allow_traps = true,
                      .force_traps = force_traps,
                      .system_calls = true};
  auto made = plan_image(request);
  REQUIRE(made);
  return *made;
}

std::set<uint64_t> by_objdump(const std::string& path) {
  std::set<uint64_t> found;
  for (const std::string& line : run("objdump -d --no-show-raw-insn " + path + " | grep -w syscall || true"))
    if (auto w = words(line); w.size() >= 2 && w[1] == "syscall") found.insert(std::stoull(w[0], nullptr, 16));
  return found;
}

}  // namespace

TEST_CASE("system calls: a number is known where a constant leads straight to the instruction") {
  std::string folder = fresh_folder("system_calls");
  write_file(folder + "/a.s", R"(
    .text
    .macro function name
    .globl \name
    .type \name, @function
    \name:
    .endm
    function straight
      mov $14, %eax
      mov %rsi, %rdx
      syscall
      ret
    function wide
      mov $0xd, %rax
      syscall
      ret
    function zero
      xor %eax, %eax
      syscall
      ret
    function harmless
      mov $39, %eax
      syscall
      ret
    function joined
      mov $39, %eax
    1: syscall
      ret
    2: mov $13, %eax
      jmp 1b
    function called
      mov $39, %eax
      call harmless
      syscall
      ret
    function argument
      mov %rdi, %rax
      syscall
      ret
    function partly
      mov $39, %eax
      mov $13, %al
      syscall
      ret
    function second
      mov $39, %eax
      syscall
      syscall
      ret
    function no_call
      mov $0x050f, %eax
      ret
    function restorer
      mov $15, %rax
      syscall
  )");
  run("gcc -shared -nostdlib -o a.so a.s", folder);
  LoadedImage loaded = place(folder + "/a.so");
  CodeView view = view_code(loaded);
  Targets targets(view);
  SystemCalls calls = find_system_calls(view, &targets);
  CHECK(calls.doubtful.empty());
  std::map<std::string, std::vector<int>> numbers;
  for (const SystemCall& call : calls.found)
    numbers[loaded.image->find(loaded.to_image(Addr(call.at)))->function->name].push_back(
        call.number ? static_cast<int>(*call.number) : -1);
  std::map<std::string, std::vector<int>> truth{
      {"straight", {14}}, {"wide", {13}},     {"zero", {0}},    {"harmless", {39}},   {"joined", {-1}},
      {"called", {-1}},   {"argument", {-1}}, {"partly", {-1}}, {"second", {39, -1}}, {"restorer", {15}}};
  CHECK(numbers == truth);

  // straight, wide, joined, called, argument, partly, second's second
  ImagePlan made = plan(loaded, {});
  CHECK(made.system_calls.size() == 7);
  CHECK(made.harmless_system_calls == 4);
  for (const SystemCallPlan& call : made.system_calls) {
    CHECK(call.site.method != Method::refused);
    // The agent goes on two bytes behind the copy.
    size_t at = static_cast<size_t>(call.site.resume.value - call.site.detour.value) + x86_64_detour::kHeader;
    CHECK(call.site.detour_bytes[at] == 0x0f);
    CHECK(call.site.detour_bytes[at + 1] == 0x05);
  }
}

TEST_CASE("system calls: behind bytes that do not decode they are doubtful if something leads there") {
  std::string folder = fresh_folder("system_calls_doubtful");
  write_file(folder + "/a.s", R"(
    .text
    .globl table, jumped, known, inner, compat
    .type table, @function
    table:
      lea 1f(%rip), %rax
      ret
    1: .byte 0x06, 0x06, 0x0f, 0x05
    .type jumped, @function
    jumped:
      lea 2f(%rip), %rax
      jmp *%rax
      .byte 0x06
    2: mov %edi, %eax
      syscall
      ret
    .type known, @function
    known:
      nop
      .byte 0x06
      mov $14, %eax
      syscall
      ret
    .type inner, @function
    inner:
      ret
      mov $14, %eax
      syscall
      ret
    .size inner, .-inner
      mov $14, %eax
      syscall
      ret
    .type compat, @function
    compat:
      mov $14, %eax
      int $0x80
      ret
  )");
  run("gcc -shared -nostdlib -o a.so a.s", folder);
  LoadedImage loaded = place(folder + "/a.so");
  ImagePlan made = plan(loaded, {});
  std::set<std::string> where;
  for (Addr at : made.doubtful) {
    auto hit = loaded.image->find(loaded.to_image(at));
    where.insert(hit ? hit->function->name : "between");
  }
  // In `known` control runs into something that does not decode: into nothing that could be followed. In `inner` nothing
  // that is known leads there, but it is a function's code. None of them is patched.
  CHECK(where == std::set<std::string>{"jumped", "known", "inner", "between", "compat"});
  CHECK(made.system_calls.empty());
  CHECK(trap_obstacle(loaded, made).find("a.so+0x") != std::string::npos);
}

TEST_CASE("system calls: behind the part of a function that unwind information describes, if that part runs on") {
  std::string folder = fresh_folder("system_calls_rest");
  write_file(folder + "/a.s", R"(
    .text
    like_clone:
      .cfi_startproc
      test %rdi, %rdi
      mov $56, %eax
      .cfi_endproc
      syscall
      test %rax, %rax
      je 1f
      ret
    1: call *%rdx
      mov $60, %eax
      syscall
      hlt
      .balign 16
    ends:
      .cfi_startproc
      mov $39, %eax
      ret
      .cfi_endproc
      .byte 0x0f, 0x05
      .balign 16
    does_not_return:
      .cfi_startproc
      mov $39, %eax
      call like_clone
      .cfi_endproc
      .byte 0x0f, 0x05
  )");
  run("gcc -shared -nostdlib -s -o a.so a.s", folder);
  LoadedImage loaded = place(folder + "/a.so");
  CodeView view = view_code(loaded);
  Targets targets(view);
  SystemCalls calls = find_system_calls(view, &targets);
  std::vector<int> numbers;
  for (const SystemCall& call : calls.found) numbers.push_back(call.number ? static_cast<int>(*call.number) : -1);
  CHECK(numbers == std::vector<int>{56, 60});
  CHECK(calls.doubtful.size() == 2);  // what stands right behind the other two, which do not run on into it
}

TEST_CASE("system calls: a runtime that makes code makes calls that nobody sees") {
  std::string folder = fresh_folder("system_calls_runtime");
  write_file(folder + "/a.c", "void JNI_CreateJavaVM(void) {}");
  run("gcc -shared -o a.so a.c", folder);
  LoadedImage loaded = place(folder + "/a.so");
  CHECK(trap_obstacle(loaded, plan(loaded, {})).find("a.so is a runtime") != std::string::npos);
}

TEST_CASE("system calls: tables between hand-written functions hold none") {
  std::string path = "/usr/lib/x86_64-linux-gnu/libcrypto.so.3";
  if (!std::filesystem::exists(path)) {
    MESSAGE("not installed: " << path);
    return;
  }
  LoadedImage loaded = place(path);
  ImagePlan made = plan(loaded, {});
  CHECK(made.doubtful.empty());
  CHECK(made.system_calls.empty());
}

TEST_CASE(
    "system calls: every one of the machine's libraries is found, each "
    "minded one has a plan") {
  for (std::string path :
       {"/lib/x86_64-linux-gnu/libc.so.6", "/lib64/ld-linux-x86-64.so.2", "/lib/x86_64-linux-gnu/libpthread.so.0",
        "/lib/x86_64-linux-gnu/libstdc++.so.6", "/usr/bin/python3"}) {
    if (!std::filesystem::exists(path)) {
      MESSAGE("not installed: " << path);
      continue;
    }
    CAPTURE(path);
    LoadedImage loaded = place(path);
    CodeView view = view_code(loaded);
    Targets targets(view);
    SystemCalls calls = find_system_calls(view, &targets);
    std::set<uint64_t> found;
    for (const SystemCall& call : calls.found) found.insert(call.at - loaded.bias);
    CHECK(found == by_objdump(path));
    CHECK(calls.doubtful.empty());
    CHECK(calls.doubtful.empty());

    std::vector<uint32_t> all(loaded.image->functions().size());
    for (uint32_t i = 0; i < all.size(); i++) all[i] = i;
    for (bool force : {false, true}) {
      ImagePlan made = plan(loaded, all, force);
      std::map<std::string, size_t> methods;
      size_t unknown = 0;
      for (const SystemCallPlan& call : made.system_calls) {
        const SitePlan& site = call.site;
        methods[site.method == Method::refused ? fmt::format("refused: {}", describe(site.refusal))
                                               : describe(site.method)]++;
        unknown += !call.number;
      }
      fmt::print("{}: {} system calls, {} minded, {} of them with an unknown number\n", path, calls.found.size(),
                 made.system_calls.size(), unknown);
      for (auto& [method, n] : methods) fmt::print("  {:6} {}\n", n, method);
      CHECK(made.system_calls.size() + made.harmless_system_calls == calls.found.size());
      for (const SystemCallPlan& call : made.system_calls) {
        CHECK(call.site.method != Method::refused);
        if (call.site.method == Method::trap)
          fmt::print("  trap at {:#x} in {}: {} at +{:#x}\n", call.site.patch.value - loaded.bias,
                     display_name(*loaded.image, loaded.image->functions()[call.site.function]),
                     describe(call.site.refusal), call.site.refusal_offset);
      }
      // No other site moves or overwrites one.
      size_t overlapping = 0;
      for (const SitePlan& site : made.sites)
        for (const SystemCallPlan& call : made.system_calls)
          overlapping += site.method != Method::refused &&
                         site.patch.value < call.site.patch.value + call.site.relied.size() &&
                         call.site.patch.value < site.patch.value + site.relied.size();
      CHECK(overlapping == 0);
      CHECK(trap_obstacle(loaded, made) == "");
      made.system_calls.push_back({});  // one that has no plan
      CHECK(trap_obstacle(loaded, made) != "");
    }
  }
}
