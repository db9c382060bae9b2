// See flow.h. States of blocks are joined until they no longer change; only then are they judged, each once.
#include "host/check/flow.h"

#include "core/isa/x86_64.h"

namespace sonde::host::check {
namespace {

constexpr size_t kMaxParts = 16;
constexpr unsigned kMaxRounds = 100;
constexpr uint8_t kSavedRegisters = (1u << X86_64::kSaved.size()) - 1;
constexpr size_t kMaxVisits = 300;  // of each instruction, on average

// Identifies an edge that is not certain: out of the call or table jump at `pc`; 0 for certain ones.
constexpr uint64_t weak_edge(uint64_t pc, uint64_t target) { return pc << 32 | (target & 0xffffffff); }

struct Block {
  State state;
  uint64_t weak = 0;  // the weak edge by which alone control comes here, directly or not; 0: there is another way
};

class Analysis {
 public:
  Analysis(Code& code, Part& part, const Table& table, const LandingPads& pads, uint64_t begin)
      : code_(code), own_(part), begin_(begin), table_(table), pads_(pads) {}

  FunctionFlow run() {
    for (unsigned round = 0; again_ && round < kMaxRounds; round++) settle();
    if (again_ || out_.gave_up) return give_up();
    judging_ = true;
    for (auto& [pc, block] : blocks_) walk(pc, block);
    out_.clobbered = exits_ ? static_cast<uint8_t>(kSavedRegisters & ~preserved_) : 0;
    return std::move(out_);
  }

 private:
  FunctionFlow give_up() {
    FunctionFlow nothing;
    nothing.gave_up = true;
    return nothing;
  }

  void settle() {
    again_ = false;
    blocks_.clear();
    work_.clear();
    arrive(begin_, entered_by_return() ? State::at_return() : State::at_entry(), 0);
    while (!work_.empty() && !out_.gave_up) {
      uint64_t pc = *work_.begin();
      work_.erase(work_.begin());
      Block block = blocks_.at(pc);
      walk(pc, block);
    }
  }

  // Code that functions return to instead of to their callers (return trampolines, and where they lead): the CFA is sp itself,
  // and the return address is no word of the stack, but is computed.
  bool entered_by_return() const {
    const Row* row = table_.lookup(ImageAddr(begin_));
    return row && row->cfa_kind == CfaKind::reg_offset && row->cfa_reg == X86_64::rsp && row->cfa_offset == 0 &&
           row->ra_kind == ValueKind::is_expression;
  }

  Op* find(uint64_t pc) {
    if (pc < at_->begin || pc >= at_->end) {
      Part* part = code_.part_at(pc);
      if (!part) return nullptr;
      at_ = part;
    }
    return at_->find(pc);
  }

  void forget_edge(uint64_t edge) {
    if (edge && dead_.insert(edge).second) again_ = true;
  }

  // Control comes to pc in this state, by a path that depends on edge `weak`.
  void arrive(uint64_t pc, const State& state, uint64_t weak) {
    if (judging_ || (weak && dead_.contains(weak))) return;
    Op* op = find(pc);
    if (!op) return;
    if (!op->leader && pc != begin_) op->leader = true, again_ = true;
    auto [it, fresh] = blocks_.try_emplace(pc, Block{state, weak});
    if (!fresh) {
      Block& block = it->second;
      const Value &here = block.state.reg[rsp], &there = state.reg[rsp];
      if (here.is_frame() && there.is_frame() && here.of == there.of && here.plus != there.plus) {
        // One of the two paths is none: an uncertain one that the row contradicts too, or that the row cannot tell from a
        // certain one. Where the row contradicts the certain one both stay, and nothing is known.
        bool here_wrong = wrong_frame(pc, block.state), there_wrong = wrong_frame(pc, state);
        if (weak && (there_wrong || (!block.weak && !here_wrong))) return forget_edge(weak);
        if (block.weak && (here_wrong || (!weak && !there_wrong))) return forget_edge(block.weak);
      }
      if (!weak) block.weak = 0;
      State joined = block.state;
      joined.join(state);
      if (joined == block.state) return;
      block.state = std::move(joined);
    }
    work_.insert(pc);
  }

  bool wrong_frame(uint64_t pc, const State& state) const {
    return judge(table_, table_.lookup(ImageAddr(pc)), state).wrong & kWrongCfa;
  }

  void walk(uint64_t pc, const Block& block) {
    State state = block.state;
    uint64_t weak = block.weak;
    Op* op = find(pc);
    Part* part = at_;
    for (bool first = true; op; first = false) {
      if (!first && op->leader) return arrive(op->pc, state, weak);
      if (judging_) judge_at(*op, state);
      else if (++visits_ > kMaxVisits * (followed_ + 100)) return void(out_.gave_up = true);
      switch (op->flow) {
        case Flow::jump: return branch_to(op->target, *part, state, weak);
        case Flow::branch:
        case Flow::transaction: {
          State taken = state;
          taken.apply(*op);
          branch_to(op->target, *part, taken, weak);
          break;
        }
        case Flow::counted:
          state.apply(*op);
          branch_to(op->target, *part, state, weak);
          break;
        case Flow::call:
        case Flow::call_indirect:
          if (!behind_call(*op, *part, state, &weak)) return;
          break;
        case Flow::jump_indirect: return jump_indirect(*op, *part, state);
        case Flow::ret: return leave(state);
        case Flow::stop:
        case Flow::strange: return;
        case Flow::next: state.apply(*op); break;
        case Flow::trap: break;
      }
      uint64_t next = op->next();
      op = op + 1 < part->ops.data() + part->ops.size() ? op + 1 : nullptr;
      if (!op && next == part->end) return branch_to(next, *part, state, weak);
    }
  }

