// See system_calls.h.
#include "host/plan/system_calls.h"

#include <algorithm>
#include <cstring>
#include <unordered_set>

#include "core/probe/minded_calls.h"
#include "host/plan/stack_op.h"

namespace sonde::host {
namespace {

constexpr uint8_t kSyscall[] = {0x0f, 0x05}, kCompatSyscall[] = {0xcd, 0x80};  // syscall; int $0x80
constexpr uint16_t kRax = 1;  // as a bit of StackOp::written

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
  if (code.size() == 5 && code[0] == 0xb8) return immediate(1);  // mov $, %eax
  if (code.size() == 7 && code[0] == 0x48 && code[1] == 0xc7 && code[2] == 0xc0) return immediate(3);  // mov $, %rax
  if (code.size() == 2 && (code[0] == 0x31 || code[0] == 0x33) && code[1] == 0xc0) return 0;  // xor %eax, %eax
  return std::nullopt;
}

struct Walk {
  std::vector<SystemCall> found;
  std::vector<uint64_t> compat;
  bool complete = true;  // decodes up to the last wanted place
};

// Linear, through one function or gap. `wanted`: where the bytes of a system call lie in it, sorted.
Walk walk(const CodeView& view, const Targets* targets, CodeRange code, std::span<const uint64_t> wanted) {
  Walk out;
  std::optional<uint32_t> rax;
  uint64_t pc = code.begin;
  for (size_t next = 0; next < wanted.size();) {
    auto bytes = view.code_at(pc);
    auto op = stack_op(bytes.first(std::min<size_t>(bytes.size(), 15)), pc);
    if (!op) {
      out.complete = false;
      return out;
    }
    bytes = bytes.first(op->length);
    if (!targets || targets->marked(pc)) rax.reset();  // reached from elsewhere too
    bool call = op->length == 2 && is_at(bytes, kSyscall);
    if (call) out.found.push_back({pc, code, rax});
    if (op->length == 2 && is_at(bytes, kCompatSyscall)) out.compat.push_back(pc);
    if (call || op->flow == Flow::call || op->flow == Flow::call_indirect || ends_flow(op->flow) || op->written & kRax)
      rax = constant_to_rax(bytes);
    pc += op->length;
    while (next < wanted.size() && wanted[next] < pc) next++;
  }
  return out;
}

struct Region {
  CodeRange code;
  bool is_function;
  std::vector<uint64_t> wanted;
};

// Those of its wanted places that control can arrive at, following the instructions from the region's start and from all
// that something leads to. Tables between the instructions do not decode for long, and nothing jumps into them. Where a
// function itself runs into what does not decode, it is an instruction that cannot be followed, and every place counts.
std::vector<uint64_t> reached(const CodeView& view, const Targets& targets, const Region& region) {
  struct From {
    uint64_t pc;
    bool certain;  // the function's own instructions lead here
  };
  auto [begin, end] = region.code;
  std::vector<From> work;
  for (uint64_t at = begin; at <= region.wanted.back(); at++)
    if (targets.marked(at)) work.push_back({at, false});
  work.push_back({begin, region.is_function});  // first, for what it reaches is certain
  std::vector<uint64_t> found;
  std::unordered_set<uint64_t> seen;
  while (!work.empty()) {
    auto [pc, certain] = work.back();
    work.pop_back();
    while (pc >= begin && pc < end && seen.insert(pc).second) {
      auto bytes = view.code_at(pc);
      auto insn = decode(bytes.first(std::min<size_t>(bytes.size(), 15)), pc);
      if (!insn && certain) return region.wanted;
      if (!insn) break;
      if (std::ranges::binary_search(region.wanted, pc)) found.push_back(pc);
      if (is_direct(insn->flow)) work.push_back({insn->target, certain});
      if (ends_flow(insn->flow)) break;
      pc = insn->next();
    }
  }
  std::ranges::sort(found);
  return found;
}

// Whether control runs over the function's end: it decodes whole, and its last instruction goes on. A call there is of a
// function that does not return.
bool runs_on(const CodeView& view, CodeRange function) {
  Flow last = Flow::call;
  for (uint64_t pc = function.begin; pc < function.end;) {
    auto bytes = view.code_at(pc);
    auto insn = decode(bytes.first(std::min<size_t>(bytes.size(), 15)), pc);
    if (!insn || insn->next() > function.end) return false;
    last = insn->flow;
    pc = insn->next();
  }
  return !ends_flow(last) && last != Flow::call && last != Flow::call_indirect;
}

// The functions that hold bytes of a system call, and the gaps between functions that do. Of a stripped file's function only the
// part with unwind information may be known: clone() has none from its system call on. Then what follows is its rest.
std::vector<Region> regions(const CodeView& view, const Piece& piece) {
  std::vector<Region> out;
  for (size_t i = 0; i + 1 < piece.bytes.size(); i++) {
    if (!is_at(piece.bytes.subspan(i), kSyscall) && !is_at(piece.bytes.subspan(i), kCompatSyscall)) continue;
    uint64_t at = piece.begin + i;
    if (!view.in_code_section(at)) continue;
    if (out.empty() || at >= out.back().code.end) {
      size_t f = view.function_from(at);
      bool inside = f < view.functions.size() && view.functions[f].begin <= at;
      uint64_t end = f < view.functions.size() ? view.functions[f].begin : piece.end();
      uint64_t begin = f > 0 ? view.functions[f - 1].end : piece.begin;
      CodeRange gap{std::max(begin, piece.begin), std::min(end, piece.end())};
      bool rest = !inside && f > 0 && gap.begin == view.functions[f - 1].end && runs_on(view, view.functions[f - 1]);
      if (rest) gap.begin = view.functions[f - 1].begin;
      out.push_back({inside ? view.functions[f] : gap, inside || rest, {}});
    }
    out.back().wanted.push_back(at);
  }
  return out;
}

}  // namespace

