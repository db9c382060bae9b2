// The stack machine of DWARF 5 section 2.5. All values are 64-bit; comparisons and division are signed (2.5.1.4, 2.5.1.5).
#include "core/unwind/expression.h"

#include "core/base/cursor.h"

namespace sonde {
namespace {

// Operation codes: DWARF 5 table 7.9.
enum Op : uint8_t {
  op_deref = 0x06,
  op_const1u = 0x08,
  op_const1s,
  op_const2u,
  op_const2s,
  op_const4u,
  op_const4s,
  op_const8u,
  op_const8s,
  op_constu,
  op_consts,
  op_dup,
  op_drop,
  op_over,
  op_pick,
  op_swap,
  op_rot,
  op_abs = 0x19,
  op_and,
  op_div,
  op_minus,
  op_mod,
  op_mul,
  op_neg,
  op_not,
  op_or,
  op_plus,
  op_plus_uconst,
  op_shl,
  op_shr,
  op_shra,
  op_xor,
  op_bra,
  op_eq,
  op_ge,
  op_gt,
  op_le,
  op_lt,
  op_ne,
  op_skip,
  op_lit0,
  op_lit31 = 0x4f,
  op_breg0 = 0x70,
  op_breg31 = 0x8f,
  op_bregx = 0x92,
  op_deref_size = 0x94,
  op_nop = 0x96,
};

class Machine {
 public:
  Machine(std::span<const uint8_t> code, const ExpressionFrame& frame) : code_(code), at_(code), frame_(frame) {}

  Result<uint64_t> run(const uint64_t* initial) {
    if (initial) push(*initial);
    for (unsigned steps = 0; at_.left(); steps++) {
      if (steps == kMaxExpressionSteps) return sonde::fail(ErrorCode::exhausted, kMaxExpressionSteps);
      op_at_ = at_.at();
      execute(at_.read<uint8_t>());
      if (!at_.ok()) fail(ErrorCode::malformed);
      if (failed_) return std::unexpected(error_);
    }
    op_at_ = code_.size();
    uint64_t top = pop();
    if (failed_) return std::unexpected(error_);
    return top;
  }

 private:
  void fail(ErrorCode code) {
    if (!failed_) error_ = {code, static_cast<uint32_t>(op_at_)};
    failed_ = true;
  }
  void push(uint64_t value) {
    if (depth_ == kMaxExpressionStack) return fail(ErrorCode::exhausted);
    stack_[depth_++] = value;
  }
  uint64_t pop() { return depth_ ? stack_[--depth_] : (fail(ErrorCode::malformed), 0); }
  uint64_t peek(unsigned below_top) {
    return below_top < depth_ ? stack_[depth_ - 1 - below_top] : (fail(ErrorCode::malformed), 0);
  }

  void push_register(uint64_t number, int64_t offset) {
    if (number >= frame_.register_count || !(frame_.valid >> number & 1)) return fail(ErrorCode::not_found);
    push(frame_.registers[number] + static_cast<uint64_t>(offset));
  }

  // Reads whole aligned words around the bytes asked for, so that no byte of another page is touched.
  void dereference(unsigned size) {
    uint64_t address = pop(), value = 0, next = 0;
    if (failed_) return;
    bool read;
    if (size == 8) {
      read = frame_.read(frame_.memory, Addr(address), &value);
    } else {
      uint64_t word = address & ~uint64_t{7}, skip = address & 7;
      read = frame_.read(frame_.memory, Addr(word), &value);
      if (read && skip + size > 8) read = frame_.read(frame_.memory, Addr(word + 8), &next);
      value >>= 8 * skip;
      if (skip + size > 8) value |= next << (8 * (8 - skip));
      value &= (uint64_t{1} << (8 * size)) - 1;
    }
    if (!read) return fail(ErrorCode::unreadable);
    push(value);
  }

  void jump(int16_t distance) {
    int64_t target = static_cast<int64_t>(at_.at()) + distance;
    if (!at_.ok() || target < 0 || target > static_cast<int64_t>(code_.size())) return fail(ErrorCode::malformed);
    at_ = Cursor(code_, static_cast<size_t>(target));
  }

  void binary(uint8_t op) {
    uint64_t b = pop(), a = pop();
    int64_t sa = static_cast<int64_t>(a), sb = static_cast<int64_t>(b);
    switch (op) {
      case op_and: return push(a & b);
      case op_div:
        if (b == 0) return fail(ErrorCode::malformed);
        return push(sb == -1 ? 0 - a : static_cast<uint64_t>(sa / sb));
      case op_minus: return push(a - b);
      case op_mod: return b ? push(a % b) : fail(ErrorCode::malformed);
      case op_mul: return push(a * b);
      case op_or: return push(a | b);
      case op_plus: return push(a + b);
      case op_shl: return push(b < 64 ? a << b : 0);
      case op_shr: return push(b < 64 ? a >> b : 0);
      case op_shra: return push(static_cast<uint64_t>(sa >> (b < 64 ? b : 63)));
      case op_xor: return push(a ^ b);
      case op_eq: return push(a == b);
      case op_ge: return push(sa >= sb);
      case op_gt: return push(sa > sb);
      case op_le: return push(sa <= sb);
      case op_lt: return push(sa < sb);
      case op_ne: return push(a != b);
      default: return fail(ErrorCode::unsupported);
    }
  }

