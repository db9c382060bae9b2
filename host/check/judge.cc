// See judge.h. Only a definite contradiction is wrong.
#include "host/check/judge.h"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "core/base/cursor.h"
#include "core/isa/x86_64.h"
#include "host/tables/print.h"

namespace sonde::host::check {
namespace {

constexpr uint32_t kMachine = 62;
constexpr uint8_t kMachineOf[16] = {rax, rdx, rcx, rbx, rsi, rdi, rbp, rsp, r8, r9, r10, r11, r12, r13, r14, r15};

uint8_t dwarf_register(unsigned machine) {
  for (uint8_t dwarf = 0; dwarf < 16; dwarf++)
    if (kMachineOf[dwarf] == machine) return dwarf;
  return kNone;
}

Value value_of(const State& state, unsigned dwarf) {
  uint8_t reg = machine_register(dwarf);
  return reg == kNone ? kTop : state.reg[reg];
}

// DWARF 5 section 2.5, as far as compilers use it here; top for the rest. `initial`: pushed first, where not null.
Value evaluate(std::span<const uint8_t> expression, const State& state, const Value* initial) {
  enum : uint8_t {
    deref = 0x06,
    consts = 0x11,
    constu = 0x10,
    minus = 0x1c,
    plus_op = 0x22,
    plus_uconst = 0x23,
    lit0 = 0x30,
    breg0 = 0x70,
    bregx = 0x92,
    const1u = 0x08,
    const1s = 0x09,
    const2u = 0x0a,
    const2s = 0x0b,
    const4u = 0x0c,
    const4s = 0x0d,
    and_op = 0x1a,
    nop = 0x96
  };
  std::vector<Value> stack;
  if (initial) stack.push_back(*initial);
  auto pop = [&] {
    if (stack.empty()) return kTop;
    Value top = stack.back();
    stack.pop_back();
    return top;
  };
  for (Cursor at(expression); at.left();) {
    uint8_t op = at.read<uint8_t>();
    if (op >= breg0 && op < breg0 + 32) {
      stack.push_back(plus(value_of(state, op - breg0), at.sleb()));
    } else if (op >= lit0 && op < lit0 + 32) {
      stack.push_back(constant(op - lit0));
    } else {
      switch (op) {
        case nop: break;
        case bregx: {
          uint64_t reg = at.uleb();
          stack.push_back(plus(value_of(state, static_cast<unsigned>(std::min<uint64_t>(reg, 255))), at.sleb()));
          break;
        }
        case const1u: stack.push_back(constant(at.read<uint8_t>())); break;
        case const1s: stack.push_back(constant(at.read<int8_t>())); break;
        case const2u: stack.push_back(constant(at.read<uint16_t>())); break;
        case const2s: stack.push_back(constant(at.read<int16_t>())); break;
        case const4u: stack.push_back(constant(at.read<uint32_t>())); break;
        case const4s: stack.push_back(constant(at.read<int32_t>())); break;
        case constu: stack.push_back(constant(static_cast<int64_t>(at.uleb()))); break;
        case consts: stack.push_back(constant(at.sleb())); break;
        case deref: stack.push_back(state.load(pop())); break;
        case plus_uconst: stack.push_back(plus(pop(), static_cast<int64_t>(at.uleb()))); break;
        case plus_op:
        case minus: {
          Value b = pop(), a = pop();
          if (op == plus_op && a.is(kConstant)) std::swap(a, b);
          stack.push_back(b.is(kConstant) ? plus(a, op == minus ? -b.plus : b.plus) : kTop);
          break;
        }
        default: return kTop;
      }
    }
    if (!at.ok() || stack.size() > 64) return kTop;
  }
  return pop();
}

enum class Answer : uint8_t { right, unknown, wrong };

// The value that a row gives for something whose true value is `expected`.
Answer compare(const Value& value, const Value& expected) {
  if (value == expected) return Answer::right;
  if (value.kind == Value::top) return Answer::unknown;
  // An argument may be anything, in code with a calling convention of its own.
  bool argument = value.kind == Value::exact && value.of >= kEntry && value.of < kReturn && !value.is_kept();
  return argument && expected.is(kReturn) ? Answer::unknown : Answer::wrong;
}

class Judge {
 public:
  Judge(const Table& table, const Row& row, const State& state) : table_(table), row_(row), state_(state) {}

  Judgement run() {
    cfa_ = cfa();
    Answer answer = Answer::unknown;
    if (cfa_ == exactly(kCfa)) answer = Answer::right;
    else if ((is_no_cfa(cfa_) || state_.is_below_cfa(cfa_, 0)) && on_own_stack()) return {Verdict::wrong, kWrongCfa};
    // Of a CFA that is not known nothing else can be said.
    if (answer != Answer::right) cfa_ = kTop;
    note(answer, kWrongCfa);
    note(compare(value(row_.ra_kind, row_.ra_offset, X86_64::rip), exactly(kReturn)), kWrongReturn);
    for (unsigned i = 0; i < X86_64::kSaved.size(); i++) {
      const SavedReg& saved = row_.saved[i];
      if (saved.kind == ValueKind::undefined) continue;
      unsigned reg = X86_64::kSaved[i];
      note(compare(value(saved.kind, saved.offset, reg), entry_of(machine_register(reg))),
           static_cast<uint8_t>(1u << i));
    }
    // On another stack the row's frame may be that stack's.
    if (wrong_ && !on_own_stack()) return {Verdict::unknown, 0};
    return wrong_ ? Judgement{Verdict::wrong, wrong_} : Judgement{unknown_ ? Verdict::unknown : Verdict::right, 0};
  }

