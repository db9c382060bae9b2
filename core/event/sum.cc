// What is rare: new nodes, calls that find no room, changes of stack, calls that end in another thread than they began.
#include "core/event/sum.h"

#include "core/native/ticks.h"

namespace sonde {
namespace {

constexpr uint64_t kStack = 8 << 20;  // how far a longjmp may take a first stack back
constexpr unsigned kFirst = kSumStacks;  // the bit of SumArea::first

uint32_t depth_of(SumArea* area, uint32_t node) { return sum_nodes(area)[node].depth; }

SumArea* area_of(SumArea* own, uint32_t number) {
  auto away = static_cast<int64_t>(number) - static_cast<int64_t>(own->number);
  return reinterpret_cast<SumArea*>(reinterpret_cast<char*>(own) + away * static_cast<int64_t>(own->stride));
}
// All areas are laid out alike; what another one says of itself is not needed.
SumNode* nodes_in(SumArea* own, SumArea* area) {
  uint64_t offset = reinterpret_cast<uint64_t>(sum_nodes(own)) - reinterpret_cast<uint64_t>(own);
  return reinterpret_cast<SumNode*>(reinterpret_cast<char*>(area) + offset);
}

// A quarter of the nodes is kept for those below the root, which every function may need once.
bool may_have_node(SumArea* area, uint32_t parent) {
  uint64_t limit = parent ? area->node_limit / 4 * 3 : area->node_limit;
  return __atomic_load_n(&area->nodes_taken, __ATOMIC_RELAXED) < limit && depth_of(area, parent) < kMaxSumDepth;
}

// Whether the position stands for a call in flight that was not left by longjmp, or for the first stack's outermost frames.
bool is_current(const SumCall* calls, const SumPosition& at) {
  if (!at.call) return at.slot;
  const SumCall& call = calls[at.call - 1];
  return call.slot == at.slot && !call.left_ticks;
}

unsigned place_of(const SumPosition& at) { return at.base ? (at.slot >> 14) % kSumStacks : kFirst; }
SumPosition& remembered(SumArea* area, unsigned place) { return place == kFirst ? area->first : area->stacks[place]; }

void remember(SumArea* area, const SumPosition& at) {
  if (!at.slot) return;
  unsigned place = place_of(at);
  remembered(area, place) = at;
  area->remembered |= uint64_t{1} << place;
}
void forget(SumArea* area, unsigned place) { area->remembered &= ~(uint64_t{1} << place); }

// The position outside of `at`, in this area's tree.
SumPosition caller_of(SumArea* area, const SumCall* calls, const SumPosition& at) {
  const SumCall& call = calls[at.call - 1];
  SumPosition caller = call.caller;
  if (call.area != area->number) caller.node = sum_translate(area, call.area, caller.node);
  return caller;
}

// That of the thread's first call.
bool is_first_stack(const SumArea* area, uint64_t slot) {
  return !area->outermost ||
         (area->outermost > slot ? area->outermost - slot <= kSumFrames : slot - area->outermost <= kStack);
}

struct Fit {
  bool found = false;
  bool outermost = false;  // the new call takes the place of the outermost one of that stack
  SumPosition caller{};
  uint64_t distance = 0;
};

// Whether the stack whose innermost call is `at` holds the slot, and which of its calls is the caller then.
Fit find_on_stack(SumArea* area, const SumCall* calls, SumPosition at, uint64_t slot, uint64_t least) {
  uint64_t reach = sum_reach(at);
  if (at.slot - slot - least <= reach && !sum_is_left(area, at)) return {true, false, at, at.slot - slot};
  if (!is_current(calls, at)) return {};
  if (slot + least < at.slot && at.slot - slot - least > reach) return {};  // far below
  uint64_t outer = at.slot + kStack;
  if (at.base) {
    outer = calls[at.base - 1].slot;
    if (!outer) return {};
    outer += kSumOtherFrames;
  }
  if (slot > outer) return {};
  // Calls that are passed here were left by longjmp.
  while (at.call && (at.slot - slot - least > reach || sum_is_left(area, at))) {
    if (at.call == at.base) return {true, true, calls[at.call - 1].caller, 0};
    SumPosition next = caller_of(area, calls, at);
    if (!is_current(calls, next) || next.base != at.base) return {};
    at = next;
  }
  if (!at.call && at.slot < slot + 8) at.slot = slot + 8;
  return {true, false, at, at.slot - slot};
}

// The calls from `at` outwards that lie below `outer` are gone.
void mark_left(SumCall* calls, SumPosition at, const SumPosition& outer) {
  uint64_t now = ticks();
  while (at.call && at.call != outer.call && is_current(calls, at)) {
    SumCall& call = calls[at.call - 1];
    if (!call.left_ticks) call.left_ticks = now;
    if (at.call == at.base) break;
    at = call.caller;
  }
}

// Whether the thread stood in a handler on the alternate signal stack and goes on with the stack `now` that was interrupted.
bool leaves_handler(const SumArea* area, const SumCall* calls, const SumPosition& top, const SumPosition& now) {
  if (top.slot - area->signal_begin >= area->signal_end - area->signal_begin || !top.base) return false;
  return is_current(calls, top) && calls[top.base - 1].caller.base == now.base && now.base != top.base;
}

// Among the stacks that were left, the one whose caller for the slot is nearer than `distance`.
Fit find_remembered(SumArea* area, SumCall* calls, uint64_t slot, uint64_t least, uint64_t distance, unsigned* place) {
  Fit best;
  uint64_t region = slot >> 14;
  unsigned places[] = {kFirst, static_cast<unsigned>(region % kSumStacks),
                       static_cast<unsigned>((region + 1) % kSumStacks),
                       static_cast<unsigned>((region + kSumStacks - 1) % kSumStacks)};
  for (unsigned at : places) {
    if (!(area->remembered >> at & 1)) continue;
    const SumPosition& position = remembered(area, at);
    if (!is_current(calls, position) || position.call == area->top.call) {
      forget(area, at);
      continue;
    }
    Fit fit = find_on_stack(area, calls, position, slot, least);
    if (!fit.found || fit.distance >= distance) continue;
    best = fit;
    distance = fit.distance;
    *place = at;
  }
  return best;
}

}  // namespace

void sum_prepare(SumArea* area, uint64_t area_bytes, uint32_t number, uint64_t stride, uint32_t process) {
  area->node_limit = sum_node_limit(area_bytes);
  area->table_bits = static_cast<uint32_t>(__builtin_ctzll(sum_table_entries(area_bytes)));
  area->stride = stride;
  area->number = number;
  area->nodes_taken = 1;  // the root
  __atomic_store_n(&area->process, process, __ATOMIC_RELEASE);
}

uint32_t sum_child_slow(SumArea* area, uint32_t parent, uint32_t site) {
  uint64_t key = sum_key(parent, site), *table = sum_table(area);
  uint32_t mask = (1u << area->table_bits) - 1, at = sum_hash(key, area->table_bits), made = 0;
  for (;; at = (at + 1) & mask) {  // at most half of the table is in use
    uint64_t there = __atomic_load_n(&table[at], __ATOMIC_RELAXED);
    if (!there) {
      if (!made) {
        if (!may_have_node(area, parent)) return 0;
        made = static_cast<uint32_t>(local_fetch_add(&area->nodes_taken, 1));
        if (made >= area->node_limit) return 0;  // a handler took the last one
        SumNode& node = sum_nodes(area)[made];
        node.depth = depth_of(area, parent) + 1;
        node.site = site;
        node.parent = parent;
      }
      if (local_compare_exchange(&table[at], &there, key | made)) return made;
    }
    // One that a handler put there meanwhile may be the same: then ours stays without calls.
    if (there - key - 1 < kMaxSumNodes - 1) return static_cast<uint32_t>(there - key);
  }
}

uint32_t sum_find_room(SumArea* area, uint32_t parent, uint32_t site, uint16_t* flags) {
  SumNode* nodes = sum_nodes(area);
  local_add(nodes[parent].depth >= kMaxSumDepth ? &area->too_deep : &area->no_node, 1);
  for (uint32_t at = parent; at; at = nodes[at].parent) {
    if (nodes[at].site != site) continue;
    *flags = kSumWithin;
    return at;
  }
  if (uint32_t node = sum_child(area, 0, site)) {
    *flags = kSumDisplaced;
    return node;
  }
  *flags = kSumUnplaced;
  return parent;
}

void sum_count_without_node(SumNode& counted, uint16_t flags) {
  if (flags & kSumUnplaced) return local_add(&counted.unplaced, 1);
  local_add(&counted.entered, 1);
  if (flags & kSumWithin) local_add(&counted.within, 1);
  if (flags & kSumDisplaced) local_add(&counted.displaced, 1);
}

uint32_t sum_translate(SumArea* area, uint32_t from, uint32_t node) {
  if (from == area->number) return node;
  SumArea* other = area_of(area, from);
  if (!__atomic_load_n(&other->process, __ATOMIC_ACQUIRE) || node >= area->node_limit) return 0;
  const SumNode* nodes = nodes_in(area, other);
  uint32_t depth = nodes[node].depth, mine = 0;
  if (depth > kMaxSumDepth) return 0;
  for (uint32_t level = 1; level <= depth; level++) {  // from the root down, without memory for the path
    uint32_t at = node;
    for (uint32_t up = depth; up > level; up--) {
      at = nodes[at].parent;
      if (at >= area->node_limit) return mine;
    }
    uint32_t next = sum_child(area, mine, nodes[at].site);
    if (!next) return mine;
    mine = next;
  }
  return mine;
}

SumPlace sum_find_place(SumArea* area, SumCall* calls, uint64_t slot, bool tail) {
  uint64_t least = tail ? 0 : 8;
  SumPosition top = area->top;
  Fit own = find_on_stack(area, calls, top, slot, least);
  unsigned place = 0;
  Fit other;
  if (area->remembered)
    other =
        find_remembered(area, calls, slot, least, own.found && !own.outermost ? own.distance : ~uint64_t{0}, &place);
  Fit& fit = other.found ? other : own;
  SumPosition innermost = top;
  if (other.found) {
    innermost = remembered(area, place);
    forget(area, place);
  }
  if (other.found && leaves_handler(area, calls, top, innermost)) mark_left(calls, top, {});
  else if (!own.found || other.found) remember(area, top);
  if (!fit.found) {
    if (!is_first_stack(area, slot)) return {top, 0, kSumOwnBase};
    if (area->outermost < slot + 8) area->outermost = slot + 8;
    forget(area, kFirst);  // what ran there is over
    return {{area->outermost, 0, 0, 0, 0}, 0, 0};
  }
  if (innermost.call != fit.caller.call || fit.outermost) mark_left(calls, innermost, fit.caller);
  if (fit.outermost) return {fit.caller, 0, kSumOwnBase};
  return {fit.caller, fit.caller.node, fit.caller.base};
}

void sum_entry(SumArea* area, SumCall* calls, uint32_t site, uint64_t slot) {
  SumPosition top = area->top;
  SumPlace place{top, top.node, top.base};
  if (top.slot - slot - 8 > sum_reach(top) || area->remembered) {
    place = sum_find_place(area, calls, slot, false);
    // Nothing begins here that would end, so top stays unless the thread has changed its stack for good.
    area->top = place.base == kSumOwnBase ? top : place.caller;
  }
  uint32_t node = sum_child(area, place.parent, site);
  uint16_t flags = 0;
  if (!node) node = sum_find_room(area, place.parent, site, &flags);
  SumNode& counted = sum_nodes(area)[node];
  local_add(flags & kSumUnplaced ? &counted.unplaced : &counted.entries, 1);
}

namespace {

// The call began in another thread: all of it is counted here.
void count_elsewhere_begun(SumArea* area, SumCall call, uint32_t site, ExitKind kind, uint64_t ticks) {
  SumArea* other = area_of(area, call.area);
  if (__atomic_load_n(&other->process, __ATOMIC_ACQUIRE) == area->process && call.node < area->node_limit) {
    SumNode& node = nodes_in(area, other)[call.node];
    if (node.site == site && !(call.flags & kSumUnplaced)) __atomic_fetch_add(&node.moved, 1, __ATOMIC_RELAXED);
  }
  call.parent = sum_translate(area, call.area, call.parent);
  call.node = sum_child(area, call.parent, site);
  call.flags = 0;
  call.area = static_cast<uint16_t>(area->number);
  if (!call.node) call.node = sum_find_room(area, call.parent, site, &call.flags);
  sum_count_without_node(sum_nodes(area)[call.node], call.flags);
  sum_count_end(area, call, site, kind, ticks);
}

}  // namespace

void sum_count_otherwise(SumArea* area, const SumCall& call, uint32_t site, ExitKind kind, uint64_t ticks) {
  if (kind == ExitKind::inherited) return;
  if (call.area != area->number) return count_elsewhere_begun(area, call, site, kind, ticks);
  if (call.flags & kSumUnplaced) return;
  SumNode& node = sum_nodes(area)[call.node];
  if (!(call.flags & kSumWithin)) local_add(&node.total, ticks);
  if (call.flags & kSumDisplaced) local_add(&sum_nodes(area)[call.parent].elsewhere, ticks);
  sum_raise(&node.longest, ticks);
  sum_raise(&node.shortest_inverted, ~ticks);
  local_add(kind == ExitKind::returned  ? &node.returned
            : kind == ExitKind::unwound ? &node.unwound
                                        : &node.abandoned,
            1);
}

namespace {

// Where a stack was left, no longer remembered: the thread is there again. slot 0: it was not left.
SumPosition take_left(SumArea* area, const SumCall* calls, uint32_t base) {
  SumPosition found{};
  for (uint64_t bits = area->remembered; bits; bits &= bits - 1) {
    auto place = static_cast<unsigned>(__builtin_ctzll(bits));
    const SumPosition& at = remembered(area, place);
    if (at.base != base) continue;
    if (is_current(calls, at)) found = at;
    forget(area, place);
  }
  return found;
}

// The call is over; where the thread goes on. If it was the outermost one of its stack, then where the stack was left that
// it was called from: that may have gone on meanwhile. Unknown (slot 0) if all of that has ended too.
void leave_to_caller(SumArea* area, SumCall* calls, const SumPosition& self) {
  SumPosition caller = caller_of(area, calls, self);
  if (self.call == self.base) {
    SumPosition left = take_left(area, calls, caller.base);
    if (left.slot) caller = left;
  }
  if (!is_current(calls, caller)) caller = {};
  area->top = caller;
}

}  // namespace

// Another call than the innermost one ends: those further in were left by longjmp, or it is on another stack.
void sum_leave_slow(SumArea* area, SumCall* calls, uint32_t index) {
  const SumCall& call = calls[index];
  SumPosition self{call.slot, index + 1, call.node, call.base, 0};
  SumPosition top = area->top;
  if (top.call != self.call) {
    if (top.base == call.base && top.slot < call.slot) mark_left(calls, top, self);
    else if (top.base != call.base) remember(area, top);
    // Its stack was left further in, and what was running there was left by longjmp since.
    SumPosition left = take_left(area, calls, call.base);
    if (left.slot && left.slot < call.slot) mark_left(calls, left, self);
  }
  leave_to_caller(area, calls, self);
}

void sum_end_abandoned(SumArea* area, SumCall* calls, uint32_t index, uint32_t site, uint64_t entry_ticks,
                       uint64_t now) {
  SumCall& call = calls[index];
  if (!call.slot) return;
  uint64_t end = call.left_ticks ? call.left_ticks : now;
  sum_count_end(area, call, site, ExitKind::abandoned, end - entry_ticks);
  if (area->top.call == index + 1) leave_to_caller(area, calls, {call.slot, index + 1, call.node, call.base, 0});
  call.slot = 0;
}

}  // namespace sonde
