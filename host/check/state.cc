// See state.h.
#include "host/check/state.h"

#include <algorithm>
#include <optional>
#include <tuple>

namespace sonde::host::check {
namespace {

constexpr uint32_t kLeakedAnywhere = 1u << kRegs;
constexpr int64_t kLowestAddress = 4096;
constexpr size_t kMaxSlots = 200;  // more than any function keeps; beyond them nothing is known of the frame

auto key(const Slot& slot) { return std::tuple(slot.of, slot.at); }

// An offset table's entry added to an address, mostly the table's own.
Value jump_target(const Value& base, const Value& entry) {
  if (base.plus < 0 || base.plus > UINT32_MAX) return kMade;
  return {Value::target, static_cast<uint32_t>(base.plus), entry.plus};
}

bool is_argument(const Value& v) { return v.kind == Value::exact && v.of >= kEntry && v.of < kReturn; }

}  // namespace

State State::at_entry() {
  State s;
  for (unsigned r = 0; r < kRegs; r++) s.reg[r] = entry_of(r);
  s.reg[rsp] = exactly(kCfa, -8);
  s.slots_.push_back({kCfa, -8, exactly(kReturn)});
  return s;
}

State State::at_return() {
  State s = at_entry();
  s.reg[rsp] = exactly(kCfa);
  s.slots_.back().value = kTop;
  return s;
}

Value State::untouched(uint32_t of, int64_t at) const { return of == kCfa && at >= called_at_ ? kMade : kTop; }

Value State::read_slot(uint32_t of, int64_t at) const {
  auto it = std::ranges::lower_bound(slots_, std::tuple(of, static_cast<int32_t>(at)), {}, key);
  if (it != slots_.end() && it->of == of && it->at == at) return it->value;
  return untouched(of, at);
}

void State::write_slot(uint32_t of, int64_t at, const Value& value) {
  auto it = std::ranges::lower_bound(slots_, std::tuple(of, static_cast<int32_t>(at)), {}, key);
  bool found = it != slots_.end() && it->of == of && it->at == at;
  if (value == untouched(of, at)) {
    if (found) slots_.erase(it);
  } else if (found) {
    it->value = value;
  } else if (slots_.size() < kMaxSlots) {
    slots_.insert(it, {of, static_cast<int32_t>(at), value});
  } else {
    slots_.clear();
    called_at_ = INT64_MAX;
  }
}

// In memory only what is the caller's or of the stack is followed, and addresses of jump tables.
static Value kept_in_memory(const Value& v) {
  if (v.is(kConstant) && v.plus >= kLowestAddress) return v;
  if (v.kind != Value::exact || v.is_kept() || v.is_frame()) return v.kind == Value::target ? kMade : v;
  return kMade;
}

void State::store(const Value& address, unsigned size, const Value& value) {
  if (!address.is_frame()) {
    if (value.is_kept() || value.is(kCfa))
      leaked_ |= is_argument(address) ? 1u << (address.of - kEntry) : kLeakedAnywhere;
    return;
  }
  int64_t begin = address.plus, end = begin + size;
  const Value partly = value.kind == Value::top && size != 8 ? kTop : kMade;
  auto it = std::ranges::lower_bound(slots_, std::tuple(address.of, static_cast<int32_t>(begin - 7)), {}, key);
  std::vector<int32_t> overlapped;
  for (; it != slots_.end() && it->of == address.of && it->at < end; ++it) overlapped.push_back(it->at);
  for (int32_t at : overlapped) write_slot(address.of, at, partly);
  if (size == 8) write_slot(address.of, begin, kept_in_memory(value));
  else if (value.kind == Value::top)
    for (int64_t at = begin; at + 8 <= end; at += 8) write_slot(address.of, at, kTop);
}

Value State::address(const Memory& m) const {
  if (m.elsewhere) return kMade;
  Value base = m.base == kNone ? constant(0) : reg[m.base];
  if (m.index != kNone) {
    const Value& index = reg[m.index];
    if (index.is(kConstant)) base = plus(base, index.plus * m.scale);
    else if (base.is(kConstant, 0) && m.scale == 1) base = index;
    else return mix(base, m.scale == 1 ? index : kMade);
  }
  return plus(base, m.disp);
}

Value State::load(const Value& address) const {
  if (address.is_frame()) return read_slot(address.of, address.plus);
  if (is_argument(address)) return leaked_ & (1u << (address.of - kEntry) | kLeakedAnywhere) ? kTop : kMade;
  if (address.kind <= Value::made) return leaked_ & kLeakedAnywhere ? kTop : kMade;
  return kTop;
}

// An element of a table at a fixed address is remembered as that.
Value State::load(const Memory& m) const {
  if (m.index != kNone && m.scale == 8 && !m.elsewhere && !reg[m.index].is(kConstant)) {
    Value base = plus(m.base == kNone ? constant(0) : reg[m.base], m.disp);
    if (base.is(kConstant)) return exactly(kPointerTable, base.plus);
  }
  return load(address(m));
}

void State::set(uint8_t to, const Value& value) { reg[to] = value; }

void State::push(const Value& value) {
  reg[rsp] = plus(reg[rsp], -8);
  store(reg[rsp], 8, value);
}

Value State::pop() {
  Value value = load(reg[rsp]);
  reg[rsp] = plus(reg[rsp], 8);
  return value;
}

// From now on base(pc) is another address: nothing may still mean the old one.
Value State::new_base(uint64_t pc, const Value& from, bool at_most) {
  uint32_t symbol = static_cast<uint32_t>(kBase + pc);
  std::optional<int64_t> limit;
  if (at_most && from.is(kCfa)) limit = from.plus;
  if (at_most)
    for (const Limit& l : limits_)
      if (from.is(l.of)) limit = l.at_most + from.plus;
  for (Value& v : reg)
    if (v.is(symbol)) v = kBlur;
  std::erase_if(slots_, [&](const Slot& s) { return s.of == symbol; });
  std::erase_if(limits_, [&](const Limit& l) { return l.of == symbol; });
  for (Slot& s : slots_)
    if (s.value.is(symbol)) s.value = kBlur;
  if (limit) limits_.insert(std::ranges::upper_bound(limits_, symbol, {}, &Limit::of), {symbol, *limit});
  return exactly(symbol);
}

bool State::is_below_cfa(const Value& value, int64_t n) const {
  for (const Limit& l : limits_)
    if (value.is(l.of)) return l.at_most + value.plus < n;
  return false;
}

Value State::scaled(const Op& op) {
  Value from = op.from == kNone ? constant(0) : reg[op.from];
  const Value& other = reg[op.other];
  if (op.scale == 1 && op.value == 0) {
    if (from.is(kConstant) && other.is(kOffsetTable)) return jump_target(from, other);
    if (other.is(kConstant) && from.is(kOffsetTable)) return jump_target(other, from);
  }
  if (other.is(kConstant)) return plus(plus(from, other.plus * op.scale), op.value);
  if (op.scale == 1 && from.is(kConstant)) return plus(other, from.plus + op.value);
  bool distance = op.scale == -1 && other.is_frame();
  if (from.is_frame() && !distance && (op.to == op.from || !other.is_frame())) return new_base(op.pc, from, false);
  return distance ? kMade : mix(from, other);
}

void State::apply(const Op& op) {
  Value written = kMade, got;
  if (op.writes == Content::unknown) written = kTop;
  if (op.writes == Content::from) written = reg[op.from];
  if (op.writes != Content::none) store(address(op.memory), op.size, written);

  if (op.mixed) {
    Value value = kMade;
    for (unsigned r = 0; r < kRegs; r++)
      if (op.read >> r & 1) value = mix(value, reg[r]);
    for (unsigned r = 0; r < kRegs; r++)
      if (op.mixed >> r & 1) reg[r] = value;
  }
  for (unsigned r = 0; r < kRegs; r++)
    if (op.narrow >> r & 1) reg[r] = kMade;

  switch (op.act) {
    case Act::none:
    case Act::call: break;
    case Act::set: set(op.to, constant(op.value)); break;
    case Act::move: set(op.to, plus(reg[op.from], op.value)); break;
    case Act::scaled: got = scaled(op), set(op.to, got); break;
    case Act::align:
      got = reg[op.from].is_frame() ? new_base(op.pc, reg[op.from], true) : mix(reg[op.from], kMade);
      set(op.to, got);
      break;
    case Act::load: set(op.to, load(op.memory)); break;
    case Act::load_offset: {
      Value base = plus(op.memory.base == kNone ? constant(0) : reg[op.memory.base], op.memory.disp);
      bool table = op.memory.index != kNone && op.memory.scale == 4 && base.is(kConstant);
      set(op.to, table ? exactly(kOffsetTable, base.plus) : kMade);
      break;
    }
    case Act::push: push(op.from == kNone ? kMade : reg[op.from]); break;
    case Act::push_memory: push(load(op.memory)); break;
    case Act::pop:
      got = pop();
      if (op.to != kNone) set(op.to, got);
      break;
    case Act::pop_memory: got = pop(), store(address(op.memory), 8, got); break;  // its address: with rsp after the pop
    case Act::leave: reg[rsp] = reg[rbp], got = pop(), set(rbp, got); break;
    case Act::exchange: std::swap(reg[op.to], reg[op.from]); break;
    case Act::choose: set(op.to, op.from == kNone ? kTop : check::join(reg[op.to], reg[op.from])); break;
    case Act::lose_stack: reg[rsp] = kTop; break;
  }
}

void State::return_from_call() {
  for (unsigned r = 0; r < kRegs; r++)
    if (!is_callee_saved(r) && r != rsp) reg[r] = check::join(reg[r], kMade);
  const Value& sp = reg[rsp];
  if (sp.is(kCfa)) called_at_ = std::max(called_at_, sp.plus);
  // What a callee left there is nothing to rely on.
  std::erase_if(slots_, [&](const Slot& s) { return sp.is(s.of) && s.at < sp.plus; });
}

void State::push_return_address() { push(kMade); }

void State::join(const State& other) {
  for (unsigned r = 0; r < kRegs; r++) reg[r] = check::join(reg[r], other.reg[r]);
  State before = std::move(*this);
  reg = before.reg;
  called_at_ = std::max(before.called_at_, other.called_at_);
  leaked_ = before.leaked_ | other.leaked_;
  slots_.clear(), limits_.clear();
  for (const Limit& l : before.limits_)
    for (const Limit& m : other.limits_)
      if (l.of == m.of) limits_.push_back({l.of, std::max(l.at_most, m.at_most)});
  auto a = before.slots_.begin();
  auto b = other.slots_.begin();
  auto keep = [&](uint32_t of, int32_t at, const Value& value) {
    if (!(value == untouched(of, at))) slots_.push_back({of, at, value});
  };
  while (a != before.slots_.end() || b != other.slots_.end()) {
    if (b == other.slots_.end() || (a != before.slots_.end() && key(*a) < key(*b))) {
      keep(a->of, a->at, check::join(a->value, other.untouched(a->of, a->at))), ++a;
    } else if (a == before.slots_.end() || key(*b) < key(*a)) {
      keep(b->of, b->at, check::join(b->value, before.untouched(b->of, b->at))), ++b;
    } else {
      keep(a->of, a->at, check::join(a->value, b->value)), ++a, ++b;
    }
  }
  if (slots_.size() > kMaxSlots) slots_.clear(), called_at_ = INT64_MAX;
}

}  // namespace sonde::host::check
