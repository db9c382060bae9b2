// See value.h.
#include "host/check/value.h"

namespace sonde::host::check {
namespace {

constexpr int64_t kFarthest = int64_t{1} << 30;  // from a place of the stack: what lies beyond is not followed

Value without_exactness(const Value& v) {
  if (v.kind == Value::target) return kMade;
  if (v.kind != Value::exact) return v;
  if (v.is_kept()) return kTop;
  return v.is_frame() ? kBlur : kMade;
}

Value weaker(const Value& a, const Value& b) { return a.kind > b.kind ? a : b; }

}  // namespace

Value join(const Value& a, const Value& b) { return a == b ? a : weaker(without_exactness(a), without_exactness(b)); }

Value mix(const Value& a, const Value& b) { return weaker(without_exactness(a), without_exactness(b)); }

Value plus(const Value& value, int64_t distance) {
  if (value.kind != Value::exact) return distance ? without_exactness(value) : value;
  int64_t sum;
  bool overflow = __builtin_add_overflow(value.plus, distance, &sum);
  if (value.of == kConstant)
    return constant(static_cast<int64_t>(static_cast<uint64_t>(value.plus) + static_cast<uint64_t>(distance)));
  if (value.of == kOffsetTable || value.of == kPointerTable) return distance ? kMade : value;
  if (overflow || sum > kFarthest || sum < -kFarthest) return without_exactness(value);
  return exactly(value.of, sum);
}

}  // namespace sonde::host::check