 private:
  bool on_own_stack() const { return state_.reg[rsp].is_frame() || state_.reg[rsp].kind == Value::blur; }

  void note(Answer answer, uint8_t what) {
    if (answer == Answer::wrong) wrong_ |= what;
    if (answer == Answer::unknown) unknown_ = true;
  }

  // What is computed from arguments or loaded may be a frame that somebody else has laid out.
  static bool is_no_cfa(const Value& v) { return v.is(kCfa) || v.is_kept() || v.is(kConstant); }

  Value cfa() const {
    if (row_.cfa_kind == CfaKind::expression)
      return evaluate(table_.expression(static_cast<uint32_t>(row_.cfa_offset)), state_, nullptr);
    Value sum = plus(value_of(state_, row_.cfa_reg), row_.cfa_offset);
    return row_.cfa_kind == CfaKind::deref_reg_offset ? state_.load(sum) : sum;
  }

  Value value(ValueKind kind, int64_t offset, unsigned self) const {
    switch (kind) {
      case ValueKind::same: return value_of(state_, self);
      case ValueKind::at_cfa: return state_.load(plus(cfa_, offset));
      case ValueKind::cfa_plus: return plus(cfa_, offset);
      case ValueKind::in_register: return value_of(state_, static_cast<unsigned>(offset));
      case ValueKind::is_expression: return evaluate(table_.expression(static_cast<uint32_t>(offset)), state_, &cfa_);
      case ValueKind::at_expression:
        return state_.load(evaluate(table_.expression(static_cast<uint32_t>(offset)), state_, &cfa_));
      case ValueKind::undefined: break;
    }
    return kTop;
  }

  const Table& table_;
  const Row& row_;
  const State& state_;
  Value cfa_;
  uint8_t wrong_ = 0;
  bool unknown_ = false;
};

std::string name_of(unsigned machine) { return register_name(kMachine, dwarf_register(machine)); }

// A register that holds symbol + something, sp and bp first.
const Value* holder(const State& state, uint32_t symbol, unsigned* reg) {
  for (unsigned r : {rsp, rbp, r10, rax, rcx, rdx, rbx, rsi, rdi, r8, r9, r11, r12, r13, r14, r15})
    if (state.reg[r].is(symbol)) return *reg = r, &state.reg[r];
  return nullptr;
}

// An address of the stack, as a row could name it; "" if none does.
std::string place(const State& state, uint32_t of, int64_t at) {
  if (of == kCfa) return fmt::format("[cfa{:+}]", at);
  unsigned reg;
  const Value* by = holder(state, of, &reg);
  return by ? fmt::format("[{}{:+}]", name_of(reg), at - by->plus) : "";
}

std::string where_is(const State& state, const Value& wanted) {
  std::string found;
  for (const Slot& slot : state.slots())
    if (slot.value == wanted && found.empty()) found = place(state, slot.of, slot.at);
  unsigned reg;
  if (found.empty())
    if (const Value* by = holder(state, wanted.of, &reg); by && *by == wanted) found = name_of(reg);
  return found;
}

std::string where_is_cfa(const State& state) {
  unsigned reg;
  if (const Value* by = holder(state, kCfa, &reg)) return fmt::format("{}{:+}", name_of(reg), -by->plus);
  for (const Slot& slot : state.slots())
    if (slot.value.is(kCfa))
      if (std::string found = place(state, slot.of, slot.at); !found.empty())
        return slot.value.plus ? fmt::format("{}{:+}", found, -slot.value.plus) : found;
  return "?";
}

}  // namespace

const char* describe(Verdict verdict) {
  switch (verdict) {
    case Verdict::unreached: return "unreached";
    case Verdict::right: return "right";
    case Verdict::unknown: return "unknown";
    case Verdict::missing: return "missing";
    case Verdict::wrong: return "wrong";
  }
  return "?";
}

uint8_t machine_register(unsigned dwarf) { return dwarf < 16 ? kMachineOf[dwarf] : uint8_t{kNone}; }

Judgement judge(const Table& table, const Row* row, const State& state) {
  if (!row || (row->flags & kRowInexpressible)) return {Verdict::missing, 0};
  // An outermost row and a signal frame say nothing about a call.
  if (row->flags & kRowSignalFrame || row->ra_kind == ValueKind::undefined) return {Verdict::unknown, 0};
  return Judge(table, *row, state).run();
}

std::string format_truth(const State& state) {
  std::string ra = where_is(state, exactly(kReturn));
  std::string out = fmt::format("cfa={} ra={}", where_is_cfa(state), ra.empty() ? "?" : ra);
  for (uint8_t dwarf : X86_64::kSaved) {
    unsigned reg = machine_register(dwarf);
    const Value& now = state.reg[reg];
    if (now == entry_of(reg)) continue;
    std::string found = where_is(state, entry_of(reg));
    if (found.empty() && now.is(kEntry + reg)) found = fmt::format("{}{:+}", register_name(kMachine, dwarf), -now.plus);
    if (found.empty()) found = now.kind == Value::top ? "?" : "lost";
    out += fmt::format(" {}={}", register_name(kMachine, dwarf), found);
  }
  return out;
}

}  // namespace sonde::host::check
