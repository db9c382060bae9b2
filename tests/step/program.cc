#include "tests/step/program.h"

#include <fmt/format.h>
#include <string.h>

#include <algorithm>

namespace sonde::stepping {
namespace {

using host::Mapping;

constexpr uint64_t kWindow = 1 << 20, kBelow = 512;
constexpr size_t kLongestInsn = 15;
constexpr uint64_t kExecute = 4, kFixed = 16;  // PROT_EXEC, MAP_FIXED: the same on both processors

bool same_code(const std::vector<Mapping>& a, const std::vector<Mapping>& b) {
  auto next = [](auto at, auto end) { return std::find_if(at, end, [](const Mapping& m) { return m.executable; }); };
  auto i = next(a.begin(), a.end());
  auto j = next(b.begin(), b.end());
  for (; i != a.end() && j != b.end(); i = next(i + 1, a.end()), j = next(j + 1, b.end()))
    if (i->range != j->range || i->path != j->path) return false;
  return i == a.end() && j == b.end();
}

std::string name_of(X86_64, unsigned reg) {
  static constexpr const char* kNames[] = {"rax", "rdx", "rcx", "rbx", "rsi", "rdi", "rbp", "rsp", "r8",
                                           "r9",  "r10", "r11", "r12", "r13", "r14", "r15", "rip"};
  return kNames[reg];
}
std::string name_of(Aarch64, unsigned reg) {
  return reg == Aarch64::sp ? "sp" : reg == Aarch64::pc ? "pc" : fmt::format("x{}", reg);
}

template <class Isa>
std::string each_in_words(const RegSet<Isa>& regs) {
  std::string text = " ";
  for (unsigned reg = 0; reg < Isa::kRegs; reg++)
    text += fmt::format(" {} {:#x}{}", name_of(Isa{}, reg), regs.get(reg), reg % 9 == 8 ? "\n " : "");
  return text + "\n";
}

}  // namespace

std::string in_words(const Registers& registers) {
  return std::visit([](const auto& regs) { return each_in_words(regs); }, registers);
}

void Program::reload() {
  auto now = read_mappings();
  if (!now) return;
  if (!memory_ || !same_code(mappings_, *now)) {
    code_generation_++;
    insns_.clear();
    memory_ = std::make_unique<host::ProcessMemory>(pid_, *now);
  } else {
    memory_->reload_mappings();
  }
  mappings_ = std::move(*now);
}

const Mapping* Program::mapping(Addr at) const {
  auto found = std::ranges::upper_bound(mappings_, at, {}, [](const Mapping& m) { return m.range.begin; });
  return found == mappings_.begin() || !std::prev(found)->range.contains(at) ? nullptr : &*std::prev(found);
}

uint64_t Program::stack_end(uint64_t sp) {
  AddrRange stack;
  return stack_at(Addr(sp), &stack) ? stack.end.value : 0;
}

bool Program::stack_at(Addr sp, AddrRange* stack) {
  const Mapping* found = mapping(sp);
  if (!found || !found->writable) reload();
  return memory_->stack_at(sp, stack);
}

void Program::look() {
  AddrRange stack;
  window_size_ = 0;
  if (!stack_at(Addr(sp()), &stack)) return;
  window_begin_ = (sp() - kBelow) & ~uint64_t{7};
  if (Addr(window_begin_) < stack.begin) window_begin_ = stack.begin.value;
  uint64_t size = std::min(stack.end.value - window_begin_, kWindow);
  if (window_.size() < size) window_.resize(size);
  window_size_ = memory_->read_now(Addr(window_begin_), std::span(window_.data(), size));
}

bool Program::read(Addr at, std::span<uint8_t> into) {
  uint64_t offset = at.value - window_begin_;
  if (offset < window_size_ && window_size_ - offset >= into.size())
    return memcpy(into.data(), window_.data() + offset, into.size()), true;
  const Mapping* found = mapping(at);
  if (found && !found->writable && !found->path.empty()) return memory_->read(at, into);
  return memory_->read_now(at, into) == into.size();
}

const Insn& Program::insn_at(uint64_t pc) {
  auto found = insns_.find(pc);
  if (found != insns_.end()) return found->second;
  uint8_t bytes[kLongestInsn];
  size_t n = memory_->read_now(Addr(pc), bytes);
  Insn insn = classify(std::span(bytes, n));
  const Mapping* m = mapping(Addr(pc));
  if (m && !m->writable && !m->path.empty()) return insns_.emplace(pc, insn).first->second;
  return unkept_ = insn;  // generated code
}

bool Program::maps_code(const SystemCall& call) const {
  const auto& [begin, size, protection, flags] = call.arguments;
  auto touches_code = [&] {
    return std::ranges::any_of(mappings_, [&](const Mapping& m) {
      return m.executable && m.range.begin.value < begin + size && begin < m.range.end.value;
    });
  };
  switch (call.kind) {
    case SystemCall::Kind::map: return (protection & kExecute) || ((flags & kFixed) && touches_code());
    case SystemCall::Kind::protect: return (protection & kExecute) || touches_code();
    case SystemCall::Kind::unmap:
    case SystemCall::Kind::remap: return touches_code();
    default: return false;
  }
}

void Program::note_action(const SystemCall& call) {
  uint64_t handler = 0;
  if (call.kind != SystemCall::Kind::action || !call.arguments[1]) return;
  if (!read_now_as(Addr(call.arguments[1]), &handler)) return;
  if (handler > 1) handlers_[call.arguments[0]] = handler;  // neither SIG_DFL nor SIG_IGN
}

}  // namespace sonde::stepping