  // Whether control goes on behind the call; state is then what it is there.
  bool behind_call(const Op& op, const Part& part, State& state, uint64_t* weak) {
    uint64_t next = op.next();
    if (op.flow == Flow::call && op.target == next) {  // to learn its own address
      state.push_return_address();
      return true;
    }
    state.return_from_call();
    if (uint64_t pad = pads_.pad_of(op.pc)) {
      State thrown = state;
      // Arguments that were pushed for the call are gone there.
      if (!same_by_sp(op.pc, pad)) thrown.reg[rsp] = kBlur;
      arrive(pad, thrown, *weak);
    }
    *weak = weak_edge(op.pc, 0);
    return next < part.end && !dead_.contains(*weak) &&
           table_.lookup(ImageAddr(op.pc)) == table_.lookup(ImageAddr(next));
  }

  // Both rows find the CFA at one distance from the stack pointer.
  bool same_by_sp(uint64_t a, uint64_t b) const {
    const Row *x = table_.lookup(ImageAddr(a)), *y = table_.lookup(ImageAddr(b));
    auto by_sp = [](const Row* row) {
      return row && row->cfa_kind == CfaKind::reg_offset && row->cfa_reg == X86_64::rsp;
    };
    return by_sp(x) && by_sp(y) && x->cfa_offset == y->cfa_offset;
  }

  void branch_to(uint64_t target, const Part& from, const State& state, uint64_t weak) {
    Part* part = code_.part_at(target);
    bool enters = part && part->entry && target == part->begin && part != &own_;
    if (!part || enters) return leave(state);
    // Compilers turn cases that cannot occur into jumps to where they have put no code, which is where another function's
    // cold part begins.
    if (part != &from && wrong_frame(target, state)) return;
    if (!join_part(*part)) return leave(state);
    arrive(target, state, weak);
  }

  // Cold parts belong to the function that jumps there, and so do the insides of others.
  bool join_part(Part& part) {
    if (&part == &own_ || parts_.contains(&part)) return true;
    if (parts_.size() >= kMaxParts) return false;
    parts_.insert(&part);
    followed_ += part.ops.size();
    return true;
  }

  void jump_indirect(const Op& op, const Part& part, const State& state) {
    Value to;
    if (op.indirect_memory) to = state.load(op.memory);
    else if (op.from != kNone) to = state.reg[op.from];
    bool offsets = to.kind == Value::target;
    if (!offsets && !to.is(kPointerTable)) return leave(state);
    auto [it, fresh] = tables_.try_emplace(op.pc);
    if (fresh)
      it->second = code_.table_targets(static_cast<uint64_t>(to.plus),
                                       offsets ? Code::Table::offsets : Code::Table::addresses, to.of, part);
    for (uint64_t target : it->second)
      if (table_.lookup(ImageAddr(op.pc)) == table_.lookup(ImageAddr(target)))
        arrive(target, state, weak_edge(op.pc, target));
  }

  // Control leaves the function here.
  void leave(const State& state) {
    if (!judging_) return;
    exits_ = true;
    for (unsigned i = 0; i < X86_64::kSaved.size(); i++) {
      unsigned reg = machine_register(X86_64::kSaved[i]);
      if (state.reg[reg] == entry_of(reg)) preserved_ |= static_cast<uint8_t>(1u << i);
    }
  }

  void judge_at(const Op& op, const State& state) {
    const Row* row = table_.lookup(ImageAddr(op.pc));
    Judgement judgement = judge(table_, row, state);
    auto [it, fresh] = out_.seen.try_emplace(op.pc);
    if (!fresh && it->second.judgement.verdict >= judgement.verdict) return;
    it->second = {judgement, row, judgement.verdict >= Verdict::unknown ? format_truth(state) : ""};
  }

  Code& code_;
  Part& own_;
  const uint64_t begin_;
  const Table& table_;
  const LandingPads& pads_;
  FunctionFlow out_;
  Part* at_ = &own_;  // where the last search ended
  std::set<Part*> parts_;
  std::unordered_map<uint64_t, Block> blocks_;
  std::set<uint64_t> work_;  // lowest first: mostly along the flow of control
  std::unordered_set<uint64_t> dead_;
  std::unordered_map<uint64_t, std::vector<uint64_t>> tables_;
  size_t visits_ = 0, followed_ = own_.ops.size();  // instructions: how often, of how many
  uint8_t preserved_ = 0;
  bool again_ = true, judging_ = false, exits_ = false;
};

}  // namespace

FunctionFlow follow(Code& code, Part& part, const Table& table, const LandingPads& pads, uint64_t begin) {
  return Analysis(code, part, table, pads, begin).run();
}

}  // namespace sonde::host::check
