// What a function does to its return slot, followed along its control flow. For each register that may lead there:
//
//   exact(k)  = sp at entry + k; the slot is [0, 8), sp at entry is exact(0)
//   stack     = an address on this stack, which one is not known
//   spilled   = loaded from this frame, may be a saved sp
//   other     = anything else
//
// Blocks are walked until their states no longer change; only then are they judged, each once. The path behind a call
// counts only where no other path comes by: the call may never return. Parts of the function split off elsewhere
// (X.cold), entered with an open frame, belong to it.
#include "host/plan/hijack.h"

#include <algorithm>
#include <array>
#include <map>

#include "host/plan/stack_op.h"

namespace sonde::host {
namespace {

enum class Kind : uint8_t { other, spilled, stack, exact };

struct Value {
  Kind kind = Kind::other;
  int32_t offset = 0;
  bool operator==(const Value&) const = default;
  bool on_stack() const { return kind == Kind::exact || kind == Kind::stack; }
};

Value meet(Value a, Value b) {
  if (a == b) return a;
  if (a.on_stack() && b.on_stack()) return {Kind::stack};
  if (a.kind != Kind::other && b.kind != Kind::other) return {Kind::spilled};
  return {};
}

struct State {
  std::array<Value, 16> reg{};
  bool foreign = false;  // sp was taken from elsewhere
  bool operator==(const State&) const = default;
  Value& sp() { return reg[kRsp]; }
};

struct Block {
  State state;
  bool weak = false;  // known only from the path behind a call
};

struct Pending {
  uint64_t pc;
  State state;
  bool weak;
};

constexpr uint16_t kCallerSaved = 0b0000111111000111;  // rax rcx rdx rsi rdi r8..r11
constexpr size_t kMaxParts = 8;

class Analysis {
 public:
  Analysis(const CodeView& view, CodeRange function) : view_(view), own_(function) { add_part(function); }

  NoHijack run() {
    if (pops_) return NoHijack::pops_arguments;
    State entry;
    entry.sp() = {Kind::exact, 0};
    arrive(own_.begin, entry, false);
    settle();
    // What only a jump table leads to: with the frame that the jump left.
    for (bool again = true; again;) {
      again = false;
      for (const Part& part : parts_) {
        auto unreached = std::ranges::find_if(part.ops, [](auto& o) { return !o.reached; });
        if (unreached == part.ops.end() || !indirect_) continue;
        uint64_t pc = unreached->pc;
        arrive(pc, indirect_state_, true);
        if (!find(pc)->reached) find(pc)->reached = true;
        settle();
        again = true;
        break;
      }
    }
    judging_ = true;
    for (auto& [pc, block] : blocks_) walk(pc, block.state);
    if (copies_ && reads_copy_) complain(NoHijack::reads_return_address);
    return verdict_;
  }

 private:
  struct Decoded {
    uint64_t pc;
    StackOp op;
    bool leader = false, reached = false, last = false;
  };
  struct Part {
    CodeRange range;
    std::vector<Decoded> ops;
  };

  void add_part(CodeRange range) {
    Part part{range, {}};
    part.ops.reserve((range.end - range.begin) / 4);
    for (uint64_t pc = range.begin; pc < range.end;) {
      auto code = view_.code_at(pc);
      auto op = stack_op(code.first(std::min<size_t>(code.size(), 15)), pc);
      if (!op) break;
      part.ops.push_back({pc, *op});
      pops_ |= op->flow == Flow::ret && op->pops != 0;
      pc += op->length;
    }
    if (!part.ops.empty()) part.ops.back().last = true;
    parts_.push_back(std::move(part));  // moves no Decoded
    for (size_t i = 0; i < parts_.back().ops.size(); i++)
      if (is_direct(parts_.back().ops[i].op.flow))
        if (Decoded* target = find(parts_.back().ops[i].op.target)) target->leader = true;
  }

