// See system_calls.h. Numbers: arch/x86/entry/syscalls/syscall_64.tbl.
#include "host/plan/system_calls.h"

#include <sys/syscall.h>

#include <algorithm>
#include <cstring>

#include "host/plan/stack_op.h"

namespace sonde::host {
namespace {

constexpr uint8_t kSyscall[] = {0x0f, 0x05}, kCompatSyscall[] = {0xcd, 0x80};  // syscall; int $0x80
constexpr uint16_t kRax = 1;  // as a bit of StackOp::written

// Handlers, masks, what a child or a new program inherits of them, and what may forbid system calls.
constexpr uint32_t kMinded[] = {
    SYS_rt_sigaction,  SYS_rt_sigprocmask, SYS_rt_sigpending, SYS_rt_sigtimedwait, SYS_rt_sigsuspend,
    SYS_sigaltstack,   SYS_ppoll,          SYS_pselect6,      SYS_epoll_pwait,     SYS_epoll_pwait2,
    SYS_io_pgetevents, SYS_prctl,          SYS_seccomp,       SYS_execve,          SYS_execveat,
    SYS_clone,         SYS_clone3,         SYS_fork,          SYS_vfork,           SYS_exit,
};

bool is_at(std::span<const uint8_t> code, const uint8_t (&bytes)[2]) {
  return code.size() >= 2 && code[0] == bytes[0] && code[1] == bytes[1];
}

// The constant that the instruction puts into the whole of rax.
std::optional<uint32_t> constant_to_rax(std::span<const uint8_t> code) {
  auto immediate = [&](size_t at) {
    uint32_t value;
    std::memcpy(&value, code.data() + at, sizeof value);
    return value;
  };
  if (code.size() == 5 && code[0] == 0xb8) return immediate(1);                                        // mov $, %eax
  if (code.size() == 7 && code[0] == 0x48 && code[1] == 0xc7 && code[2] == 0xc0) return immediate(3);  // mov $, %rax
  if (code.size() == 2 && (code[0] == 0x31 || code[0] == 0x33) && code[1] == 0xc0) return 0;  // xor %eax, %eax
  return std::nullopt;
}

// Walks one function or gap. `wanted`: where the bytes of a system call lie in it, sorted.
void walk(const CodeView& view, const Targets* targets, CodeRange code, std::span<const uint64_t> wanted,
          SystemCalls& calls) {
  std::optional<uint32_t> rax;
  uint64_t pc = code.begin;
  for (size_t next = 0; next < wanted.size();) {
    auto bytes = view.code_at(pc);
    auto op = stack_op(bytes.first(std::min<size_t>(bytes.size(), 15)), pc);
    if (!op) {  // data, or an instruction that nobody knows
      calls.doubtful.insert(calls.doubtful.end(), wanted.begin() + static_cast<int64_t>(next), wanted.end());
      return;
    }
    bytes = bytes.first(op->length);
    if (!targets || targets->marked(pc)) rax.reset();  // reached from elsewhere too
    bool call = op->length == 2 && is_at(bytes, kSyscall);
    if (call) calls.found.push_back({pc, code, rax});
    if (op->length == 2 && is_at(bytes, kCompatSyscall)) calls.doubtful.push_back(pc);  // numbered otherwise
    if (call || op->flow == Flow::call || op->flow == Flow::call_indirect || ends_flow(op->flow) || op->written & kRax)
      rax = constant_to_rax(bytes);
    pc += op->length;
    while (next < wanted.size() && wanted[next] < pc) next++;
  }
}

// The function that holds `at`, else the gap in front of the next one.
CodeRange code_around(const CodeView& view, uint64_t at, const Piece& piece) {
  size_t i = view.function_from(at);
  if (i < view.functions.size() && view.functions[i].begin <= at) return view.functions[i];
  uint64_t end = i < view.functions.size() ? view.functions[i].begin : piece.end();
  uint64_t begin = i > 0 ? view.functions[i - 1].end : piece.begin;
  return {std::max(begin, piece.begin), std::min(end, piece.end())};
}

}  // namespace

SystemCalls find_system_calls(const CodeView& view, Targets* targets) {
  SystemCalls calls;
  for (const Piece& piece : view.pieces) {
    if (!piece.executable) continue;
    std::vector<uint64_t> wanted;
    CodeRange code{};
    auto finish = [&] {
      if (wanted.empty()) return;
      if (targets) targets->add_near(code.begin, code.end);
      walk(view, targets, code, wanted, calls);
      wanted.clear();
    };
    for (size_t i = 0; i + 1 < piece.bytes.size(); i++) {
      if (!is_at(piece.bytes.subspan(i), kSyscall) && !is_at(piece.bytes.subspan(i), kCompatSyscall)) continue;
      uint64_t at = piece.begin + i;
      if (!view.in_code_section(at)) continue;
      if (at >= code.end) finish(), code = code_around(view, at, piece);
      wanted.push_back(at);
    }
    finish();
  }
  return calls;
}

bool is_minded(std::optional<uint32_t> number) {
  return !number || std::ranges::find(kMinded, *number) != std::end(kMinded);
}

}  // namespace sonde::host