  void execute(uint8_t op) {
    if (op >= op_lit0 && op <= op_lit31) return push(op - op_lit0);
    if (op >= op_breg0 && op <= op_breg31) return push_register(op - op_breg0, at_.sleb());
    switch (op) {
      case op_deref: return dereference(8);
      case op_deref_size: {
        unsigned size = at_.read<uint8_t>();
        return size >= 1 && size <= 8 ? dereference(size) : fail(ErrorCode::malformed);
      }
      case op_const1u: return push(at_.read<uint8_t>());
      case op_const1s: return push(static_cast<uint64_t>(int64_t{at_.read<int8_t>()}));
      case op_const2u: return push(at_.read<uint16_t>());
      case op_const2s: return push(static_cast<uint64_t>(int64_t{at_.read<int16_t>()}));
      case op_const4u: return push(at_.read<uint32_t>());
      case op_const4s: return push(static_cast<uint64_t>(int64_t{at_.read<int32_t>()}));
      case op_const8u:
      case op_const8s: return push(at_.read<uint64_t>());
      case op_constu: return push(at_.uleb());
      case op_consts: return push(static_cast<uint64_t>(at_.sleb()));
      case op_dup: return push(peek(0));
      case op_drop: return void(pop());
      case op_over: return push(peek(1));
      case op_pick: return push(peek(at_.read<uint8_t>()));
      case op_swap: {
        uint64_t b = pop(), a = pop();
        return push(b), push(a);
      }
      case op_rot: {  // the top goes below the next two
        uint64_t c = pop(), b = pop(), a = pop();
        return push(c), push(a), push(b);
      }
      case op_abs: {
        uint64_t a = pop();
        return push(static_cast<int64_t>(a) < 0 ? 0 - a : a);
      }
      case op_neg: return push(0 - pop());
      case op_not: return push(~pop());
      case op_plus_uconst: {
        uint64_t a = pop();
        return push(a + at_.uleb());
      }
      case op_skip: return jump(at_.read<int16_t>());
      case op_bra: {
        int16_t distance = at_.read<int16_t>();
        if (pop()) jump(distance);
        return;
      }
      case op_bregx: {
        uint64_t number = at_.uleb();
        return push_register(number, at_.sleb());
      }
      case op_nop: return;
      default: return binary(op);
    }
  }

  std::span<const uint8_t> code_;
  Cursor at_;
  const ExpressionFrame& frame_;
  size_t op_at_ = 0;
  unsigned depth_ = 0;
  bool failed_ = false;
  Error error_{};
  uint64_t stack_[kMaxExpressionStack];
};

// Steps over one operation's operands; false if the operation or its register is not known.
bool skip_operation(Cursor& at, unsigned register_count, size_t size) {
  uint8_t op = at.read<uint8_t>();
  if (op >= op_lit0 && op <= op_lit31) return true;
  if (op >= op_breg0 && op <= op_breg31) return at.sleb(), op - op_breg0 < static_cast<int>(register_count);
  if (op >= op_dup && op <= op_rot && op != op_pick) return true;
  if (op >= op_abs && op <= op_ne && op != op_plus_uconst && op != op_bra) return true;
  switch (op) {
    case op_deref:
    case op_nop: return true;
    case op_const1u:
    case op_const1s:
    case op_pick: return at.skip(1), true;
    case op_deref_size: {
      unsigned bytes = at.read<uint8_t>();
      return bytes >= 1 && bytes <= 8;
    }
    case op_const2u:
    case op_const2s: return at.skip(2), true;
    case op_const4u:
    case op_const4s: return at.skip(4), true;
    case op_const8u:
    case op_const8s: return at.skip(8), true;
    case op_constu:
    case op_plus_uconst: return at.uleb(), true;
    case op_consts: return at.sleb(), true;
    case op_bregx: {
      uint64_t number = at.uleb();
      return at.sleb(), number < register_count;
    }
    case op_skip:
    case op_bra: {
      int64_t target = at.read<int16_t>();
      target += static_cast<int64_t>(at.at());
      return target >= 0 && target <= static_cast<int64_t>(size);
    }
    default: return false;
  }
}

}  // namespace

Result<uint64_t> evaluate(std::span<const uint8_t> expression, const ExpressionFrame& frame, const uint64_t* initial) {
  return Machine(expression, frame).run(initial);
}

bool expression_is_known(std::span<const uint8_t> expression, unsigned register_count) {
  Cursor at(expression);
  while (at.left())
    if (!skip_operation(at, register_count, expression.size()) || !at.ok()) return false;
  return at.ok() && !expression.empty();
}

}  // namespace sonde