  Decoded* find(uint64_t pc) {
    for (Part& part : parts_) {
      if (pc < part.range.begin || pc >= part.range.end) continue;
      auto it = std::ranges::lower_bound(part.ops, pc, {}, &Decoded::pc);
      return it != part.ops.end() && it->pc == pc ? &*it : nullptr;
    }
    return nullptr;
  }

  // Control comes to pc in this state.
  void arrive(uint64_t pc, const State& state, bool weak) {
    if (judging_) return;
    auto [it, fresh] = blocks_.try_emplace(pc, Block{state, weak});
    if (!fresh) {
      Block& block = it->second;
      if (weak && !block.weak) return;
      State merged = block.weak && !weak ? state : merge(block.state, state);
      if (merged == block.state && block.weak == weak) return;
      block = {merged, weak};
    }
    work_.push_back(pc);
  }

  static State merge(const State& a, const State& b) {
    State m;
    for (size_t i = 0; i < m.reg.size(); i++) m.reg[i] = meet(a.reg[i], b.reg[i]);
    m.foreign = a.foreign || b.foreign;
    return m;
  }

  void settle() {
    for (;;) {
      if (!work_.empty()) {
        uint64_t pc = work_.back();
        work_.pop_back();
        walk(pc, blocks_[pc].state);
      } else if (!behind_calls_.empty()) {
        Pending next = behind_calls_.back();
        behind_calls_.pop_back();
        arrive(next.pc, next.state, true);
      } else {
        return;
      }
    }
  }

  void walk(uint64_t pc, State state) {
    Decoded* at = find(pc);
    for (bool first = true; at; first = false, at = at->last ? nullptr : at + 1) {
      pc = at->pc;
      if (at->leader && !first) return arrive(pc, state, false);
      at->reached = true;
      const StackOp& op = at->op;
      if (judging_) judge(op, state);
      apply(op, state);
      uint64_t next = pc + op.length;
      switch (op.flow) {
        case Flow::jump: return branch_to(op.target, state);
        case Flow::branch:
        case Flow::transaction:
        case Flow::counted: branch_to(op.target, state); break;
        case Flow::call:
          if (inside(op.target) && op.target != own_.begin) {
            State pushed = state;
            move(pushed.sp(), -8);
            arrive(op.target, pushed, false);
            if (op.target == next) return;
          }
          return behind_call(next, state);
        case Flow::call_indirect: return behind_call(next, state);
        case Flow::jump_indirect:
          indirect_state_ = indirect_ ? merge(indirect_state_, state) : state;
          indirect_ = true;
          return;
        case Flow::ret:
        case Flow::stop:
        case Flow::strange: return;
        case Flow::next:
        case Flow::trap: break;
      }
    }
  }

  bool inside(uint64_t pc) const {
    return std::ranges::any_of(parts_, [&](const Part& p) { return p.range.begin <= pc && pc < p.range.end; });
  }

  void branch_to(uint64_t target, const State& state) {
    if (judging_) return;
    if (!inside(target)) {
      // With the frame closed it is a tail call, with an open one a part of this function.
      if (state.reg[kRsp] == Value{Kind::exact, 0} || parts_.size() >= kMaxParts) return;
      size_t i = view_.function_from(target);
      if (i >= view_.functions.size() || target < view_.functions[i].begin) return;
      add_part(view_.functions[i]);
      if (Decoded* d = find(target)) d->leader = true;
    }
    arrive(target, state, false);
  }

  void behind_call(uint64_t pc, State state) {
    if (judging_) return;
    // A callee known to the compiler may leave any of them alone (-fipa-ra).
    for (size_t i = 0; i < 16; i++)
      if (kCallerSaved >> i & 1) state.reg[i] = {state.reg[i].kind == Kind::other ? Kind::other : Kind::spilled};
    if (Decoded* d = find(pc)) {
      d->leader = true;
      behind_calls_.push_back({pc, state, true});
    }
  }

  static void move(Value& v, int64_t by) {
    if (v.kind != Kind::exact) return;
    int64_t moved = v.offset + by;
    if (moved == static_cast<int32_t>(moved)) v.offset = static_cast<int32_t>(moved);
    else v = {Kind::stack};
  }