SystemCalls find_system_calls(const CodeView& view, Targets* targets) {
  SystemCalls calls;
  for (const Piece& piece : view.pieces) {
    if (!piece.executable) continue;
    std::vector<Region> all = regions(view, piece);
    std::unordered_set<uint64_t> certain;
    // First what depends on far references alone: near ones are marked generously, data as if it were code.
    for (const Region& r : all) {
      Walk w = walk(view, nullptr, r.code, r.wanted);
      if (!targets) {
        if (!w.complete || !w.compat.empty()) calls.doubtful.push_back(r.wanted.back());
        calls.found.insert(calls.found.end(), w.found.begin(), w.found.end());
        continue;
      }
      std::vector<uint64_t> arrived = reached(view, *targets, r);
      std::unordered_set<uint64_t> linear(w.compat.begin(), w.compat.end());  // numbered otherwise: never certain
      // Between functions (signal restorers stand there) linear decoding is not proof enough to patch anything.
      if (!r.is_function) w = walk(view, targets, r.code, r.wanted);
      for (const SystemCall& call : w.found) {
        bool leave = !r.is_function && is_minded(call.number);
        if (!leave && std::ranges::binary_search(arrived, call.at)) certain.insert(call.at);
        else linear.insert(call.at);
      }
      // Where a function decodes to its end, bytes in the middle of an instruction are just that.
      bool trusted = r.is_function && w.complete;
      for (uint64_t at : r.wanted) {
        bool doubtful = (r.is_function && linear.contains(at)) || (!trusted && std::ranges::binary_search(arrived, at));
        if (doubtful && !certain.contains(at)) calls.doubtful.push_back(at);
      }
    }
    for (const Region& r : all) {
      if (!targets) continue;
      if (r.is_function) targets->add_near(r.code.begin, r.code.end);
      for (const SystemCall& call : walk(view, targets, r.code, r.wanted).found)
        if (certain.contains(call.at)) calls.found.push_back(call);
    }
  }
  return calls;
}

bool is_minded(std::optional<uint32_t> number) {
  return !number || is_minded_always(*number) || is_minded_with_traps(*number);
}

}  // namespace sonde::host
