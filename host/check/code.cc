// See code.h.
#include "host/check/code.h"

#include <algorithm>
#include <cstring>

namespace sonde::host::check {
namespace {

constexpr size_t kMaxEntries = 1 << 16;  // of one table

}  // namespace

Op* Part::find(uint64_t pc) {
  auto it = std::ranges::lower_bound(ops, pc, {}, &Op::pc);
  return it != ops.end() && it->pc == pc ? &*it : nullptr;
}

Code::Code(const Image& image) : image_(image) {
  auto functions = image.functions();
  for (uint32_t i = 0; i < functions.size(); i++) {
    const Function& f = functions[i];
    uint64_t end = f.range.end.value;
    if (f.sizeless) {
      for (const Segment& s : image.segments())
        if (s.range.contains(f.range.begin)) end = s.range.end.value;
      if (i + 1 < functions.size()) end = std::min(end, functions[i + 1].range.begin.value);
    }
    parts_.push_back({i, f.range.begin.value, end, !f.cold_part && !f.label, {}});
  }
  for (Part& part : parts_) decode_part(part);
  std::ranges::sort(referred_);
  find_entries();
  for (Part& part : parts_)
    for (const Op& op : part.ops)
      if (is_direct(op.flow) || op.target)
        if (Part* to = part_at(op.target))
          if (Op* target = to->find(op.target)) {
            target->leader |= op.flow != Flow::call;
            if (op.flow == Flow::call && op.target != to->begin && op.target != op.next())
              inner_entries_.push_back(op.target);
          }
  std::ranges::sort(inner_entries_);
  inner_entries_.erase(std::unique(inner_entries_.begin(), inner_entries_.end()), inner_entries_.end());
}

// Cold parts may begin like a function: with a filler, so that no landing pad lies at offset 0.
void Code::find_entries() {
  std::vector<bool> entered(parts_.size());
  auto enter = [&](uint64_t pc) {
    if (Part* part = part_at(pc); part && part->begin == pc) entered[static_cast<size_t>(part - parts_.data())] = true;
  };
  for (uint64_t address : referred_) enter(address);
  for (const Part& part : parts_)
    for (const Op& op : part.ops)
      if (op.flow == Flow::call) enter(op.target);
  // Pointers, addends of relocations, and symbols.
  uint64_t first = parts_.empty() ? 0 : parts_.front().begin, last = parts_.empty() ? 0 : parts_.back().end;
  for (const Segment& s : image_.segments()) {
    auto data = bytes(s.range.begin.value);
    for (size_t i = -s.range.begin.value & 7; i + 8 <= data.size(); i += 8) {
      uint64_t word;
      std::memcpy(&word, data.data() + i, 8);
      if (first <= word && word < last) enter(word);
    }
  }
  enter(image_.entry().value);
  for (size_t i = 0; i < parts_.size(); i++) {
    Part& part = parts_[i];
    if (image_.functions()[part.function].source != FunctionSource::eh_frame || part.ops.empty()) continue;
    auto first = decode(bytes(part.begin).first(part.ops[0].length), part.begin);
    bool aligned = part.begin % 16 == 0;  // as compilers place functions, not parts of them
    part.entry &= (entered[i] || aligned) && !first->nop;
  }
}

void Code::decode_part(Part& part) {
  auto all = bytes(part.begin);
  all = all.first(std::min<uint64_t>(all.size(), part.end - part.begin));
  part.ops.reserve(all.size() / 4);
  for (size_t at = 0; at < all.size();) {
    auto op = decode_op(all.subspan(at, std::min<size_t>(15, all.size() - at)), part.begin + at);
    if (!op) break;
    at += op->length;
    if (op->act == Act::set && op->to != kNone) referred_.push_back(static_cast<uint64_t>(op->value));
    else if (op->memory.base == kNone) referred_.push_back(static_cast<uint64_t>(op->memory.disp));
    part.ops.push_back(*op);
  }
}

Part* Code::part_at(uint64_t pc) {
  auto it = std::ranges::upper_bound(parts_, pc, {}, &Part::begin);
  return it != parts_.begin() && pc < (it - 1)->end ? &*(it - 1) : nullptr;
}

std::span<const uint8_t> Code::bytes(uint64_t from) const {
  for (const Segment& s : image_.segments()) {
    ImageAddr end = s.range.begin + static_cast<int64_t>(s.file_size);
    if (s.range.begin.value <= from && from < end.value) return image_.bytes({ImageAddr(from), end});
  }
  return {};
}

std::vector<uint64_t> Code::table_targets(uint64_t at, Table kind, uint64_t base, const Part& within) {
  auto data = bytes(at);
  auto next = std::ranges::upper_bound(referred_, at);
  if (next != referred_.end()) data = data.first(std::min<uint64_t>(data.size(), *next - at));
  size_t size = kind == Table::offsets ? 4 : 8;
  std::vector<uint64_t> targets;
  for (size_t i = 0; i + size <= data.size() && i / size < kMaxEntries; i += size) {
    uint64_t target;
    if (kind == Table::offsets) {
      int32_t offset;
      std::memcpy(&offset, data.data() + i, 4);
      target = base + static_cast<uint64_t>(int64_t{offset});
    } else {
      std::memcpy(&target, data.data() + i, 8);
    }
    Part* to = part_at(target);
    if (!to || (to != &within && to->entry) || !to->find(target)) break;
    targets.push_back(target);
  }
  std::ranges::sort(targets);
  targets.erase(std::unique(targets.begin(), targets.end()), targets.end());
  return targets;
}

}  // namespace sonde::host::check