  static Value loaded(const StackOp& op, const State& state) {
    if (op.base == kNoRegister) return {};
    return state.reg[op.base].on_stack() ? Value{Kind::spilled} : Value{};
  }

  static void apply(const StackOp& op, State& state) {
    Value value;
    if (op.from != kNoRegister) value = state.reg[op.from];
    if (op.effect == Effect::add) move(value, op.value);
    if (op.effect == Effect::mix && value.on_stack()) value = {Kind::stack};
    if (op.effect == Effect::load) value = loaded(op, state);
    if (op.effect == Effect::pop) value = state.sp().on_stack() ? Value{Kind::spilled} : Value{};
    Value sp = state.sp();
    for (size_t i = 0; i < 16; i++)
      if (op.written >> i & 1) state.reg[i] = {};
    switch (op.effect) {
      case Effect::none: break;
      case Effect::push: move(sp, -op.value); break;
      case Effect::pop:
        move(sp, op.value);
        if (op.to != kNoRegister) state.reg[op.to] = value;
        break;
      case Effect::leave:
        sp = state_before_leave(state);
        state.reg[kRbp] = {Kind::spilled};
        break;
      default:
        if (op.to != kNoRegister) state.reg[op.to] = value;
    }
    if (op.to != kRsp && (op.effect == Effect::push || op.effect == Effect::pop || op.effect == Effect::leave)) {
      state.sp() = sp;
    } else if (!state.sp().on_stack()) {
      // sp from a value that never was this stack's: another stack.
      state.foreign |= state.sp().kind == Kind::other;
      state.sp() = {Kind::stack};
    }
  }

  static Value state_before_leave(State& state) {
    Value v = state.reg[kRbp];
    if (!v.on_stack()) return {Kind::stack};
    move(v, 8);
    return v;
  }

  void complain(NoHijack reason) {
    if (verdict_ == NoHijack::none) verdict_ = reason;
  }

  void judge(const StackOp& op, const State& state) {
    Value sp = state.reg[kRsp];
    if (op.base != kNoRegister && state.reg[op.base].kind == Kind::exact) {
      int64_t low = state.reg[op.base].offset + op.disp;
      bool slot = low < 8 && low + op.size > 0;
      // Realigned frames carry a copy of the return address, for debuggers: harmless unless it is read.
      if (slot && op.effect == Effect::push && sp.kind == Kind::stack) {
        copies_ = true;
      } else if (slot) {
        if (op.reads) complain(NoHijack::reads_return_address);
        if (op.writes) complain(NoHijack::pops_return_address);
      }
    }
    if (op.base == kRbp && op.disp == 8 && op.reads && state.reg[kRbp].kind != Kind::exact) reads_copy_ = true;
    if (op.effect == Effect::pop && sp.kind == Kind::exact && sp.offset >= 0) complain(NoHijack::pops_return_address);
    if (op.effect == Effect::add && op.to != kRsp && state.reg[op.from].kind == Kind::exact &&
        state.reg[op.from].offset + op.value == 0)
      complain(NoHijack::reads_return_address);  // its address, for others to read
    bool leaves = op.flow == Flow::ret || op.flow == Flow::jump_indirect;
    if (leaves && state.foreign) complain(NoHijack::returns_elsewhere);
    if (op.flow == Flow::ret && sp.kind == Kind::exact && sp.offset != 0) complain(NoHijack::returns_elsewhere);
  }

  const CodeView& view_;
  CodeRange own_;
  std::vector<Part> parts_;
  std::map<uint64_t, Block> blocks_;
  std::vector<uint64_t> work_;
  std::vector<Pending> behind_calls_;
  State indirect_state_;
  bool indirect_ = false, judging_ = false, pops_ = false, copies_ = false, reads_copy_ = false;
  NoHijack verdict_ = NoHijack::none;
};

}  // namespace

NoHijack no_hijack_by_code(const CodeView& view, CodeRange function) { return Analysis(view, function).run(); }

}  // namespace sonde::host
